"""Deadlines come up when due, and the forgotten leave nothing."""

from __future__ import annotations

import random

import pytest

from pd.runtime.core.affinity import PrefixMemory, page_hashes
from pd.runtime.core.timetable import Timetable


@pytest.mark.parametrize("seed", range(20))
def test_each_name_comes_up_at_the_earliest_time_it_was_watched_for(seed: int) -> None:
    rng = random.Random(seed)
    table = Timetable()
    wanted: dict[str, float] = {}
    came: dict[str, float] = {}
    for step in range(400):
        now = float(step)
        name = str(rng.randrange(50))
        if rng.random() < 0.3:
            table.forget(name)
            wanted.pop(name, None)
        else:
            at = now + rng.randrange(1, 60)
            table.watch(name, at)
            wanted[name] = min(at, wanted.get(name, at))
        for due in table.pop_due(now):
            came[due] = now
            assert wanted.pop(due) == now, f"seed {seed}: {due} came up at {now}"
        assert all(at > now for at in wanted.values()), f"seed {seed}: one was missed"
        table.check(wanted)
    assert len(table) == len(wanted) and came, f"seed {seed}"


def test_the_forgotten_do_not_pile_up() -> None:
    table = Timetable()
    for index in range(10_000):
        table.watch(str(index), 1000.0)
        table.forget(str(index))
    assert len(table._heap) <= 64


def test_a_page_hash_covers_everything_before_it() -> None:
    one, other = page_hashes([1, 2, 3, 4, 5, 6], 2), page_hashes([9, 2, 3, 4, 5, 6], 2)
    assert len(one) == 3 and not set(one) & set(other)
    assert page_hashes([1, 2, 3, 4, 5], 2) == one[:2]


def test_prefix_memory_is_bounded_and_forgets_tails_first() -> None:
    memory = PrefixMemory(4)
    first = page_hashes(range(8), 2)
    memory.remember(first)
    memory.remember(page_hashes(range(100, 104), 2))
    assert memory.num_matching(first) == 2
