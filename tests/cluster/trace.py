"""What happened in a simulated run, for a person to read, and the fault that ends it."""

from __future__ import annotations

import zlib
from collections.abc import Callable


class Violation(AssertionError):
    """Something that must never be: the run ends here."""


class Trace:
    """Lines, kept only if wanted; a digest always, so that two runs can be compared."""

    def __init__(self, *, kept: bool) -> None:
        self.lines: list[str] = []
        self.digest = 0
        self.num_lines = 0
        self._kept = kept

    def add(self, time: float, subject: str, what: Callable[[], str]) -> None:
        self.num_lines += 1
        self.digest = zlib.crc32(f"{time:.9f}{subject}".encode(), self.digest)
        if self._kept:
            self.lines.append(f"{time:9.4f}  {subject:<8} {what()}")


def short(value: object, limit: int = 160) -> str:
    """A message or an effect, cut where it gets long."""
    text = repr(value).replace("Token(id=", "T(").replace(", logprob=None, top=()", "")
    return text if len(text) <= limit else text[:limit] + "…"
