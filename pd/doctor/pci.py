"""PCI devices as sysfs shows them, and how far apart two of them are. Pure but for the seam."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from pd.doctor.machine import Machine

NVIDIA, AMD, MELLANOX, AMAZON, BROADCOM = "0x10de", "0x1002", "0x15b3", "0x1d0f", "0x14e4"


@dataclass(frozen=True, slots=True)
class Pci:
    address: str  # 0000:18:00.0
    vendor: str  # 0x10de
    device: str
    kind: str  # class, "0x030200"
    path: str  # /sys/devices/pci0000:15/0000:15:01.0/…/0000:18:00.0: its bridges, outermost first
    numa: int | None
    speed: str  # current link, "32.0 GT/s PCIe"
    speed_max: str
    width: int | None
    width_max: int | None

    @property
    def is_display(self) -> bool:
        """A GPU: VGA, 3D or display controller, or processing accelerator (MI300X)."""
        return self.kind.startswith(("0x03", "0x12"))

    @property
    def is_degraded(self) -> bool:
        slower = bool(self.speed and self.speed_max) and _gts(self.speed) < _gts(self.speed_max)
        narrower = bool(self.width and self.width_max) and (self.width or 0) < (self.width_max or 0)
        return slower or narrower


class Distance(enum.IntEnum):
    """`nvidia-smi topo` words. Up to PXB, bytes go from GPU to NIC without passing a CPU's root complex."""

    PIX = 0  # one bridge between
    PXB = 1  # several bridges, no host bridge
    PHB = 2  # through one host bridge
    NODE = 3  # between host bridges of a NUMA node
    SYS = 4  # between NUMA nodes


def pci_devices(machine: Machine) -> tuple[Pci, ...]:
    return tuple(pci_device(machine, a) for a in machine.list("/sys/bus/pci/devices"))


def pci_device(machine: Machine, address: str) -> Pci:
    folder = f"/sys/bus/pci/devices/{address}"

    def read(name: str) -> str:
        return machine.read(f"{folder}/{name}") or ""

    def number(name: str) -> int | None:
        text = read(name)
        return int(text) if text.lstrip("-").isdigit() and int(text) >= 0 else None

    return Pci(
        address=address,
        vendor=read("vendor"),
        device=read("device"),
        kind=read("class"),
        path=machine.resolve(folder) or folder,
        numa=number("numa_node"),
        speed=read("current_link_speed"),
        speed_max=read("max_link_speed"),
        width=number("current_link_width"),
        width_max=number("max_link_width"),
    )


def gpus(machine: Machine, vendor: str) -> tuple[Pci, ...]:
    return tuple(d for d in pci_devices(machine) if d.vendor == vendor and d.is_display)


def distance(a: Pci, b: Pci) -> Distance:
    """By the bridges that two device paths share."""
    mine, theirs = _bridges(a), _bridges(b)
    shared = sum(1 for x, y in zip(mine, theirs, strict=False) if x == y)
    if shared == 0 or mine[0] != theirs[0]:
        known = a.numa is not None and b.numa is not None
        return Distance.NODE if known and a.numa == b.numa else Distance.SYS
    if shared == 1:
        return Distance.PHB
    return Distance.PIX if len(mine) - shared <= 1 and len(theirs) - shared <= 1 else Distance.PXB


def _bridges(device: Pci) -> list[str]:
    """["pci0000:15", "0000:15:01.0", …] without the device itself."""
    return device.path.removeprefix("/sys/devices/").split("/")[:-1]


def _gts(speed: str) -> float:
    """ "32.0 GT/s PCIe" -> 32.0; what does not begin with a number ("Unknown") -> 0."""
    first = speed.split()[0]
    return float(first) if first.replace(".", "", 1).isdigit() else 0.0
