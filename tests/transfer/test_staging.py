"""Slots of a staging area: never two owners, never more than half to one peer, all back in the end."""

from __future__ import annotations

import random

import pytest

from pd.transfer.staging import Slots


@pytest.mark.parametrize("seed", range(20))
def test_slots_have_one_owner_and_no_peer_has_more_than_half(seed: int) -> None:
    rng = random.Random(seed)
    num_slots = rng.choice((1, 2, 3, 8))
    slots, owners = Slots(num_slots), dict[int, str]()
    for _ in range(300):
        peer = rng.choice("abc")
        if rng.random() < 0.55:
            slot = slots.take(peer)
            share = sum(owner == peer for owner in owners.values())
            may_have = len(owners) < num_slots and share < max(1, num_slots // 2)
            assert (slot is not None) == may_have, f"seed {seed}"
            if slot is not None:
                assert slot not in owners and 0 <= slot < num_slots, f"seed {seed}"
                owners[slot] = peer
        elif owners:
            slot = rng.choice(list(owners))
            del owners[slot]
            slots.give_back(slot)
        assert slots.num_taken == len(owners), f"seed {seed}"
