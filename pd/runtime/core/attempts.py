"""Which attempt at which request was heard of last: the one gate for late and repeated messages. Pure."""

from __future__ import annotations

import enum
from collections import OrderedDict

from pd.runtime.wire.values import Handle

MAX_REMEMBERED = 65_536
"""Requests. At 1,000 a second over a minute, longer than any message is on its way; about 15 MB."""


class Arrival(enum.Enum):
    NEW = enum.auto()
    STALE = enum.auto()  # heard before, or of an older attempt
    STOPPED = enum.auto()  # it is new, but its end came before it


class Attempts:
    def __init__(self, max_remembered: int = MAX_REMEMBERED) -> None:
        self._max_remembered = max_remembered
        self._latest: OrderedDict[str, tuple[int, bool]] = OrderedDict()  # attempt, and whether it was stopped unseen

    def __len__(self) -> int:
        return len(self._latest)

    def earlier(self, handle: Handle) -> Handle | None:
        """The attempt that `handle` supersedes."""
        latest = self._latest.get(handle.request_id)
        return Handle(handle.request_id, latest[0]) if latest and latest[0] < handle.attempt else None

    def begin(self, handle: Handle) -> Arrival:
        """Note that `handle` arrived to be served, and whether it may be."""
        attempt, is_stopped = self._latest.get(handle.request_id, (None, False))
        if attempt is None or attempt < handle.attempt:
            self._note(handle, is_stopped=False)
            return Arrival.NEW
        return Arrival.STOPPED if is_stopped and attempt == handle.attempt else Arrival.STALE

    def stop(self, handle: Handle) -> None:
        """Note that `handle` must not be served if it arrives later. Nothing, if it was heard of."""
        attempt, _ = self._latest.get(handle.request_id, (None, False))
        if attempt is None or attempt < handle.attempt:
            self._note(handle, is_stopped=True)

    def _note(self, handle: Handle, *, is_stopped: bool) -> None:
        self._latest[handle.request_id] = (handle.attempt, is_stopped)
        self._latest.move_to_end(handle.request_id)
        if len(self._latest) > self._max_remembered:
            self._latest.popitem(last=False)
