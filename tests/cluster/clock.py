"""Simulated time: what is to happen, in order. Nothing here waits."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Any


class Clock:
    def __init__(self) -> None:
        self.now = 0.0
        self._heap: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._num_added = 0

    def at(self, time: float, what: Callable[..., None], *args: Any) -> None:
        """Call `what(*args)` then; things of one moment happen in the order they were put here."""
        self._num_added += 1
        heapq.heappush(self._heap, (time if time > self.now else self.now, self._num_added, what, args))

    def after(self, seconds: float, what: Callable[..., None], *args: Any) -> None:
        self._num_added += 1
        heapq.heappush(self._heap, (self.now + seconds, self._num_added, what, args))

    def step(self) -> bool:
        """Let the next thing happen. False if there is none."""
        if not self._heap:
            return False
        self.now, _, what, args = heapq.heappop(self._heap)
        what(*args)
        return True
