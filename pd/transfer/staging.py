"""Which part of a staging area is whose: who waits for a slot, who has one, and when it may be another's. Pure.

    given ─► waiting ─begin─► under way, in a slot ─end─► over; the slot is free
                                                   ─end, in doubt─► over; the slot is nobody's until `settle`

Staging is local to who moves: it fills a slot, has it written (or has it read into), and takes it back when that job
has ended, which the transport's contract promises for every job. No message is waited for, so none can be lost.

Rules
1. A slot belongs to one part of one job, from `begin` to `end`.
2. A read that failed may land all the same, and then in its slot: that one is in doubt, and given to nobody before its
   peer is known to write here no more.
3. A peer may take a slot while more are free than it has. So one that hangs alone has half of them, a second a quarter,
   and someone new finds one. (Dynamic thresholds, Choudhury and Hahne 1998: a switch's ports share its memory so.)
4. Peers take turns, and the parts of each begin in the order given.
5. Who waits, waits for an end, a `settle`, or (rule 3) nothing at all: there is nothing to look at in between. Where
   no end can come, as all slots are in doubt, `is_stuck` says so.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Hashable
from typing import NamedTuple

NUM_SLOTS = 8
SLOT_NBYTES = 8 << 20
"""Eight of 8 MiB: a slot is filled or emptied in some ms while others travel, and holds a page of any usual model."""
STAGING_NBYTES = NUM_SLOTS * SLOT_NBYTES


class Begun(NamedTuple):
    part: int
    slot: int


class Staging:
    """Parts are numbers of the caller's, each given once; a peer is one life of it."""

    def __init__(self, num_slots: int) -> None:
        self._num_slots = num_slots
        self._free = list(range(num_slots - 1, -1, -1))
        self._waiting: OrderedDict[Hashable, deque[int]] = OrderedDict()  # by peer, in the order of their turns
        self._open: dict[int, tuple[int, Hashable]] = {}  # by part: its slot, and the peer
        self._doubtful: dict[int, Hashable] = {}  # by slot

    @property
    def num_taken(self) -> int:
        """Slots that nobody else may have."""
        return len(self._open) + len(self._doubtful)

    @property
    def num_waiting(self) -> int:
        return sum(map(len, self._waiting.values()))

    @property
    def is_stuck(self) -> bool:
        """Somebody waits, and no end will come: each slot is in doubt."""
        return bool(self._waiting) and len(self._doubtful) == self._num_slots

    def give(self, part: int, peer: Hashable) -> None:
        """Have it wait. Ask `begin` next."""
        self._waiting.setdefault(peer, deque()).append(part)

    def begin(self) -> Begun | None:
        """The next part that may begin, and its slot. To be asked until None after each other call."""
        peer = next((peer for peer in self._waiting if len(self._free) > self._num_open(peer)), None)
        if peer is None:
            return None
        parts = self._waiting[peer]
        part, slot = parts.popleft(), self._free.pop()
        self._open[part] = (slot, peer)
        self._waiting.move_to_end(peer)
        if not parts:
            del self._waiting[peer]
        return Begun(part, slot)

    def end(self, part: int, *, in_doubt: bool = False) -> None:
        """It moves no more; or, `in_doubt`, bytes may still come into its slot."""
        slot, peer = self._open.pop(part)
        if in_doubt:
            self._doubtful[slot] = peer
        else:
            self._free.append(slot)

    def settle(self, peer: Hashable) -> None:
        """Nothing of that peer can write here any more."""
        for slot in [slot for slot, owner in self._doubtful.items() if owner == peer]:
            del self._doubtful[slot]
            self._free.append(slot)

    def check(self) -> None:
        """Raise AssertionError with what is broken: for tests and simulations."""
        slots = [*self._free, *self._doubtful, *(slot for slot, _ in self._open.values())]
        assert sorted(slots) == list(range(self._num_slots)), f"slots {sorted(slots)} of {self._num_slots}"
        assert all(self._waiting.values()), "a peer without parts takes turns"
        if self._waiting and not self.is_stuck:
            assert self._open, "parts wait, and nothing is under way whose end would begin them"

    def _num_open(self, peer: Hashable) -> int:
        return sum(owner == peer for _, owner in self._open.values())
