"""Many deadlines that mostly move later: one heap entry a name, looked at again when it comes up. Pure."""

from __future__ import annotations

import heapq
from collections.abc import Mapping


class Timetable:
    """Names with a time at which to look at them.

    A token moves its request's deadline later, and that must cost nothing; so only a deadline that moves
    *earlier* enters the heap at once. An entry that comes up too early is put back by its owner with `watch`.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[float, str]] = []
        self._due: dict[str, float] = {}

    def __len__(self) -> int:
        return len(self._due)

    def watch(self, name: str, at: float) -> None:
        """Have `name` come up at `at` or earlier."""
        due = self._due.get(name)
        if due is None or at < due:
            self._due[name] = at
            heapq.heappush(self._heap, (at, name))

    def forget(self, name: str) -> None:
        self._due.pop(name, None)
        if len(self._heap) > 2 * len(self._due) + 64:  # mostly entries of the forgotten
            self._heap = [(at, kept) for kept, at in self._due.items()]
            heapq.heapify(self._heap)

    def pop_due(self, now: float) -> list[str]:
        """Names whose time has come. Each is no longer watched until `watch` is called for it again."""
        names = []
        while self._heap and self._heap[0][0] <= now:
            at, name = heapq.heappop(self._heap)
            if self._due.get(name) == at:
                del self._due[name]
                names.append(name)
        return names

    def check(self, wanted: Mapping[str, float]) -> None:
        """Exactly the wanted names are watched, none later than its time, each with its entry."""
        differing = wanted.keys() ^ self._due.keys()
        assert not differing, f"watched and not wanted, or not watched: {differing}"
        entries = set(self._heap)
        for name, at in self._due.items():
            assert at <= wanted[name], f"{name} comes up at {at}, wanted at {wanted[name]}"
            assert (at, name) in entries, f"{name} has no entry at {at}"
