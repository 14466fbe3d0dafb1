"""Which NIC each GPU should use, by the PCI bridges between them. Pure but for the seam."""

from __future__ import annotations

from typing import NamedTuple

from pd.doctor.machine import Machine
from pd.doctor.pci import Distance, Pci, distance
from pd.doctor.rdma import RdmaDevice, rdma_devices
from pd.doctor.readings import count
from pd.doctor.result import Result, passed, skip, warn


class Nearest(NamedTuple):
    gpu: Pci
    nic: RdmaDevice
    distance: Distance


def nearest_nics(gpus: tuple[Pci, ...], nics: tuple[RdmaDevice, ...]) -> tuple[Nearest, ...]:
    """One NIC a GPU: the nearest; among equally near ones the one with least GPUs, then the fastest."""
    taken: dict[str, int] = {}
    chosen = []
    for gpu in gpus:
        ranked = [
            (distance(gpu, nic.pci), taken.get(nic.name, 0), -sum(p.rate for p in nic.ports), i, nic)
            for i, nic in enumerate(nics)
            if nic.pci
        ]
        if not ranked:
            continue
        far, _, _, _, nic = min(ranked)
        taken[nic.name] = taken.get(nic.name, 0) + 1
        chosen.append(Nearest(gpu, nic, far))
    return tuple(chosen)


def judge_nics(machine: Machine, gpus: tuple[Pci, ...]) -> Result:
    """PASS when every GPU has a NIC that bytes reach without passing a CPU."""
    nics = tuple(d for d in rdma_devices(machine) if any(p.is_up for p in d.ports))
    pairs = nearest_nics(gpus, nics)
    if not gpus or not pairs:
        return skip("no GPU here" if not gpus else "no active RDMA device here")
    details = tuple(f"GPU {i} ({p.gpu.address}): {p.nic.name} {p.distance.name}" for i, p in enumerate(pairs))
    far = [p for p in pairs if p.distance > Distance.PXB]
    words = "/".join(sorted({p.distance.name for p in pairs}))
    read = f"{count(len(gpus), 'GPU')}, nearest NIC at {words}"
    if far:
        return warn(
            read,
            f"{len(far)} of {count(len(gpus), 'GPU')} reach their NIC only through a CPU: GPUDirect is "
            "slow there, or off.",
            "use slots under one PCI switch; in a virtual machine ask for the host's topology; else give each GPU its "
            "nearest:\n" + "\n".join(f"GPU {i}: UCX_NET_DEVICES={p.nic.name}:1" for i, p in enumerate(pairs)),
            *details,
        )
    return passed(read, *details)
