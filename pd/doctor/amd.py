"""AMD GPUs as amdgpu and KFD show them in sysfs; no library needed. Pure but for the seam."""

from __future__ import annotations

from dataclasses import dataclass

from pd.doctor.machine import Machine
from pd.doctor.pci import AMD, Pci, gpus

XGMI = "11"
"""HSA_IOLINK_TYPE_XGMI of io_links/*/properties; kfd_crat.h (CRAT_IOLINK_TYPE_XGMI)."""


@dataclass(frozen=True, slots=True)
class AmdGpu:
    pci: Pci
    vram: int | None  # bytes
    vram_used: int
    visible: int | None  # bytes that other devices reach: all of it with a large BAR
    compute_partition: str  # SPX, CPX …; "" unknown
    memory_partition: str  # NPS1 …
    uncorrected: int  # umc errors since the driver was loaded


def amd_gpus(machine: Machine) -> tuple[AmdGpu, ...]:
    return tuple(_gpu(machine, d) for d in gpus(machine, AMD))


def xgmi_links(machine: Machine) -> list[int]:
    """How many XGMI links each GPU node of KFD has."""
    root = "/sys/class/kfd/kfd/topology/nodes"
    found = []
    for node in machine.list(root):
        if (machine.read(f"{root}/{node}/gpu_id") or "0") == "0":
            continue  # a CPU node
        links = [
            machine.read(f"{root}/{node}/{kind}/{link}/properties") or ""
            for kind in ("io_links", "p2p_links")
            for link in machine.list(f"{root}/{node}/{kind}")
        ]
        found.append(sum(f"type {XGMI}\n" in text + "\n" for text in links))
    return found


def _gpu(machine: Machine, device: Pci) -> AmdGpu:
    folder = f"/sys/bus/pci/devices/{device.address}"

    def number(name: str) -> int | None:
        text = machine.read(f"{folder}/{name}")
        return int(text) if text and text.isdigit() else None

    errors = machine.read(f"{folder}/ras/umc_err_count") or ""  # "ue: 0\nce: 2"
    return AmdGpu(
        pci=device,
        vram=number("mem_info_vram_total"),
        vram_used=number("mem_info_vram_used") or 0,
        visible=number("mem_info_vis_vram_total"),
        compute_partition=machine.read(f"{folder}/current_compute_partition") or "",
        memory_partition=machine.read(f"{folder}/current_memory_partition") or "",
        uncorrected=next((int(w.split()[1]) for w in errors.splitlines() if w.startswith("ue:")), 0),
    )
