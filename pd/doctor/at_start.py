"""The few checks that cost next to nothing, for `pd launch` and `pd serve` to run before they start anything."""

from __future__ import annotations

from collections.abc import Iterator

from pd.doctor.catalog import CHECKS
from pd.doctor.check import examine, select
from pd.doctor.machine import Machine
from pd.doctor.result import Status

CHEAP = ("machine.memory", "machine.shm", "machine.memlock", "machine.nofile", "machine.maps", "software.env")
"""Those that read a file or two: a few milliseconds together. None asks a library or runs a command."""
_LOUD = (Status.FAIL, Status.WARN)


def warnings(machine: Machine) -> Iterator[str]:
    """A line for each check that finds something, and how to read on. It need not stop a launch, so it is only said."""
    for check in select(CHECKS, CHEAP):
        result = examine(check, machine).result
        if result.status in _LOUD:
            yield f"{check.title.lower()}: {result.read}. {result.means} (pd doctor --only {check.id})"
