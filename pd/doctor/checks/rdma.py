"""RDMA devices: there, open to this process, up, and with addresses that reach the other side."""

from __future__ import annotations

from pd.doctor.answers import Verbs
from pd.doctor.check import Check
from pd.doctor.machine import Access, Machine, Silence
from pd.doctor.rdma import (
    RdmaDevice,
    best_gid,
    has_rdma,
    hidden_nics,
    netdev_mtu,
    rdma_devices,
)
from pd.doctor.readings import container, count
from pd.doctor.result import Result, fail, passed, skip, warn

NONE = "no RDMA device here"
JUMBO = 4200
"""An Ethernet MTU that carries RoCE's largest, 4096 bytes and headers."""
LIMITED_PKEY = 0x7FFF


def devices(machine: Machine) -> Result:
    """RDMA devices and the device files through which this process reaches them.

    Reads /sys/class/infiniband, /dev/infiniband and the PCI bus. A container sees the host's sysfs but not its device
    files: Mooncake then says "No RDMA devices found, check your device installation" or "Device … is not accessible for
    read/write", UCX "no active messages transport", nixl NIXL_ERR_BACKEND.
    """
    names = machine.list("/sys/class/infiniband")
    nics = hidden_nics(machine)
    if not names and not nics:
        return skip(NONE)
    boxed = container(machine)
    if not names:
        return fail(
            f"{count(len(nics), 'RDMA adapter')} on the PCI bus, none in /sys/class/infiniband",
            "The adapter's RDMA driver is not loaded"
            + (", or RDMA devices belong to another network namespace." if boxed else "."),
            "on the host: sudo modprobe mlx5_ib (ConnectX), bnxt_re (Broadcom), efa (Amazon)"
            "\na container: --network=host, or `sudo rdma system set netns shared` on the host",
            *(d.address for d in nics),
        )
    files = [f"/dev/infiniband/{f}" for f in machine.list("/dev/infiniband") if f.startswith(("uverbs", "rdma_cm"))]
    closed = [f for f in files if machine.access(f) is not Access.READ_WRITE]
    read = f"{count(len(names), 'device')}: {_span(names)}"
    if not any("uverbs" in f for f in files):
        return fail(
            f"{read}; no /dev/infiniband/uverbs*",
            "The adapters are in sysfs, but this process cannot open them: the container hides the device files."
            if boxed
            else "The adapters are in sysfs, but the user-space driver's device files are missing.",
            "docker: --device=/dev/infiniband (or --privileged)\nkubernetes: request the RDMA device plugin's resource"
            if boxed
            else "sudo modprobe ib_uverbs rdma_ucm",
        )
    if closed:
        return fail(
            f"{read}; {closed[0]} is not open for reading and writing",
            "Every RDMA library fails to open the adapter.",
            "sudo chmod 666 /dev/infiniband/uverbs* /dev/infiniband/rdma_cm (rdma-core's udev rules do this)",
            *closed,
        )
    return passed(f"{read}, {count(len(files), 'device file')} open")


def verbs(machine: Machine) -> Result:
    """Whether libibverbs loads and opens each device.

    Asks libibverbs itself. Without it Mooncake does not import: "libibverbs.so.1: cannot open shared object file";
    nixl's wheels bring their own, which has the provider of mlx5 adapters only. A device without a provider library
    (libmlx5, libefa …) is in sysfs but does not open.
    """
    names = machine.list("/sys/class/infiniband")
    if not names:
        return skip(NONE)
    answer = machine.ask(Verbs)
    if isinstance(answer, Silence):
        return fail(f"libibverbs: {answer.reason}", *_NO_VERBS)
    if answer.error:
        return fail(answer.error, *_NO_VERBS)
    unseen = [n for n in names if n not in answer.devices]
    shut = [n for n in answer.devices if n not in answer.opened]
    if unseen or shut:
        return fail(
            f"libibverbs opens {len(answer.opened)} of {len(names)}",
            f"{_span((*unseen, *shut))}: no provider library, or no device file for it.",
            "apt install ibverbs-providers, or the adapter vendor's package (MLNX_OFED, EFA installer); "
            "then see rdma.devices",
        )
    return passed(f"libibverbs opens all {len(names)}")


_NO_VERBS = (
    "Mooncake and NCCL look for libibverbs.so.1; nixl brings its own, for mlx5 adapters only.",
    "apt install libibverbs1 ibverbs-providers (dnf: libibverbs rdma-core)",
)


def links(machine: Machine) -> Result:
    """Ports: state, rate, link layer.

    Reads ports/*/state, phys_state, rate, link_layer. A port that is not ACTIVE shows as Mooncake's "Device … port not
    active"; under InfiniBand INIT means that no subnet manager has spoken to it.
    """
    found = rdma_devices(machine)
    if not found:
        return skip(NONE)
    ports = [(d, p) for d in found for p in d.ports]
    down = [(d, p) for d, p in ports if not p.is_up]
    details = tuple(f"{d.name}/{p.number}: {p.state} {p.physical} {p.layer} {p.rate:g} Gbit/s" for d, p in ports)
    up = [(d, p) for d, p in ports if p.is_up]
    if not up:
        waiting = any(p.state == "INIT" for _, p in down)
        return fail(
            f"none of {count(len(ports), 'port')} is active",
            "The link is up but no subnet manager has configured it." if waiting else "No cable, or the link is off.",
            "start a subnet manager (opensm)" if waiting else "sudo ip link set <netdev> up; check cables",
            *details,
        )
    layers = sorted({p.layer for _, p in up})
    rates = sorted({p.rate for _, p in up})
    read = f"{len(up)} of {len(ports)} active, {' and '.join(layers)}, {'/'.join(f'{r:g}' for r in rates)} Gbit/s"
    if len(layers) > 1:
        first = up[0][0].name
        return warn(
            f"{read}",
            "InfiniBand and Ethernet ports are mixed; a library that picks one of each on the two "
            "hosts cannot connect.",
            f"name those to use: UCX_NET_DEVICES={first}:1, MC_IB_DEVICES / NCCL_IB_HCA={first}",
            *details,
        )
    if down:
        names = ", ".join(f"{d.name}" for d, _ in down)
        return warn(
            read,
            f"{names}: not active. Libraries that take every device fail on it or leave its GPU a far one.",
            "check the cable, or leave it out: UCX_NET_DEVICES=" + ",".join(f"{d.name}:{p.number}" for d, p in up[:8]),
            *details,
        )
    return passed(read, *details)


def firmware(machine: Machine) -> Result:
    """Firmware versions of adapters of one model.

    Reads fw_ver and board_id. Adapters of one board with several firmwares behave differently under load.
    """
    found = rdma_devices(machine)
    if not found:
        return skip(NONE)
    boards: dict[str, set[str]] = {}
    for device in found:
        if device.firmware:
            boards.setdefault(device.board or device.driver, set()).add(device.firmware)
    read = "; ".join(f"{board} {' and '.join(sorted(v))}" for board, v in sorted(boards.items()))
    details = tuple(f"{d.name}: {d.board} {d.firmware}" for d in found)
    if any(len(versions) > 1 for versions in boards.values()):
        return warn(
            read,
            "Adapters of one model run different firmware.",
            "sudo mlxfwmanager --online -u (or the vendor's tool), then reboot",
            *details,
        )
    return passed(read or "unknown", *details)


def gid(machine: Machine) -> Result:
    """The RoCE v2 entry of each port's address table, against what the environment tells libraries to use.

    Reads ports/*/gids, gid_attrs/types, gid_attrs/ndevs and MC_GID_INDEX, UCX_IB_GID_INDEX, NCCL_IB_GID_INDEX.
    The right entry is RoCE v2 with a routable address, best an IPv4-mapped one. A wrong one shows as "GID is
    NULL, please check your GID index by specifying MC_GID_INDEX" or "Failed to modify QP to RTR, check mtu, gid,
    peer lid, peer qp num: Connection timed out [110]".
    """
    found = [d for d in rdma_devices(machine) if any(p.layer == "Ethernet" for p in d.ports)]
    if not found:
        return skip("no RoCE port here" if has_rdma(machine) else NONE)
    ports = [(d, p) for d in found for p in d.ports if p.layer == "Ethernet" and p.is_up]
    best = {d.name: best_gid(p) for d, p in ports}
    details = tuple(f"{n}: index {g.index} {g.kind} {g.text} {g.netdev}" for n, g in best.items() if g)
    without = [n for n, g in best.items() if g is None]
    if without:
        return fail(
            f"{', '.join(without)}: no routable RoCE v2 address",
            "Only link-local entries exist, which reach no other subnet: connections time out.",
            "give the port's network interface an address: sudo ip addr add <address>/<prefix> dev <netdev>",
            *details,
        )
    indices = sorted({g.index for g in best.values() if g})
    read = f"RoCE v2 at index {' or '.join(map(str, indices))}"
    wrong = _wrong_indices(machine, found)
    if wrong:
        return fail(
            f"{read}, but {'; '.join(wrong)}",
            "A queue pair on that entry times out while connecting (Connection timed out [110]).",
            "\n".join(f"export {w.partition('=')[0]}={indices[0]}" for w in wrong),
            *details,
        )
    return passed(read, *details)


def _wrong_indices(machine: Machine, found: list[RdmaDevice]) -> list[str]:
    wrong = []
    for name in ("MC_GID_INDEX", "UCX_IB_GID_INDEX", "NCCL_IB_GID_INDEX"):
        value = machine.env.get(name, "")
        if not value.isdigit():
            continue
        entries = [g for d in found for p in d.ports if p.is_up for g in p.gids if g.index == int(value)]
        if not entries:
            wrong.append(f"{name}={value} is an empty row")
        elif not all(g.is_routable for g in entries):
            bad = next(g for g in entries if not g.is_routable)
            wrong.append(f"{name}={value} is {bad.kind} {bad.text}")
    return wrong


def mtu(machine: Machine) -> Result:
    """Ethernet MTU under RoCE.

    Reads /sys/class/net/*/mtu of the adapters' interfaces. RoCE's own MTU is the largest of 1024, 2048, 4096
    that fits; it must be equal along the way and on both ends, else "Failed to modify QP to RTR, check mtu, gid,
    …" or a hang once a packet is large.
    """
    found = [d for d in rdma_devices(machine) if any(p.layer == "Ethernet" and p.is_up for p in d.ports)]
    sizes = {n: m for d in found for n in d.netdevs if (m := netdev_mtu(machine, n)) is not None}
    if not sizes:
        return skip("no RoCE interface here" if has_rdma(machine) else NONE)
    details = tuple(f"{name}: {size}" for name, size in sizes.items())
    read = f"Ethernet MTU {' and '.join(map(str, sorted(set(sizes.values()))))}"
    small = [name for name, size in sizes.items() if size < JUMBO]
    fix = "\n".join(f"sudo ip link set {name} mtu 9000" for name in small[:8]) + "\n(switch ports too, and both hosts)"
    if len(set(sizes.values())) > 1:
        return fail(
            read,
            f"{', '.join(small) or 'some'} differ from the others: a pair with unequal MTUs fails to "
            "connect, or hangs.",
            fix if small else "set the same MTU on all: sudo ip link set <netdev> mtu 9000",
            *details,
        )
    if small:
        return warn(
            read, "RoCE then sends packets of at most 1024 or 2048 bytes, and loses a tenth or more.", fix, *details
        )
    return passed(read, *details)


def pkey(machine: Machine) -> Result:
    """InfiniBand partitions.

    Reads ports/*/pkeys. Bit 15 of a key is full membership; two limited members (0x7fff) of a partition cannot talk.
    """
    ports = [(d, p) for d in rdma_devices(machine) for p in d.ports if p.layer == "InfiniBand" and p.is_up]
    if not ports:
        return skip("no InfiniBand port here" if has_rdma(machine) else NONE)
    limited = [d.name for d, p in ports if p.pkeys and all(k & LIMITED_PKEY == k for k in p.pkeys if k)]
    keys = sorted({f"0x{k:04x}" for _, p in ports for k in p.pkeys if k})
    if limited:
        return warn(
            f"{', '.join(limited)}: only limited keys ({', '.join(keys)})",
            "Two limited members of a partition cannot talk to each other.",
            "ask for full membership in the subnet manager's partitions.conf (…=full)",
        )
    return passed(", ".join(keys) or "unknown")


def bond(machine: Machine) -> Result:
    """InfiniBand ports without a local identifier.

    Reads ports/*/lid. A bonded or unmanaged port keeps LID 0 under InfiniBand: "mlx5dv_devx_obj_destroy(SRQ) failed:
    Invalid argument", NIXL_ERR_BACKEND; across pods set UCX_IB_ADDR_TYPE=eth, else NIXL_ERR_REMOTE_DISCONNECT.
    """
    ports = [(d, p) for d in rdma_devices(machine) for p in d.ports if p.layer == "InfiniBand" and p.is_up]
    if not ports:
        return skip("no InfiniBand port here" if has_rdma(machine) else NONE)
    zero = [d.name for d, p in ports if p.lid == 0]
    if zero:
        others = ",".join(f"{d.name}:{p.number}" for d, p in ports if p.lid)
        return fail(
            f"{', '.join(zero)}: LID 0",
            "UCX fails to make queues on such a port (NIXL_ERR_BACKEND).",
            f"export UCX_NET_DEVICES={others or '<a port with a LID>'}",
        )
    return passed(f"{count(len(ports), 'port')} with LIDs")


def _span(names: tuple[str, ...]) -> str:
    return ", ".join(names) if len(names) <= 3 else f"{names[0]} … {names[-1]}"


CHECKS = (
    Check("rdma.devices", "RDMA devices", devices),
    Check("rdma.verbs", "Verbs library", verbs),
    Check("rdma.ports", "Ports", links),
    Check("rdma.firmware", "Firmware", firmware),
    Check("rdma.gid", "RoCE address", gid),
    Check("rdma.mtu", "MTU", mtu),
    Check("rdma.pkey", "Partition keys", pkey),
    Check("rdma.lid", "Local identifiers", bond),
)
