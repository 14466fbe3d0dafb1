"""CPU time of a server with all its processes. Linux only, as all that measures here."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

_TICKS_S = 1.0 / os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class Usage:
    """Of /proc/PID/stat: proc_pid_stat(5)."""

    parent: int
    session: int
    cpu_s: float  # user and system, its own and that of ended children it has waited for


def cpu_s(root: int) -> float:
    """Seconds so far of `root`, of what descends from it, and of its session: a child that outlives its parent
    descends from it no more."""
    found = {int(name): usage for name in os.listdir("/proc") if name.isdecimal() and (usage := _read(name))}
    return sum(usage.cpu_s for pid, usage in found.items() if _belongs(pid, found, root))


def _belongs(pid: int, found: Mapping[int, Usage], root: int) -> bool:
    while (usage := found.get(pid)) is not None:
        if root in (pid, usage.session):
            return True
        pid = usage.parent
    return False


def _read(name: str) -> Usage | None:
    """None: it has ended meanwhile."""
    try:
        with open(f"/proc/{name}/stat") as file:
            fields = file.read().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return Usage(int(fields[1]), int(fields[3]), sum(map(int, fields[11:15])) * _TICKS_S)
