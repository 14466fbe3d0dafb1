"""What happened in a simulated run, for a person to read, and the fault that ends it."""

from __future__ import annotations

import zlib
from array import array


class Violation(AssertionError):
    """Something that must never be: the run ends here."""


class Trace:
    """Lines, if they are kept: whoever has one to say asks `is_kept` first, because saying it costs more than the run.
    A digest in any case, so that two runs can be compared."""

    def __init__(self, *, is_kept: bool) -> None:
        self.lines: list[str] = []
        self.is_kept = is_kept
        self.num_events = 0
        self._times = array("d")

    def count(self, time: float) -> None:
        """One event was heard."""
        self.num_events += 1
        self._times.append(time)

    def add(self, time: float, subject: str, what: str) -> None:
        self.lines.append(f"{time:9.4f}  {subject:<8} {what}")

    @property
    def digest(self) -> int:
        """Of the moments of all events: two runs that differ in anything soon differ in those."""
        return zlib.crc32(self._times)


def short(value: object, limit: int = 200) -> str:
    """A message or an effect, cut where it gets long."""
    text = repr(value).replace("Token(id=", "T(").replace(", logprob=None, top=()", "")
    return text if len(text) <= limit else text[:limit] + "…"
