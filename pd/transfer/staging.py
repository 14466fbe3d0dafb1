"""Which part of a staging area is whose: slots of one size, and who may have one. Pure.

Staging is local to who moves: it fills a slot, has it written (or has it read into), and takes it back when that job
has ended, which the transport's contract promises for every job. No message is waited for, so none can be lost.

Rules
1. A slot belongs to one part of one job, from `take` to `give_back`.
2. One peer has at most half of the slots: a peer that hangs holds up none but itself.
"""

from __future__ import annotations

NUM_SLOTS = 8
SLOT_NBYTES = 8 << 20
"""Eight of 8 MiB: a slot is filled or emptied in some ms while others travel, and holds a page of any usual model."""
STAGING_NBYTES = NUM_SLOTS * SLOT_NBYTES


class Slots:
    def __init__(self, num_slots: int) -> None:
        self._free = list(range(num_slots - 1, -1, -1))
        self._limit = max(1, num_slots // 2)
        self._owners: dict[int, str] = {}

    @property
    def num_taken(self) -> int:
        return len(self._owners)

    def take(self, peer: str) -> int | None:
        """A slot for `peer`; None if there is none, or it has its share already."""
        if not self._free or sum(owner == peer for owner in self._owners.values()) >= self._limit:
            return None
        slot = self._free.pop()
        self._owners[slot] = peer
        return slot

    def give_back(self, slot: int) -> None:
        del self._owners[slot]
        self._free.append(slot)
