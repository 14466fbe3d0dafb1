"""This host's interfaces and the ports that pd takes."""

from __future__ import annotations

from pd.doctor.check import Check
from pd.doctor.machine import Machine
from pd.doctor.readings import count
from pd.doctor.result import Result, passed, skip, warn

PORTS = {8000: "HTTP", 8500: "the router's membership"}
"""Defaults of LinkConfig."""
LISTEN = "0A"
"""State of a listening socket in /proc/net/tcp; include/net/tcp_states.h."""
INNER = ("lo", "docker", "veth", "br-", "ifb", "virbr", "cni", "dummy")


def interfaces(machine: Machine) -> Result:
    """Network interfaces that are up, their MTU and speed.

    Reads /sys/class/net. Under 10 Gbit/s a long prompt's KV takes longer to send than to compute.
    """
    names = [n for n in machine.list("/sys/class/net") if not n.startswith(INNER)]
    states = {n: machine.read(f"/sys/class/net/{n}/operstate") or "unknown" for n in names}
    up = [n for n, state in states.items() if state in ("up", "unknown")]
    if not up:
        return skip("only loopback is up: one host it is")
    details = tuple(
        f"{n}: {states[n]}, MTU {machine.read(f'/sys/class/net/{n}/mtu')}, {_speed(machine, n)}" for n in names
    )
    fast = [n for n in up if _mbits(machine, n) >= 10_000]
    unknown = [n for n in up if _mbits(machine, n) <= 0]
    read = ", ".join(f"{n} ({_speed(machine, n)})" for n in up[:3]) + (" …" if len(up) > 3 else "")
    if not fast and not unknown:
        return warn(
            read,
            "Between two hosts a 2k-token handoff of an 8B model (256 MiB) takes over two seconds at 1 Gbit/s.",
            "keep prefill and decode on one host, or use a faster interface: --transfer-devices",
            *details,
        )
    return passed(read, *details)


def _mbits(machine: Machine, name: str) -> int:
    """-1 where the driver does not know (virtual ones)."""
    text = machine.read(f"/sys/class/net/{name}/speed") or ""
    return int(text) if text.lstrip("-").isdigit() else -1


def _speed(machine: Machine, name: str) -> str:
    mbits = _mbits(machine, name)
    return f"{mbits / 1000:g} Gbit/s" if mbits > 0 else "speed unknown"


def ports(machine: Machine) -> Result:
    """Whether pd's default ports are free.

    Reads /proc/net/tcp and tcp6 of this network namespace. A taken one shows as "address already in use".
    """
    text = "\n".join(machine.read(f"/proc/net/{name}") or "" for name in ("tcp", "tcp6"))
    rows = [line.split() for line in text.splitlines()]
    taken = {int(r[1].rpartition(":")[2], 16) for r in rows if len(r) > 3 and r[3] == LISTEN}
    busy = [f"{port} ({use})" for port, use in PORTS.items() if port in taken]
    if busy:
        return warn(
            f"in use: {', '.join(busy)}",
            "A router with default ports does not start ('address already in use'), unless this is "
            "yours already running.",
            "ss -ltnp names who listens; or pd launch --role router --port <another>",
        )
    return passed(f"{' and '.join(map(str, PORTS))} are free, {count(len(taken), 'port')} listening")


CHECKS = (
    Check("network.interfaces", "Interfaces", interfaces),
    Check("network.ports", "Default ports", ports),
)
