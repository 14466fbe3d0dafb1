"""AMD GPUs: there, in reach, driven by versions that fit, and how they reach each other and the network."""

from __future__ import annotations

from pd.doctor.amd import amd_gpus, xgmi_links
from pd.doctor.answers import Torch
from pd.doctor.check import Check
from pd.doctor.machine import Access, Machine, Silence
from pd.doctor.pci import AMD, gpus
from pd.doctor.readings import container, count, fields, human
from pd.doctor.result import Result, fail, passed, skip, warn
from pd.doctor.topology import judge_nics

NONE = "no AMD GPU here"


def devices(machine: Machine) -> Result:
    """GPUs on the PCI bus, /dev/kfd and /dev/dri/renderD*, and whether this user may open them.

    A user outside the groups `render` and `video`, or a container without these devices, sees "no ROCm-capable
    device is detected" or "HIP error: invalid device".
    """
    on_bus = gpus(machine, AMD)
    kfd = machine.access("/dev/kfd")
    if not on_bus and kfd is Access.ABSENT:
        return skip(NONE)
    nodes = [f"/dev/dri/{f}" for f in machine.list("/dev/dri") if f.startswith("renderD")]
    read = f"{count(len(on_bus), 'GPU')} on the bus, {count(len(nodes), 'render node')}"
    if kfd is Access.ABSENT or not nodes:
        missing = "/dev/kfd" if kfd is Access.ABSENT else "/dev/dri/renderD*"
        if container(machine):
            return fail(
                f"{read}; no {missing}",
                "The host has GPUs, but this container was not given them.",
                "docker: --device=/dev/kfd --device=/dev/dri --group-add video --group-add render",
            )
        return fail(
            f"{read}; no {missing}", "The amdgpu driver is not loaded.", "sudo modprobe amdgpu; dmesg | grep amdgpu"
        )
    closed = [f for f in ("/dev/kfd", *nodes) if machine.access(f) is not Access.READ_WRITE]
    if closed:
        groups = fields(machine.read("/proc/self/status")).get("Groups", "")
        return fail(
            f"{read}; {closed[0]} is not open to this user (groups {groups or 'none'})",
            "HIP sees no device.",
            "sudo usermod -aG render,video $USER, then log in again; docker: --group-add the host's ids of both groups",
        )
    return passed(read)


def driver(machine: Machine) -> Result:
    """amdgpu, and the ROCm that is installed.

    Reads /sys/module/amdgpu/version (amdgpu-dkms only; a kernel's own has none) and /opt/rocm/.info/version.
    """
    if not gpus(machine, AMD):
        return skip(NONE)
    if not machine.list("/sys/module/amdgpu"):
        return fail(
            "amdgpu is not loaded", "Nothing can use the GPUs.", "sudo modprobe amdgpu; if missing: install amdgpu-dkms"
        )
    version = machine.read("/sys/module/amdgpu/version") or "the kernel's own"
    rocm = machine.read("/opt/rocm/.info/version")
    return passed(f"amdgpu {version}, ROCm {rocm or 'not in /opt/rocm'}")


def torch_build(machine: Machine) -> Result:
    """Whether this torch was built for HIP, and fits the installed ROCm.

    Asks torch; compares its HIP's major version with /opt/rocm/.info/version. GPUs that the build does not know show as
    "HIP error: invalid device function" (HSA_OVERRIDE_GFX_VERSION hides it at your own risk).
    """
    if not gpus(machine, AMD):
        return skip(NONE)
    answer = machine.ask(Torch)
    if isinstance(answer, Silence):
        return fail(f"torch: {answer.reason}", "Without torch nothing runs.", "make install")
    if answer.hip is None:
        return fail(
            f"torch {answer.version} has no HIP",
            "This build does not know AMD GPUs; they stay idle.",
            "pip install torch from the index of your ROCm version",
        )
    if not answer.available:
        return fail(
            f"torch {answer.version}: {answer.error or 'no device'}",
            "torch sees no GPU.",
            "see amd.devices and amd.driver; rocminfo",
        )
    rocm = machine.read("/opt/rocm/.info/version")
    if rocm and rocm.split(".")[0] != answer.hip.split(".")[0]:
        return warn(
            f"torch {answer.version} is built for HIP {answer.hip}, ROCm {rocm} is installed",
            "Libraries that load /opt/rocm (UCX, RCCL plugins) meet torch's own of another major version.",
            "install the torch of this ROCm, or the ROCm of this torch",
        )
    return passed(f"torch {answer.version}, HIP {answer.hip}, sees {count(len(answer.gpus), 'GPU')}")


def memory(machine: Machine) -> Result:
    """GPU memory, who has taken some already, and errors that could not be corrected.

    Reads mem_info_vram_total, mem_info_vram_used and ras/umc_err_count of each device.
    """
    found = [g for g in amd_gpus(machine) if g.vram]
    if not found:
        return skip(NONE)
    broken = [f"{g.pci.address}: {count(g.uncorrected, 'uncorrected error')}" for g in found if g.uncorrected]
    if broken:
        return fail(
            "; ".join(broken),
            "Results may be wrong, or processes be killed.",
            "end its processes and reset the card: sudo amd-smi reset --gpureset -g <index>; if it returns, replace it",
        )
    taken = [f"{g.pci.address}: {human(g.vram_used)} used" for g in found if g.vram_used > (g.vram or 0) / 10]
    read = f"{count(len(found), 'GPU')}, {human(min(g.vram or 0 for g in found))} each"
    if taken:
        return warn(f"{read}; {taken[0]}", "Weights and pool get less than they count on.", "amd-smi process", *taken)
    return passed(read)


def partition(machine: Machine) -> Result:
    """How each GPU is cut (SPX is whole) and its memory interleaved (NPS1 is whole).

    Reads current_compute_partition and current_memory_partition. In CPX a card is eight small devices.
    """
    modes = {(g.compute_partition, g.memory_partition) for g in amd_gpus(machine) if g.compute_partition}
    if not modes:
        return skip(NONE if not gpus(machine, AMD) else "these GPUs cannot be cut")
    read = ", ".join(f"{c} {m}".strip() for c, m in sorted(modes))
    if any(c != "SPX" for c, _ in modes):
        return warn(
            read,
            "Each device is a part of a card with a part of its memory; weights may not fit, TP needs more ranks.",
            "sudo amd-smi set --compute-partition SPX --memory-partition NPS1",
        )
    return passed(read)


def xgmi(machine: Machine) -> Result:
    """XGMI (Infinity Fabric) between GPUs.

    Reads io_links of KFD's topology. Without it RCCL and UCX go over PCI Express.
    """
    links = xgmi_links(machine)
    if not gpus(machine, AMD) or not links:
        return skip(NONE)
    if len(links) == 1:
        return skip("only one GPU")
    if min(links) != max(links):
        return warn(
            f"{min(links)} to {max(links)} links a GPU",
            "Not every GPU has all its links: collectives run at the weakest one's speed.",
            "amd-smi xgmi; amd-smi topology; sudo dmesg | grep -i xgmi",
        )
    return passed(f"{links[0]} links a GPU" if links[0] else "none: TP and KV go over PCI Express")


def bar(machine: Machine) -> Result:
    """Large BAR: whether other devices reach all of a GPU's memory.

    Compares mem_info_vis_vram_total with mem_info_vram_total. Without it a NIC cannot reach the pool, and GPUs do not
    reach each other over PCI Express.
    """
    found = [g for g in amd_gpus(machine) if g.vram and g.visible is not None]
    if not found:
        return skip(NONE)
    small = [g for g in found if (g.visible or 0) < (g.vram or 0)]
    if small:
        return fail(
            f"{small[0].pci.address}: {human(small[0].visible or 0)} of {human(small[0].vram or 0)} visible",
            "NICs and other GPUs cannot reach this GPU's memory.",
            "BIOS: Above 4G Decoding and Resizable BAR (or SR-IOV's large BAR) on",
        )
    return passed("covers all memory")


def nics(machine: Machine) -> Result:
    """Which NIC each GPU should use.

    Compares the PCI paths of GPUs and RDMA devices: PIX and PXB (only bridges between) are good, PHB, NODE and
    SYS pass a CPU.
    """
    found = gpus(machine, AMD)
    return judge_nics(machine, found) if found else skip(NONE)


CHECKS = (
    Check("amd.devices", "GPUs", devices),
    Check("amd.driver", "Driver", driver),
    Check("amd.torch", "torch and HIP", torch_build),
    Check("amd.memory", "GPU memory", memory),
    Check("amd.partition", "Partitions", partition),
    Check("amd.xgmi", "XGMI", xgmi),
    Check("amd.bar", "Large BAR", bar),
    Check("amd.nics", "Nearest NICs", nics),
)
