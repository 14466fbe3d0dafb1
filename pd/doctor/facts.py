"""What two hosts must agree on: gathered here, compared side by side in checks/peer."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from pd import __version__
from pd.doctor.answers import Packages
from pd.doctor.machine import Machine, Silence
from pd.doctor.pci import AMD, NVIDIA, gpus
from pd.doctor.rdma import best_gid, rdma_devices
from pd.runtime.wire.values import WIRE_VERSION

VARIABLES = ("UCX_TLS", "UCX_NET_DEVICES", "UCX_IB_GID_INDEX", "MC_GID_INDEX", "NCCL_IB_GID_INDEX")
LIBRARIES = ("torch", "nixl", "ucx", "mooncake-transfer-engine", "mooncake-transfer-engine-non-cuda")
ABSENT = "-"


class Matters(enum.Enum):
    NO = "no"
    MAYBE = "maybe"  # WARN
    YES = "yes"  # FAIL


@dataclass(frozen=True, slots=True)
class Difference:
    name: str
    here: str
    there: str
    matters: Matters


def gather(machine: Machine) -> dict[str, str]:
    """Name -> value; "-" where there is none."""
    packages = machine.ask(Packages)
    versions = {} if isinstance(packages, Silence) else packages.versions
    devices = [d for d in rdma_devices(machine) if any(p.is_up for p in d.ports)]
    ports = [p for d in devices for p in d.ports if p.is_up]
    gids = {best.index for p in ports if (best := best_gid(p))}
    facts = {
        "pd": __version__,
        "wire version": str(WIRE_VERSION),
        **{name: versions.get(name, ABSENT) for name in LIBRARIES},
        "kernel": machine.read("/proc/sys/kernel/osrelease") or ABSENT,
        "GPUs": f"{len(gpus(machine, NVIDIA))} NVIDIA, {len(gpus(machine, AMD))} AMD",
        "RDMA link layer": " and ".join(sorted({p.layer for p in ports})) or ABSENT,
        "RDMA ports": str(len(ports)),
        "RDMA rate Gbit/s": f"{max((p.rate for p in ports), default=0):g}",
        "RoCE GID index": " and ".join(map(str, sorted(gids))) or ABSENT,
        **{name: machine.env.get(name, ABSENT) for name in VARIABLES},
    }
    return {name: value[:512] for name, value in facts.items()}


MATTERS = {
    "wire version": Matters.YES,
    "pd": Matters.MAYBE,
    "torch": Matters.MAYBE,
    "nixl": Matters.YES,
    "mooncake-transfer-engine": Matters.MAYBE,
    "mooncake-transfer-engine-non-cuda": Matters.MAYBE,
    "RDMA link layer": Matters.YES,
    "UCX_TLS": Matters.MAYBE,
}
"""All else may differ: shapes, kernels, cards, which port is which. nixl's metadata must be of one version; a
library that one side lacks is that backend's own check."""


def differences(here: dict[str, str], there: dict[str, str]) -> tuple[Difference, ...]:
    found = []
    for name in dict.fromkeys((*here, *there)):
        mine, theirs = here.get(name, ABSENT), there.get(name, ABSENT)
        if mine == theirs:
            continue
        alone = ABSENT in (mine, theirs) and name in LIBRARIES
        found.append(Difference(name, mine, theirs, Matters.NO if alone else MATTERS.get(name, Matters.NO)))
    return tuple(found)
