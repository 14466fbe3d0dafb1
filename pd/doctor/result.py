"""What a check says. Pure."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Status(enum.Enum):
    PASS = "PASS"
    WARN = "WARN"  # it will run, slower or less safely than it could
    FAIL = "FAIL"  # something a user of this machine will ask for cannot work
    SKIP = "SKIP"  # nothing to look at here


@dataclass(frozen=True, slots=True)
class Result:
    status: Status
    read: str  # what was read, one line; for SKIP: why there was nothing to read
    means: str = ""  # one sentence, WARN and FAIL only
    fix: str = ""  # the commands or the setting, one a line, WARN and FAIL only
    details: tuple[str, ...] = ()  # everything else read; shown with --verbose, and under WARN and FAIL


def passed(read: str, *details: str) -> Result:
    return Result(Status.PASS, read, details=details)


def skip(why: str) -> Result:
    return Result(Status.SKIP, why)


def warn(read: str, means: str, fix: str, *details: str) -> Result:
    return Result(Status.WARN, read, means, fix, details)


def fail(read: str, means: str, fix: str, *details: str) -> Result:
    return Result(Status.FAIL, read, means, fix, details)
