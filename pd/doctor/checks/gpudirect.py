"""GPUDirect RDMA: whether a NIC may read and write GPU memory itself. Where this is missing people meet
"Failed to register memory …: Bad address [14]" and nothing else."""

from __future__ import annotations

import re

from pd.doctor.answers import Gdr, Nvml, Torch
from pd.doctor.check import Check
from pd.doctor.machine import Access, Machine, Silence
from pd.doctor.pci import AMD, NVIDIA, gpus
from pd.doctor.rdma import has_rdma, rdma_devices
from pd.doctor.readings import count, kernel_option, kernel_version
from pd.doctor.result import Result, fail, passed, skip, warn

NONE = "no GPU with an RDMA device here"
OLD, NEW, AMAZON = "nv_peer_mem", "nvidia_peermem", "efa_nv_peermem"


def nvidia(machine: Machine) -> Result:
    """The way from NIC to NVIDIA memory: the peer-memory module, or dma-buf.

    Reads /sys/module/nvidia_peermem (nv_peer_mem is its predecessor; never both; efa_nv_peermem on EFA), or for
    dma-buf: "Open Kernel Module" in /proc/driver/nvidia/version, kernel 5.12 or newer, CONFIG_PCI_P2PDMA,
    CONFIG_DMABUF_MOVE_NOTIFY. Missing, it shows as Mooncake's "Failed to register memory <address>: Bad address
    [14]", as UCX's "ibv_reg_dmabuf_mr(…) failed: Invalid argument", or as nothing but slowness: bytes go through
    the host.
    """
    if not gpus(machine, NVIDIA) or not has_rdma(machine):
        return skip(NONE if not has_rdma(machine) else "no NVIDIA GPU with an RDMA device here")
    names = _card_names(machine)
    consumer = [n for n in names if "GeForce" in n or "TITAN" in n]
    if consumer:
        return fail(
            consumer[0],
            "Consumer cards have no GPUDirect RDMA; registering their memory fails with 'Bad address [14]'.",
            "use host staging: UCX_IB_GPU_DIRECT_RDMA=no, or --transfer tcp",
        )
    loaded = [m for m in (NEW, OLD, AMAZON) if machine.list(f"/sys/module/{m}")]
    if NEW in loaded and OLD in loaded:
        return fail(
            "nvidia_peermem and nv_peer_mem are both loaded",
            "The old module and the driver's own register the same memory; registration fails or leaks.",
            "sudo rmmod nv_peer_mem && sudo apt remove nvidia-peer-memory-dkms",
        )
    lacks = _lacks_dmabuf(machine)
    if loaded:
        return passed(f"{' and '.join(loaded)} loaded" + ("" if lacks else ", dma-buf possible too"))
    if not lacks:
        return _dmabuf(machine)
    return fail(
        f"no nvidia_peermem, and dma-buf lacks {'; '.join(lacks)}",
        "NICs cannot register GPU memory: 'Failed to register memory …: Bad address [14]', or silent "
        "copies through the host.",
        "sudo modprobe nvidia_peermem (built only if the RDMA drivers were installed before the NVIDIA driver: else "
        "reinstall that)\nor: the open kernel modules (apt install nvidia-open) on kernel 5.12 or newer with "
        "CONFIG_PCI_P2PDMA=y\nin a container: on the host",
    )


def _card_names(machine: Machine) -> list[str]:
    """From NVML, else from the driver's own files."""
    answer = machine.ask(Nvml)
    if isinstance(answer, Nvml):
        return [g.name for g in answer.gpus]
    root = "/proc/driver/nvidia/gpus"
    texts = [machine.read(f"{root}/{g}/information") or "" for g in machine.list(root)]
    return [found[1].strip() for t in texts if (found := re.search(r"Model:\s*(.*)", t))]


def _dmabuf(machine: Machine) -> Result:
    release = ".".join(map(str, kernel_version(machine)))
    if kernel_option(machine, "DMABUF_MOVE_NOTIFY") is False:
        return warn(
            f"dma-buf: open kernel modules, kernel {release}, but no CONFIG_DMABUF_MOVE_NOTIFY",
            "UCX takes dma-buf so; Mooncake checks for this option and refuses.",
            "sudo modprobe nvidia_peermem, or boot a kernel with CONFIG_DMABUF_MOVE_NOTIFY=y",
        )
    if machine.env.get("WITH_NVIDIA_PEERMEM", "0") not in ("0", ""):
        return fail(
            "dma-buf is possible, but WITH_NVIDIA_PEERMEM asks for nvidia_peermem, which is not loaded",
            "Mooncake will fail with 'Bad address [14]'.",
            "export WITH_NVIDIA_PEERMEM=0, or sudo modprobe nvidia_peermem",
        )
    return passed(f"dma-buf: open kernel modules, kernel {release}", "Mooncake: export WITH_NVIDIA_PEERMEM=0")


def _lacks_dmabuf(machine: Machine) -> list[str]:
    lacks = []
    if "Open Kernel Module" not in (machine.read("/proc/driver/nvidia/version") or ""):
        lacks.append("the open kernel modules")
    if kernel_version(machine) < (5, 12):
        lacks.append(f"kernel 5.12 (this is {machine.read('/proc/sys/kernel/osrelease')})")
    if _has_p2pdma(machine) is False:
        lacks.append("CONFIG_PCI_P2PDMA")
    return lacks


def _has_p2pdma(machine: Machine) -> bool | None:
    """By the kernel's configuration, else by a symbol that only that option makes."""
    configured = kernel_option(machine, "PCI_P2PDMA")
    if configured is not None:
        return configured
    output = machine.run("grep", "-c", "pci_p2pdma_distance_many", "/proc/kallsyms")
    return output.text.strip() != "0" if output else None


def amd(machine: Machine) -> Result:
    """The way from NIC to AMD memory: dma-buf, or amdgpu's old peer memory.

    Reads CONFIG_PCI_P2PDMA, CONFIG_DMABUF_MOVE_NOTIFY, CONFIG_HSA_AMD_P2P of the running kernel, or
    /sys/kernel/mm/memory_peers/amdkfd/version. Missing, Mooncake says "Kernel lacks CONFIG_PCI_P2PDMA /
    CONFIG_DMABUF_MOVE_NOTIFY … falling back to ibv_reg_mr() (which requires an amdgpu peermem driver)", then "Failed to
    register memory". UCX built without rocm_ipc emulates over TCP at 0.25 GB/s.
    """
    if not gpus(machine, AMD) or not has_rdma(machine):
        return skip(NONE if not has_rdma(machine) else "no AMD GPU with an RDMA device here")
    peer = machine.read("/sys/kernel/mm/memory_peers/amdkfd/version")
    if peer:
        return passed(f"amdkfd peer memory {peer}")
    options = {o: kernel_option(machine, o) for o in ("PCI_P2PDMA", "DMABUF_MOVE_NOTIFY", "HSA_AMD_P2P")}
    lacks = [f"CONFIG_{name}" for name, on in options.items() if on is False]
    if kernel_version(machine) < (5, 12):
        lacks.insert(0, "kernel 5.12")
    if lacks:
        return fail(
            f"no peer-memory module, and the kernel lacks {', '.join(lacks)}",
            "NICs cannot register GPU memory: 'Failed to register memory', or copies through the host.",
            "boot a kernel with these options =y (Ubuntu's HWE kernels have them), or install "
            "amdgpu-dkms with peer memory",
        )
    if machine.env.get("MOONCAKE_DISABLE_HIP_DMABUF") not in (None, "", "0"):
        return fail(
            "dma-buf is possible, but MOONCAKE_DISABLE_HIP_DMABUF is set",
            "Mooncake then needs a peer-memory module, which is not loaded.",
            "unset MOONCAKE_DISABLE_HIP_DMABUF",
        )
    if None in options.values():
        return warn(
            "the running kernel's options are not readable",
            "Whether dma-buf works is unknown.",
            "grep -E 'PCI_P2PDMA|DMABUF_MOVE_NOTIFY|HSA_AMD_P2P' /boot/config-$(uname -r) on the host",
        )
    return passed("dma-buf: the kernel has all three options")


def gdrcopy(machine: Machine) -> Result:
    """GDRCopy, for small copies between host and NVIDIA memory.

    Reads /sys/module/gdrdrv and /dev/gdrdrv. libfabric's EFA provider needs it for GPU memory; UCX works without.
    """
    if not gpus(machine, NVIDIA):
        return skip("no NVIDIA GPU here" if gpus(machine, AMD) else NONE)
    loaded = bool(machine.list("/sys/module/gdrdrv"))
    access = machine.access("/dev/gdrdrv")
    if access is Access.READ_WRITE:
        return passed("gdrdrv loaded, /dev/gdrdrv open")
    if any(d.is_efa for d in rdma_devices(machine)):
        return warn(
            "gdrdrv is loaded, but /dev/gdrdrv is not open here" if loaded else "gdrdrv is not loaded",
            "libfabric on EFA needs it for GPU memory.",
            "on the host: install gdrcopy, sudo modprobe gdrdrv; docker: --device=/dev/gdrdrv",
        )
    return skip("not there; UCX works without, small messages cost more")


def ucx(machine: Machine) -> Result:
    """Whether UCX lists GPU memory among what each adapter registers.

    Reads `ucx_info -d`. Where the adapter's memory types lack cuda (rocm), UCX copies through the host and says
    nothing.
    """
    kind = "cuda" if gpus(machine, NVIDIA) else "rocm" if gpus(machine, AMD) else ""
    if not kind or not has_rdma(machine):
        return skip(NONE)
    output = machine.run("ucx_info", "-d")
    if output is None or output.code:
        return skip("no `ucx_info` command (nixl's own UCX has none)")
    domains = re.split(r"# Memory domain:", output.text)[1:]
    ib = [d for d in domains if re.search(r"Component:\s*ib\b", d)]
    types = [found[1] for d in ib if (found := re.search(r"memory types:(.*)", d))]
    if not types:
        return warn(
            "UCX lists no RDMA adapter",
            "This UCX was built without verbs, or may not open the adapters.",
            "see rdma.verbs; ucx_info -v shows how it was built (--with-verbs)",
        )
    without = [t for t in types if f"{kind} (" not in t]
    if without:
        return warn(
            f"{len(without)} of {count(len(types), 'adapter')} lack {kind} memory",
            "UCX copies through the host for them, and says nothing.",
            f"see gpudirect.{'nvidia' if kind == 'cuda' else 'amd'}; UCX must be built --with-{kind}",
        )
    return passed(f"{kind} memory on {count(len(types), 'adapter')}")


def proof(machine: Machine) -> Result:
    """The proof: GPU memory registered with each NIC, then written through one and compared.

    Allocates a page on the first GPU, asks libibverbs to register it (ibv_reg_mr, then ibv_reg_dmabuf_mr), and
    lets nixl write it to another page through a NIC. Frees all of it.
    """
    kind = "NVIDIA" if gpus(machine, NVIDIA) else "AMD" if gpus(machine, AMD) else ""
    if not kind or not has_rdma(machine):
        return skip(NONE)
    torch = machine.ask(Torch)
    if isinstance(torch, Silence) or not torch.available:
        return skip("torch sees no GPU")
    answer = machine.ask(Gdr)
    if isinstance(answer, Silence):
        return fail(
            f"{answer.why.value}: {answer.reason}",
            "Registering GPU memory ended the process.",
            f"see gpudirect.{kind.lower()}",
        )
    failed = {nic: said for nic, said in answer.registered.items() if said not in ("peermem", "dma-buf")}
    details = tuple(f"{nic}: {said}" for nic, said in answer.registered.items())
    if failed or not answer.registered:
        nic, said = next(iter(failed.items()), ("none", answer.error))
        return fail(
            f"{len(answer.registered) - len(failed)} of {count(len(answer.registered), 'NIC')} "
            f"registered a page; {nic}: {said}",
            "The NIC cannot reach GPU memory.",
            f"see gpudirect.{kind.lower()}; machine.memlock; rdma.iommu",
            *details,
        )
    ways = " and ".join(sorted(set(answer.registered.values())))
    read = f"{count(len(answer.registered), 'NIC')} registered a page by {ways}"
    if answer.wrote is False:
        return fail(
            f"{read}; the write through it: {answer.error}",
            "Registered, but bytes do not arrive.",
            "see rdma.acs and rdma.iommu",
            *details,
        )
    return passed(
        read + (", a write through one arrived" if answer.wrote else f"; no write tried ({answer.error})"), *details
    )


CHECKS = (
    Check("gpudirect.nvidia", "NVIDIA memory to NIC", nvidia),
    Check("gpudirect.amd", "AMD memory to NIC", amd),
    Check("gpudirect.gdrcopy", "GDRCopy", gdrcopy),
    Check("gpudirect.ucx", "UCX memory types", ucx),
    Check("gpudirect.proof", "Proof", proof),
)
