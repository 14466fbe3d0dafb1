"""A check, and how a list of them is run."""

from __future__ import annotations

import inspect
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from pd.doctor.machine import Machine
from pd.doctor.result import Result, fail


@dataclass(frozen=True, slots=True)
class Check:
    """`run` judges what it reads through the seam and nothing else. Its docstring is what --explain shows."""

    id: str  # "group.what"
    title: str
    run: Callable[[Machine], Result]

    @property
    def group(self) -> str:
        return self.id.partition(".")[0]

    @property
    def explanation(self) -> str:
        function = self.run.func if isinstance(self.run, partial) else self.run
        return inspect.getdoc(function) or ""


@dataclass(frozen=True, slots=True)
class Examined:
    check: Check
    result: Result
    seconds: float


def select(checks: Sequence[Check], only: Sequence[str], *, others: Sequence[str] = ()) -> tuple[Check, ...]:
    """Those whose group or id is named in `only`; all for an empty one. Raises ValueError naming what is unknown;
    `others` are groups that would be there too, each with what it takes."""
    known = {c.group for c in checks} | {c.id for c in checks}
    unknown = [name for name in only if name not in known]
    if unknown:
        groups = ", ".join(dict.fromkeys([*(c.group for c in checks), *others]))
        raise ValueError(f"no check or group {', '.join(unknown)}; groups are {groups}")
    return tuple(c for c in checks if not only or c.group in only or c.id in only)


def examine(check: Check, machine: Machine) -> Examined:
    """Run one check. One that raises is one failed check: it says so, with where, and the others go on."""
    began = time.monotonic()
    try:
        result = check.run(machine)
    except Exception as error:  # noqa: BLE001  a broken check must not hide the others' findings
        at = traceback.extract_tb(error.__traceback__)[-1]
        result = fail(
            f"the check itself failed: {type(error).__name__}: {error}",
            "This is a fault of pd doctor, not of the machine; whatever it looks at is unknown.",
            "report it, with this line and the output of --json",
            f"at {at.filename}:{at.lineno} in {at.name}",
        )
    return Examined(check, result, time.monotonic() - began)


def examine_all(checks: Sequence[Check], machine: Machine) -> Iterator[Examined]:
    for check in checks:
        yield examine(check, machine)
