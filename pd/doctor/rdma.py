"""RDMA devices as sysfs, ibv_devinfo and lspci show them. Pure but for the seam."""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass

from pd.doctor.machine import Machine
from pd.doctor.pci import AMAZON, MELLANOX, Pci, pci_device, pci_devices

ROOT = "/sys/class/infiniband"


@dataclass(frozen=True, slots=True)
class Gid:
    index: int
    address: ipaddress.IPv6Address
    kind: str  # "RoCE v2" | "IB/RoCE v1"
    netdev: str

    @property
    def is_routable(self) -> bool:
        """RoCE v2 on an address that is not link-local: what every library should use."""
        return self.kind == "RoCE v2" and not self.address.is_link_local

    @property
    def text(self) -> str:
        return str(self.address.ipv4_mapped or self.address)


@dataclass(frozen=True, slots=True)
class Port:
    number: int
    state: str  # "ACTIVE"
    physical: str  # "LinkUp"
    layer: str  # "InfiniBand" | "Ethernet" | "Unspecified" (EFA)
    rate: float  # Gbit/s
    lid: int
    pkeys: tuple[int, ...]
    gids: tuple[Gid, ...]

    @property
    def is_up(self) -> bool:
        return self.state == "ACTIVE"


@dataclass(frozen=True, slots=True)
class RdmaDevice:
    name: str
    driver: str  # mlx5_core, bnxt_en, efa …; "" unknown
    firmware: str
    board: str
    pci: Pci | None
    netdevs: tuple[str, ...]
    ports: tuple[Port, ...]

    @property
    def is_efa(self) -> bool:
        return self.driver == "efa"


def has_rdma(machine: Machine) -> bool:
    return bool(machine.list(ROOT))


def rdma_devices(machine: Machine) -> tuple[RdmaDevice, ...]:
    return tuple(_device(machine, name) for name in machine.list(ROOT))


def best_gid(port: Port) -> Gid | None:
    """The routable RoCE v2 entry that libraries would choose: IPv4-mapped ones first, then the lowest index."""
    routable = [g for g in port.gids if g.is_routable]
    return min(routable, key=lambda g: (g.address.ipv4_mapped is None, g.index), default=None)


def hidden_nics(machine: Machine) -> tuple[Pci, ...]:
    """PCI devices that would be RDMA devices had they a driver, or were they let into this container."""
    return tuple(
        d
        for d in pci_devices(machine)
        if d.kind.startswith("0x0207")
        or (d.vendor == MELLANOX and d.kind.startswith("0x0200"))
        or (d.vendor == AMAZON and d.device.startswith("0xefa"))
    )


def netdev_mtu(machine: Machine, netdev: str) -> int | None:
    text = machine.read(f"/sys/class/net/{netdev}/mtu")
    return int(text) if text and text.isdigit() else None


def devinfo(machine: Machine) -> dict[str, dict[str, str]]:
    """`ibv_devinfo -v`, device -> its values (of its last port where ports repeat a name); empty without the
    command."""
    output = machine.run("ibv_devinfo", "-v")
    found: dict[str, dict[str, str]] = {}
    current: dict[str, str] = {}
    for line in output.text.splitlines() if output else ():
        key, colon, value = line.partition(":")
        if key.strip() == "hca_id":
            current = found.setdefault(value.strip(), {})
        elif colon:
            current[key.strip()] = value.strip()
    return found


def number(values: dict[str, str], name: str) -> int | None:
    """The leading number of `4096 (5)` or `0xffff…`."""
    words = values.get(name, "").split()
    try:
        return int(words[0], 0) if words else None
    except ValueError:
        return None


def lspci(machine: Machine) -> dict[str, str]:
    """`lspci -D -vvv`, address -> its block; empty without the command."""
    output = machine.run("lspci", "-D", "-vvv")
    blocks = re.split(r"\n\s*\n", output.text) if output and output.code == 0 else []
    return {block.strip().split()[0]: block for block in blocks if block.strip()}


def _device(machine: Machine, name: str) -> RdmaDevice:
    folder = f"{ROOT}/{name}"
    where = machine.resolve(f"{folder}/device")
    driver = machine.resolve(f"{folder}/device/driver") or ""
    return RdmaDevice(
        name=name,
        driver=driver.rpartition("/")[2],
        firmware=machine.read(f"{folder}/fw_ver") or "",
        board=machine.read(f"{folder}/board_id") or "",
        pci=pci_device(machine, where.rpartition("/")[2]) if where else None,
        netdevs=machine.list(f"{folder}/device/net"),
        ports=tuple(_port(machine, f"{folder}/ports/{p}", int(p)) for p in machine.list(f"{folder}/ports")),
    )


def _port(machine: Machine, folder: str, port: int) -> Port:
    def read(name: str) -> str:
        return machine.read(f"{folder}/{name}") or ""

    rate = read("rate").split()
    pkeys = (read(f"pkeys/{i}") for i in machine.list(f"{folder}/pkeys"))
    gids = (_gid(machine, folder, int(i)) for i in machine.list(f"{folder}/gids"))
    return Port(
        number=port,
        state=read("state").partition(":")[2].strip(),
        physical=read("phys_state").partition(":")[2].strip(),
        layer=read("link_layer"),
        rate=float(rate[0]) if rate else 0.0,
        lid=int(read("lid") or "0", 0),
        pkeys=tuple(int(p, 0) for p in pkeys if p),
        gids=tuple(g for g in gids if g is not None),
    )


def _gid(machine: Machine, folder: str, index: int) -> Gid | None:
    address = machine.read(f"{folder}/gids/{index}")
    if not address or not address.strip("0:"):
        return None  # an empty row of the table
    kind = machine.read(f"{folder}/gid_attrs/types/{index}") or ""
    netdev = machine.read(f"{folder}/gid_attrs/ndevs/{index}") or ""
    return Gid(index, ipaddress.IPv6Address(address), kind, netdev)
