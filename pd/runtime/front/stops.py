"""Find stop strings in text that comes in pieces, letting out no part of one. Pure.

Rules
1. The stop that is complete first wins; of two complete at the same character, the one that began first. So the
   outcome does not depend on where the pieces were cut.
2. What could still become a stop is held back; everything before it is let out at once.
"""

from __future__ import annotations


class StopFinder:
    """Owned by one answer. After a stop was found it is spent."""

    __slots__ = ("_held", "_include", "_stops")

    def __init__(self, stops: tuple[str, ...], *, include: bool = False) -> None:
        """`stops` are not empty strings. `include`: the found stop itself belongs to the text."""
        self._stops = stops
        self._include = include
        self._held = ""

    def feed(self, text: str) -> tuple[str, bool]:
        """Take the next piece. Returns the text that may go out, and whether a stop was found (nothing follows)."""
        self._held += text
        cut = self._find()
        if cut is None:
            cut = self._keep_from()
            out, self._held = self._held[:cut], self._held[cut:]
            return out, False
        out, self._held = self._held[:cut], ""
        return out, True

    def flush(self) -> str:
        """The text ended without a stop: what was held back."""
        out, self._held = self._held, ""
        return out

    def _find(self) -> int | None:
        """Where the text is cut by the first complete stop, or None."""
        found = [(at + len(stop), at) for stop in self._stops if (at := self._held.find(stop)) >= 0]
        if not found:
            return None
        stop_end, stop_start = min(found)
        return stop_end if self._include else stop_start

    def _keep_from(self) -> int:
        """The first index from which the held text is the beginning of a stop; its length if there is none."""
        held = self._held
        first = len(held)
        for stop in self._stops:
            at = held.find(stop[0], max(0, len(held) - len(stop) + 1), first)
            while at >= 0:
                if stop.startswith(held[at:]):
                    first = at
                    break
                at = held.find(stop[0], at + 1, first)
        return first
