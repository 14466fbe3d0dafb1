"""Slots of a staging area: never two owners, room for who is new, all back in the end, and nobody waits for nothing."""

from __future__ import annotations

import random

import pytest

from pd.transfer.staging import Begun, Staging


def begun(staging: Staging) -> list[Begun]:
    found = []
    while (one := staging.begin()) is not None:
        found.append(one)
    return found


@pytest.mark.parametrize("seed", range(40))
def test_each_part_has_a_slot_of_its_own_in_its_peers_order_and_every_slot_comes_back(seed: int) -> None:
    rng = random.Random(seed)
    num_slots = rng.choice((1, 2, 3, 8))
    staging, numbers = Staging(num_slots), iter(range(10_000))
    given: dict[str, list[int]] = {peer: [] for peer in "abc"}
    owners: dict[int, str] = {}
    running: dict[int, int] = {}  # part -> slot
    doubtful: dict[int, str] = {}  # slot -> peer

    def begin() -> None:
        for part, slot in begun(staging):
            peer = owners[part]
            assert given[peer].pop(0) == part, f"seed {seed}: out of order"
            assert slot not in running.values() and slot not in doubtful and 0 <= slot < num_slots, f"seed {seed}"
            running[part] = slot
        staging.check()
        assert staging.num_taken == len(running) + len(doubtful), f"seed {seed}"

    for turn in range(400):
        peer = rng.choice("abc")
        if turn < 300 and rng.random() < 0.5 and not staging.is_stuck:
            part = next(numbers)
            given[peer].append(part)
            owners[part] = peer
            staging.give(part, peer)
        elif running and rng.random() < 0.8:
            part = rng.choice(list(running))
            slot, in_doubt = running.pop(part), rng.random() < 0.2
            if in_doubt:
                doubtful[slot] = owners[part]
            staging.end(part, in_doubt=in_doubt)
        else:
            staging.settle(peer)
            doubtful = {slot: owner for slot, owner in doubtful.items() if owner != peer}
        begin()
    for peer in "abc":
        staging.settle(peer)
    doubtful.clear()
    begin()
    while running:
        staging.end(running.popitem()[0])
        begin()
    assert (staging.num_taken, staging.num_waiting) == (0, 0) and not any(given.values()), f"seed {seed}"


def test_one_that_hangs_has_half_another_a_quarter_and_who_is_new_finds_a_slot() -> None:
    staging = Staging(8)
    held = []
    for number, peer in enumerate("abc"):
        for part in range(20):
            staging.give(100 * number + part, peer)
        held.append(len(begun(staging)))
    assert held == [4, 2, 1]
    staging.give(300, "d")
    assert [one.part for one in begun(staging)] == [300]
    assert staging.num_taken == 8


def test_peers_take_turns_at_a_single_slot() -> None:
    staging = Staging(1)
    for part in range(4):
        staging.give(part, "busy")
    order = [one.part for one in begun(staging)]
    staging.give(10, "new")
    while staging.num_taken:
        staging.end(order[-1])
        order += [one.part for one in begun(staging)]
    assert order == [0, 1, 10, 2, 3]


def test_a_slot_in_doubt_is_nobodys_until_its_peer_is_settled() -> None:
    staging = Staging(2)
    staging.give(1, "lost")
    (first,) = begun(staging)
    staging.end(1, in_doubt=True)
    staging.give(2, "other")
    staging.give(3, "other")
    (second,) = begun(staging)
    assert second.slot != first.slot and not staging.is_stuck
    staging.settle("other")
    assert begun(staging) == []
    staging.settle("lost")
    staging.end(2)
    assert [one.part for one in begun(staging)] == [3]


def test_who_waits_where_all_is_in_doubt_is_told_so() -> None:
    staging = Staging(1)
    staging.give(1, "lost")
    begun(staging)
    staging.end(1, in_doubt=True)
    assert not staging.is_stuck
    staging.give(2, "other")
    assert begun(staging) == [] and staging.is_stuck
    staging.settle("lost")
    assert [one.part for one in begun(staging)] == [2] and not staging.is_stuck
