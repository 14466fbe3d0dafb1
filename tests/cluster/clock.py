"""Simulated time: what is to happen, in order. Nothing here waits."""

from __future__ import annotations

import heapq
from collections.abc import Callable


class Clock:
    def __init__(self) -> None:
        self.now = 0.0
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._num_added = 0

    def at(self, time: float, what: Callable[[], None]) -> None:
        self._num_added += 1
        heapq.heappush(self._heap, (max(time, self.now), self._num_added, what))

    def after(self, seconds: float, what: Callable[[], None]) -> None:
        self.at(self.now + seconds, what)

    def step(self) -> bool:
        """Let the next thing happen. False if there is none."""
        if not self._heap:
            return False
        self.now, _, what = heapq.heappop(self._heap)
        what()
        return True
