"""How a chaos run counts its answers."""

from __future__ import annotations

import pytest

from pd.bench.chaos import KINDS
from pd.bench.chaos_load import Heard, Load
from pd.bench.chaos_options import ChaosOptions

EXPECTED = (1, 2, 3)
CLOSED, HUNG = Heard((1, 2), 0.1, "ClientPayloadError"), Heard((1,), 9.0, "no end", is_hung=True)


@pytest.mark.parametrize(
    ("heard", "is_excused", "counts"),  # done, wrong, hung, failed, cut off
    [
        (Heard(EXPECTED, 0.1, None), False, (1, 0, 0, 0, 0)),
        (Heard(EXPECTED, 0.1, None), True, (1, 0, 0, 0, 0)),
        (Heard((1, 2), 0.1, None), True, (1, 1, 0, 0, 0)),
        (CLOSED, False, (0, 0, 0, 1, 0)),
        (CLOSED, True, (0, 0, 0, 0, 1)),
        (HUNG, False, (0, 0, 1, 0, 0)),
        (HUNG, True, (0, 0, 1, 0, 0)),
        (Heard((1, 9), 0.1, "ClientPayloadError"), True, (0, 1, 0, 0, 1)),
    ],
)
def test_what_a_killed_router_cuts_off_is_no_failure_but_tokens_are_compared_and_nothing_may_hang(
    heard: Heard, is_excused: bool, counts: tuple[int, ...]
) -> None:
    load = Load("", [], [], 1.0)
    load._note(heard, EXPECTED, is_excused=is_excused)
    tally = load.tally
    assert (tally.num_done, tally.num_wrong, tally.num_hung, tally.num_failed, tally.num_cut_off) == counts


def test_the_router_is_killed_only_where_that_is_asked_for() -> None:
    assert set(KINDS) - set(ChaosOptions().faults.split(",")) == {"router"}
