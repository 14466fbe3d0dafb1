"""Whether the ranks of an instance answer at all. Pure.

A rank's thread that talks answers while the other computes, however long a step takes: silence means that its process
is stopped, or its host. A step that never ends is another deadline (`Deadlines.step_s`).
"""

from __future__ import annotations

PING_S = 2.0
SILENT_S = 20.0
"""Far above what compiling or a swapping host takes from a thread; below what clients wait for a token (30 s)."""
PAUSE_S = 1.0
"""A longer gap between two looks is our own pause, and nobody's silence."""


class Pulse:
    def __init__(self, num_ranks: int, now: float) -> None:
        self._heard_at = [now] * num_ranks
        self._looked_at = now
        self._ping_at = now

    def heard(self, rank: int, now: float) -> None:
        if 0 <= rank < len(self._heard_at):
            self._heard_at[rank] = now

    def is_due(self, now: float) -> bool:
        """Whether to ask all ranks for an answer now."""
        if now < self._ping_at:
            return False
        self._ping_at = now + PING_S
        return True

    def silent(self, now: float) -> int | None:
        """A rank that has not been heard for SILENT_S. Call it a few times a second."""
        gap, self._looked_at = now - self._looked_at, now
        if gap > PAUSE_S:
            self._heard_at = [at + gap for at in self._heard_at]
        return next((rank for rank, at in enumerate(self._heard_at) if now - at > SILENT_S), None)
