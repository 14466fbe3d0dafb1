"""NVIDIA GPUs: there, in reach, driven by versions that fit."""

from __future__ import annotations

from pd.doctor.answers import Nvml, Torch
from pd.doctor.check import Check
from pd.doctor.machine import Access, Machine, Silence, Why
from pd.doctor.pci import NVIDIA, gpus
from pd.doctor.readings import container, count
from pd.doctor.result import Result, fail, passed, skip

NONE = "no NVIDIA GPU here"


def devices(machine: Machine) -> Result:
    """GPUs on the PCI bus, and the device files through which this process reaches them.

    Reads /sys/bus/pci/devices, /dev/nvidia*, /proc/driver/nvidia/version. A container started without GPUs still
    sees the bus: torch then says "Found no NVIDIA driver on your system" or "no CUDA-capable device is
    detected".
    """
    on_bus = gpus(machine, NVIDIA)
    files = [f for f in machine.list("/dev") if f.startswith("nvidia") and f[6:].isdigit()]
    if not on_bus and not files:
        return skip(NONE)
    boxed = container(machine)
    read = f"{count(len(on_bus), 'GPU')} on the bus, {count(len(files), 'device file')}"
    if not files:
        loaded = machine.read("/proc/driver/nvidia/version") is not None
        if boxed:
            return fail(
                read,
                "The host has GPUs, but this container was not given them.",
                "docker: --gpus all (needs nvidia-container-toolkit); kubernetes: resources.limits.nvidia.com/gpu",
            )
        return fail(
            read,
            "The driver is loaded but made no device files." if loaded else "No NVIDIA driver is loaded.",
            "sudo nvidia-modprobe -c 0 -u" if loaded else "install the NVIDIA driver, or: sudo modprobe nvidia",
        )
    closed = [f for f in (*files, "nvidiactl") if machine.access(f"/dev/{f}") is not Access.READ_WRITE]
    if closed:
        return fail(
            f"{read}; /dev/{closed[0]} is not open for reading and writing",
            "CUDA cannot start in this process.",
            f"sudo chmod 666 /dev/{closed[0]}; in a container also its device cgroup rule (--gpus all)",
        )
    if len(files) < len(on_bus):
        return passed(f"{len(files)} of {count(len(on_bus), 'GPU')} given to this process")
    return passed(read)


def driver(machine: Machine) -> Result:
    """The driver, and whether its kernel and user halves are of one version.

    Reads /proc/driver/nvidia/version and asks NVML. "Driver/library version mismatch" follows an upgrade without
    a reboot.
    """
    text = machine.read("/proc/driver/nvidia/version")
    if not gpus(machine, NVIDIA) and text is None:
        return skip(NONE)
    answer = machine.ask(Nvml)
    kind = "open kernel modules" if text and "Open Kernel Module" in text else "proprietary kernel modules"
    if isinstance(answer, Silence):
        if answer.why is Why.MISSING:
            return skip("NVML not asked: pip install nvidia-ml-py") if text else fail(*_NO_DRIVER)
        if text is None:
            return fail(*_NO_DRIVER)
        mismatch = "mismatch" in answer.reason.lower()
        return fail(
            f"NVML: {answer.reason}",
            "The kernel's half of the driver is older than the libraries."
            if mismatch
            else "The driver does not answer.",
            "reboot (or unload and load the nvidia modules)" if mismatch else "nvidia-smi, then dmesg | grep -i nvrm",
        )
    return passed(f"{answer.driver}, {kind}, runs CUDA up to {answer.cuda}")


_NO_DRIVER = (
    "no /proc/driver/nvidia/version",
    "No NVIDIA driver is loaded.",
    "install the NVIDIA driver and reboot; in a container: --gpus all",
)


def torch_build(machine: Machine) -> Result:
    """Whether this torch was built for CUDA, and for a CUDA that the driver runs.

    Asks torch and NVML. Too old a driver shows as "The NVIDIA driver on your system is too old"; a GPU newer
    than the build as "no kernel image is available for execution on the device".
    """
    if not gpus(machine, NVIDIA) and not machine.list("/proc/driver/nvidia/gpus"):
        return skip(NONE)
    answer, nvml = machine.ask(Torch), machine.ask(Nvml)
    if isinstance(answer, Silence):
        return fail(f"torch: {answer.reason}", "Without torch nothing runs.", "make install")
    if answer.cuda is None:
        return fail(
            f"torch {answer.version} has no CUDA",
            "This build runs on CPUs only; the GPUs stay idle.",
            "pip install torch from the index of your CUDA version",
        )
    if isinstance(nvml, Nvml) and int(answer.cuda.split(".")[0]) > int(nvml.cuda.split(".")[0]):
        return fail(
            f"torch {answer.version} wants CUDA {answer.cuda}, the driver {nvml.driver} runs up to {nvml.cuda}",
            "The driver is too old for this torch.",
            f"upgrade the driver, or install a torch built for CUDA {nvml.cuda} or older",
        )
    if not answer.available:
        return fail(
            f"torch {answer.version}: {answer.error or 'CUDA is not available'}",
            "torch sees no GPU.",
            "nvidia-smi; on machines with NVSwitch see nvidia.fabric (error 802)",
        )
    built = {a.removeprefix("sm_").rstrip("a") for a in answer.arch_list}
    odd = [g for g in answer.gpus if not _has_kernels(g.capability, built)]
    if built and odd:
        return fail(
            f"torch {answer.version} is built for sm {', '.join(sorted(built))}; {odd[0].name} is {odd[0].capability}",
            "It has no kernels for this GPU ('no kernel image is available').",
            "install a torch whose build lists this architecture",
        )
    return passed(f"torch {answer.version}, CUDA {answer.cuda}, sees {count(len(answer.gpus), 'GPU')}")


def _has_kernels(capability: str, built: set[str]) -> bool:
    """Code for sm_90 runs on 9.x of the same major with x at least its own."""
    major, minor = capability.split(".")
    return any(b[:-1] == major and b[-1] <= minor for b in built if b.isdigit())


CHECKS = (
    Check("nvidia.devices", "GPUs", devices),
    Check("nvidia.driver", "Driver", driver),
    Check("nvidia.torch", "torch and CUDA", torch_build),
)
