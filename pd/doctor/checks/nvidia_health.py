"""NVIDIA GPUs: health, and how they reach each other and the network. All from NVML and the PCI bus."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from pd.doctor.answers import Nvml, NvmlGpu
from pd.doctor.check import Check
from pd.doctor.machine import Access, Machine, Silence, Why
from pd.doctor.pci import NVIDIA, gpus, pci_devices
from pd.doctor.readings import count, human
from pd.doctor.result import Result, fail, passed, skip, warn
from pd.doctor.topology import judge_nics

NONE = "no NVIDIA GPU here"


def memory(machine: Machine) -> Result:
    """GPU memory, and who has taken some already.

    Asks NVML. A process left behind shows as "CUDA out of memory" at start.
    """

    def taken(gpu: NvmlGpu) -> str:
        used = f"{human(gpu.memory_used)} of {human(gpu.memory)} used"
        return used if gpu.memory_used > gpu.memory / 10 else ""

    return _judge(
        machine,
        taken,
        good=lambda found: f"{count(len(found), 'GPU')}: {found[0].name}, {human(min(g.memory for g in found))} each",
        means="Weights and pool get less than they count on.",
        fix="nvidia-smi --query-compute-apps=pid,name,used_memory --format=csv names who holds it",
    )


def ecc(machine: Machine) -> Result:
    """Memory errors that the GPU could not correct, and rows waiting to be replaced.

    Asks NVML for uncorrected errors and row remapping. They show as Xid 48, 63, 64, 94, 95 in dmesg, or as wrong
    answers.
    """

    def broken(gpu: NvmlGpu) -> str:
        if gpu.remap_failed:
            return "row remapping failed: replace the card"
        if gpu.remap_pending:
            return "a row waits for a reset to be replaced"
        return count(gpu.uncorrected, "uncorrected error") if gpu.uncorrected else ""

    return _judge(
        machine,
        broken,
        good=lambda found: "no uncorrected error" if any(g.ecc for g in found) else "off, or the cards have none",
        means="Results may be wrong, or processes be killed (Xid 94, 95).",
        fix="end its processes and reset the card: sudo nvidia-smi --gpu-reset -i <index>; if it returns, replace it",
        worst=fail,
    )


def persistence(machine: Machine) -> Result:
    """Persistence mode.

    Asks NVML. Without it the driver unloads when the last process ends: the next start costs seconds, settings
    are lost.
    """
    return _judge(
        machine,
        lambda gpu: "off" if gpu.persistence is False else "",
        good=lambda found: "on",
        means="Each start of a process waits seconds for the driver; clocks and settings are forgotten.",
        fix="sudo systemctl enable --now nvidia-persistenced (or: sudo nvidia-smi -pm 1)",
    )


def mig(machine: Machine) -> Result:
    """Whether a GPU is cut into instances (MIG).

    Asks NVML. Instances have neither NVLink nor peer-to-peer: TP over them fails or goes through the host.
    """
    return _judge(
        machine,
        lambda gpu: "on" if gpu.mig else "",
        good=lambda found: "off",
        means="Instances have no NVLink and no peer-to-peer copies; TP over them crawls, and KV goes through the host.",
        fix="sudo nvidia-smi -i <index> -mig 0",
    )


def clocks(machine: Machine) -> Result:
    """Whether a GPU is held below its clocks now.

    Asks NVML for the reasons: heat, power brake, hardware slowdown.
    """
    return _judge(
        machine,
        lambda gpu: ", ".join(gpu.throttled),
        good=lambda found: "none held back",
        means="The GPU runs slower than it should.",
        fix="check cooling and power; nvidia-smi -q -d PERFORMANCE,TEMPERATURE,POWER",
    )


def bar1(machine: Machine) -> Result:
    """The window of GPU memory that other devices reach (BAR1).

    Asks NVML. RDMA can register no more than it: with 256 MiB a pool fails ("Cannot allocate memory").
    """
    return _judge(
        machine,
        lambda gpu: f"{human(gpu.bar1)} for {human(gpu.memory)}" if gpu.bar1 and gpu.bar1 < gpu.memory else "",
        good=lambda found: f"covers all memory ({human(min(g.bar1 or g.memory for g in found))})",
        means="Only that much GPU memory can be registered with a NIC; a larger pool fails.",
        fix="BIOS: Above 4G Decoding and Resizable BAR on; some workstation cards: NVIDIA's displaymodeselector",
    )


def nvlink(machine: Machine) -> Result:
    """NVLink between GPUs.

    Asks NVML for each link's state. Without NVLink UCX says "cuda-ipc get zcopy disabled as no nvlinks
    detected", and TP and KV go over PCI Express.
    """
    return _judge(
        machine,
        lambda gpu: f"{gpu.links_down} of {gpu.links_up + gpu.links_down} links down" if gpu.links_down else "",
        good=lambda found: (
            f"{found[0].links_up} links a GPU up" if found[0].links_up else "none: TP and KV go over PCI Express"
        ),
        means="Collectives run at the speed of the weakest GPU, or fail.",
        fix="nvidia-smi nvlink -s; sudo dmesg | grep -i nvlink; reset the GPU, reseat the bridge",
    )


def p2p(machine: Machine) -> Result:
    """Which GPUs copy straight into which others.

    Asks NVML for the peer-to-peer matrix (as `nvidia-smi topo -p2p r`). Where it says no, NCCL and UCX copy through the
    host; GeForce cards say no by the driver's choice.
    """
    answer = _nvml(machine)
    if isinstance(answer, Result):
        return answer
    if len(answer.gpus) < 2:
        return skip("only one GPU")
    refused = {
        (i, j): word for i, row in enumerate(answer.p2p) for j, word in enumerate(row) if word not in ("ok", "self")
    }
    if refused:
        (i, j), word = next(iter(refused.items()))
        return warn(
            f"{len(refused) // 2} of {count(len(answer.gpus) * (len(answer.gpus) - 1) // 2, 'pair')} refuse: {word}",
            "These pairs copy through the host's memory.",
            "chipset not supported or disabled: see rdma.acs and rdma.iommu; GPU not supported: the card has none",
            f"first: GPU {i} and GPU {j}",
        )
    return passed(f"all {count(len(answer.gpus) * (len(answer.gpus) - 1) // 2, 'pair')}")


def fabric(machine: Machine) -> Result:
    """NVSwitch fabric: fabric manager, and IMEX channels for racks that share one fabric.

    Looks for NVSwitches on the PCI bus, asks NVML for each GPU's fabric state, and lists
    /dev/nvidia-caps-imex-channels. Without the fabric manager CUDA fails with error 802, "system not yet initialized";
    without a channel with "cuMemImportFromShareableHandle failed: invalid resource handle".
    """
    answer = _nvml(machine)
    if isinstance(answer, Result):
        return answer
    switches = [d for d in pci_devices(machine) if d.vendor == "0x10de" and d.kind.startswith("0x0680")]
    states = {g.fabric for g in answer.gpus if g.fabric}
    if not switches and not states:
        return skip("no NVSwitch here")
    read = f"{count(len(switches), 'NVSwitch')}, fabric state {' and '.join(sorted(states)) or 'unknown'}"
    if states - {"completed", "completed: success"}:
        return fail(
            read,
            "The GPUs wait for the fabric manager: CUDA fails with error 802, 'system not yet initialized'.",
            "sudo systemctl enable --now nvidia-fabricmanager (its version must equal the driver's), then "
            "systemctl status nvidia-fabricmanager",
        )
    channels = machine.list("/dev/nvidia-caps-imex-channels")
    return passed(read, f"IMEX channels: {len(channels) or 'none (needed only between nodes of one NVLink rack)'}")


def nics(machine: Machine) -> Result:
    """Which NIC each GPU should use.

    Compares the PCI paths of GPUs and RDMA devices: PIX and PXB (only bridges between) are good, PHB, NODE and
    SYS pass a CPU. Same words as `nvidia-smi topo -m`.
    """
    found = gpus(machine, NVIDIA)
    return judge_nics(machine, found) if found else skip(NONE)


def _judge(
    machine: Machine,
    odd: Callable[[NvmlGpu], str],
    *,
    good: Callable[[Sequence[NvmlGpu]], str],
    means: str,
    fix: str,
    worst: Callable[..., Result] = warn,
) -> Result:
    """One judgement over all GPUs: `odd` says what is wrong with one, or nothing."""
    answer = _nvml(machine)
    if isinstance(answer, Result):
        return answer
    said = [(i, odd(g)) for i, g in enumerate(answer.gpus)]
    wrong = [f"GPU {i}: {text}" for i, text in said if text]
    if wrong:
        more = f" and {len(wrong) - 1} more" if len(wrong) > 1 else ""
        return worst(wrong[0] + more, means, fix, *wrong)
    return passed(good(answer.gpus))


def _nvml(machine: Machine) -> Nvml | Result:
    """NVML's answer; or the reason to skip, where it has none or no GPU."""
    if not gpus(machine, NVIDIA) and machine.access("/dev/nvidiactl") is Access.ABSENT:
        return skip(NONE)
    answer = machine.ask(Nvml)
    if isinstance(answer, Silence):
        missing = answer.why is Why.MISSING
        return skip(
            "NVML not asked: pip install nvidia-ml-py" if missing else "NVML does not answer: see nvidia.driver"
        )
    return answer if answer.gpus else skip("NVML lists no GPU")


CHECKS = (
    Check("nvidia.memory", "GPU memory", memory),
    Check("nvidia.ecc", "ECC", ecc),
    Check("nvidia.persistence", "Persistence", persistence),
    Check("nvidia.mig", "MIG", mig),
    Check("nvidia.clocks", "Clocks", clocks),
    Check("nvidia.bar1", "BAR1", bar1),
    Check("nvidia.nvlink", "NVLink", nvlink),
    Check("nvidia.p2p", "Peer to peer", p2p),
    Check("nvidia.fabric", "Fabric", fabric),
    Check("nvidia.nics", "Nearest NICs", nics),
)
