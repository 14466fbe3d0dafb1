"""Each transfer backend measured between two processes of this host, every byte compared."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from pd.doctor.answers import Loopback, Timing
from pd.doctor.check import Check
from pd.doctor.machine import Machine, Silence, Why
from pd.doctor.readings import MIB, count, cpus, duration, human
from pd.doctor.result import Result, fail, passed, skip, warn

OURS = ("shm", "tcp")
SLOW = {"shm": 1e9, "tcp": 2e8, "nixl": 5e8, "mooncake": 1e8}
"""Bytes a second of the largest size, below which something is wrong: a tenth of what two busy virtual cores
reached."""
FIXES = {
    "shm": "machine.memory; pd launch --transfer tcp goes without shared memory",
    "tcp": "machine.ports; machine.nofile; network.interfaces",
    "nixl": "software.nixl; software.env; machine.cma",
    "mooncake": "software.mooncake; software.env",
}


def loopback(machine: Machine, *, backend: str) -> Result:
    """A backend between two processes of this host: seconds and GB/s for 64 KiB, 1 MiB and 64 MiB.

    Runs it in processes of their own, with a deadline: a crash or a hang is one failed check. Writes noise into
    the other process and compares checksums. shm and tcp go through pd's own door (as `--transfer` does), nixl
    through UCX with host memory, Mooncake through TCP. GB are 10^9 bytes.
    """
    answer = machine.ask(Loopback, backend)
    if isinstance(answer, Silence):
        if answer.why is Why.MISSING and backend not in OURS:
            return skip("not installed")
        return fail(f"{answer.why.value}: {answer.reason}", f"{backend} does not work on this host.", _see(backend))
    if answer.error:
        return fail(answer.error, f"{backend} does not work on this host.", _see(backend))
    read = describe(answer.timings) + (f"; {answer.note}" if answer.note else "")
    if rate(answer.timings[-1]) < SLOW[backend] and answer.timings[-1].nbytes > MIB:
        return warn(
            read,
            f"Below {SLOW[backend] / 1e9:g} GB/s something holds it back{busy(machine)}.",
            f"measure again while the machine is idle: pd doctor --only transfer.{backend}; {_see(backend)}",
        )
    return passed(read)


def describe(timings: Sequence[Timing]) -> str:
    """ "64 KiB 11 µs · 1 MiB 8.2 GB/s · 256 MiB 9.1 GB/s": the smallest as latency, the rest as rate."""
    first, *rest = timings
    parts = [f"{human(first.nbytes)} {duration(first.seconds)}"]
    parts += [f"{human(t.nbytes)} {rate(t) / 1e9:.2g} GB/s" for t in rest]
    return " · ".join(parts)


def rate(timing: Timing) -> float:
    """Bytes a second."""
    return timing.nbytes / timing.seconds


def busy(machine: Machine) -> str:
    """A remark where more processes want to run than there are cores."""
    load = float((machine.read("/proc/loadavg") or "0").split()[0])
    cores = len(cpus(machine.read("/sys/devices/system/cpu/online"))) or 1
    return f" (the machine is busy: load {load:.1f} on {count(cores, 'core')})" if load > cores else ""


def _see(backend: str) -> str:
    return f"see {FIXES[backend]}"


CHECKS = tuple(
    Check(f"transfer.{backend}", name, partial(loopback, backend=backend))
    for backend, name in (
        ("shm", "Shared memory"),
        ("tcp", "TCP"),
        ("nixl", "nixl (UCX)"),
        ("mooncake", "Mooncake (TCP)"),
    )
)
