"""Handoffs that are over, but bytes of which may still land: no Fenced can be said of them. Pure."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import NamedTuple

from pd.runtime.core.events import Peer
from pd.runtime.wire.values import Handle

MAX_DOUBTS = 4096
"""Of peers that were never heard of again: who still asked about a page has long severed us."""


class Doubt(NamedTuple):
    life: Peer
    last_job: int  # that was given before; a later one that is done ends the doubt


class Doubts:
    def __init__(self) -> None:
        self._doubts: OrderedDict[Handle, Doubt] = OrderedDict()

    def __contains__(self, handle: Handle) -> bool:
        return handle in self._doubts

    def add(self, handle: Handle, life: Peer, last_job: int) -> None:
        self._doubts[handle] = Doubt(life, last_job)
        if len(self._doubts) > MAX_DOUBTS:
            self._doubts.popitem(last=False)

    def trust(self, life: Peer, job: int) -> None:
        """All before `job`, which is done, has landed or never will: writes take effect in the order given."""
        self._end(lambda doubt: doubt.life == life and doubt.last_job < job)

    def meet(self, life: Peer) -> None:
        """Its predecessors have ended, and ask about no page any more. One that is only unheard of may yet."""
        self._end(lambda doubt: doubt.life.name == life.name and doubt.life != life)

    def _end(self, is_settled: Callable[[Doubt], bool]) -> None:
        for handle in [handle for handle, doubt in self._doubts.items() if is_settled(doubt)]:
            del self._doubts[handle]
