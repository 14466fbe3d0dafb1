"""Every check, in the order people read them."""

from __future__ import annotations

from pd.doctor.check import Check
from pd.doctor.checks import (
    amd,
    environment,
    fabric,
    gpudirect,
    host,
    memory,
    network,
    nvidia,
    nvidia_health,
    rdma,
    software,
    transfer,
)

HEADINGS = {
    "machine": "Machine",
    "nvidia": "NVIDIA GPUs",
    "amd": "AMD GPUs",
    "rdma": "RDMA",
    "gpudirect": "GPUDirect RDMA",
    "software": "Software",
    "network": "Network",
    "transfer": "Transfer, measured on this host",
    "peer": "The other host",
    "model": "What this launch needs",
}
_ALL = (
    *host.CHECKS,
    *memory.CHECKS,
    *nvidia.CHECKS,
    *nvidia_health.CHECKS,
    *amd.CHECKS,
    *rdma.CHECKS,
    *fabric.CHECKS,
    *gpudirect.CHECKS,
    *software.CHECKS,
    *environment.CHECKS,
    *network.CHECKS,
    *transfer.CHECKS,
)
CHECKS: tuple[Check, ...] = tuple(sorted(_ALL, key=lambda check: list(HEADINGS).index(check.group)))
