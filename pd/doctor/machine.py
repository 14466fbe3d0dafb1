"""The seam between checks and a machine: everything a check may look at, and no way to change anything.

Rules
1. What is not there is None, empty or `Access.ABSENT`, never an exception: absence is what checks are about.
2. A library is asked in a process of its own, with a deadline: one that crashes or hangs is one answer (`Silence`).
3. Two implementations: `local.ThisMachine`, and `recorded.Recorded` for machines nobody here has.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple, Protocol, TypeVar

import msgspec


class Access(enum.Enum):
    ABSENT = "absent"
    DENIED = "denied"  # it is there, and this user may not even read it
    READ = "read"
    READ_WRITE = "read-write"


class Space(NamedTuple):
    """Bytes of a file system."""

    size: int
    free: int


class Output(NamedTuple):
    """Of a command that ended. `text` is standard output, then standard error."""

    code: int
    text: str


class Why(enum.Enum):
    MISSING = "missing"  # not installed
    FAILED = "failed"  # raised, or answered nonsense
    CRASHED = "crashed"  # ended by a signal
    SLOW = "slow"  # no answer before the deadline


@dataclass(frozen=True, slots=True)
class Silence:
    """A library that gave no answer."""

    why: Why
    reason: str  # the last line it said, or the signal's name


class Answer(msgspec.Struct, frozen=True):
    """Plain data from a library. A subclass is named after the module of `pd.doctor.ask` that makes it."""

    @classmethod
    def module(cls) -> str:
        return cls.__name__.lower()


AnswerT = TypeVar("AnswerT", bound=Answer)


class Machine(Protocol):
    """Reads only. Paths are absolute."""

    @property
    def env(self) -> Mapping[str, str]: ...

    def read(self, path: str) -> str | None:
        """A file's text without white space at its ends (a `.gz` unpacked). None: absent or not readable."""

    def list(self, path: str) -> tuple[str, ...]:
        """Names in a folder, sorted as people count (mlx5_2 before mlx5_10); empty where there is none."""

    def access(self, path: str) -> Access: ...

    def resolve(self, path: str) -> str | None:
        """The path with symbolic links followed. None: absent."""

    def space(self, path: str) -> Space | None: ...

    def run(self, *command: str) -> Output | None:
        """Run a command that only reads. None: it is not installed, or did not end within its few seconds."""

    def ask(self, wanted: type[AnswerT], *arguments: str) -> AnswerT | Silence:
        """Ask the library behind `wanted`."""
