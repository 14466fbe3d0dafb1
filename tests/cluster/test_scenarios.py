"""What hurt others, made on purpose: README.md beside this says which test rules out which of the field's faults.

Every run here also holds what the random ones hold: right tokens, one ending, pages kept under a write, nothing left.
"""

from __future__ import annotations

import pytest

from pd.runtime.core.events import End
from pd.runtime.wire.values import Finish
from tests.cluster.drawing import MISFITS
from tests.cluster.scenario import Blow, Odds, Strike
from tests.cluster.staging import MAX_MODEL_LEN, PAGE, as_shipped, ask, decode, num_stamps, prefill, staged

PAIRS = (prefill("p0"), prefill("p1"), decode("d0"), decode("d1"))


@pytest.mark.parametrize("can_sever", [True, False])
def test_a_cancelled_requests_late_write_does_not_touch_who_wants_its_pages(can_sever: bool) -> None:
    small = (prefill("p0"), decode("d0", num_pages=6))
    asks = [ask("gone", 0.3, 16, leave_at=0.36)] + [ask(f"next{n}", 0.37, 12) for n in range(3)]
    for seed in range(20):
        world = staged(small, asks, odds=Odds(write_s=0.5), whole_at=2.0, can_sever=can_sever, seed=seed)
        assert world.clients.endings["finished"] == len(asks), f"seed {seed}: {world.clients.endings}"  # and the probe
        assert world.clients.ending("gone") is None


@pytest.mark.parametrize("can_sever", [True, False])
def test_a_prefill_that_only_seems_dead_is_severed_before_its_pages_are_free(can_sever: bool) -> None:
    """It cannot be heard for longer than dead_after_s, and its writes go on."""
    for seed in range(10):
        world = staged(
            (prefill("p0"), prefill("p1"), decode("d0")),
            [ask(f"r{n}", 0.3, 30) for n in range(4)],
            Strike(0.33, Blow.PART, "p0", 4.0, "router"),
            odds=Odds(write_s=0.4),
            whole_at=4.5,
            can_sever=can_sever,
            seed=seed,
        )
        assert world.shells["d0"].stamps["severed"] >= 1, f"seed {seed}"
        assert world.clients.endings["finished"] == 5, f"seed {seed}: {world.clients.reasons}"


def test_after_lost_completions_all_is_as_fast_as_before() -> None:
    """None of the first writes is ever confirmed; the later ones are."""
    early = [ask(f"lost{n}", 0.3, 20) for n in range(6)]
    late = [ask(f"late{n}", 6.0 + 0.05 * n, 20) for n in range(12)]
    for seed in range(5):
        world = staged(PAIRS, early + late, odds=Odds(lost_completion=1.0), whole_at=1.0, seed=seed)
        slowest = max(world.clients.took_s(each.request_id) for each in late)
        assert slowest < 1.0, f"seed {seed}: {slowest}"
        assert max(world.clients.took_s(each.request_id) for each in early) < 6.0, f"seed {seed}"
        assert world.clients.endings["finished"] == len(early + late) + 1, f"seed {seed}: {world.clients.reasons}"


def test_overload_is_told_early_with_a_time_to_come_back() -> None:
    """Twice as many as may wait, and pages for two: some are served, most hear 429 as soon as decode has refused them,
    the others 503 within queue_s."""
    asks = [ask(f"r{n}", 0.3 + 0.005 * n, 30, 30) for n in range(140)]
    world = staged((prefill("p0"), decode("d0", num_pages=32)), asks)
    endings = [world.clients.ending(each.request_id) for each in asks]
    refused = [ending for ending in endings if isinstance(ending, End)]
    assert {ending.status for ending in refused} == {429, 503} and all(ending.retry_after_s for ending in refused)
    at_once = [
        each for each, ending in zip(asks, endings, strict=True) if isinstance(ending, End) and ending.status == 429
    ]
    assert len(at_once) > 40 and max(world.clients.took_s(each.request_id) for each in at_once) < 0.5
    others = [each for each, ending in zip(asks, endings, strict=True) if getattr(ending, "status", 0) == 503]
    assert max(world.clients.took_s(each.request_id) for each in others) < 5.5  # queue_s is 5.0
    assert sum(isinstance(ending, Finish) for ending in endings) >= 8


def test_a_reservation_of_a_dead_prefill_moves_on_at_once() -> None:
    """p0 dies with the prompts in its queue; its next life says Hello, and decode is told."""
    for seed in range(10):
        world = staged(
            (prefill("p0"), prefill("p1"), decode("d0")),
            [ask(f"r{n}", 0.3, 30) for n in range(6)],
            Strike(0.32, Blow.KILL, "p0", 0.2),
            whole_at=1.0,
            seed=seed,
        )
        assert world.clients.endings["finished"] == 7, f"seed {seed}: {world.clients.reasons}"
        assert max(world.clients.took_s(f"r{n}") for n in range(6)) < 1.5, f"seed {seed}"
        assert world.happened["kill"] + world.happened["kill under a write"] == 1


def test_a_long_queue_fails_no_healthy_request() -> None:
    """The last waits longer for its turn than a transfer may last: they are different clocks."""
    asks = [ask(f"r{n}", 0.3, 40, 2) for n in range(12)]
    world = staged((prefill("p0"), decode("d0", num_pages=400)), asks, is_calm=True, max_prefill_tokens=4)
    assert max(world.clients.took_s(each.request_id) for each in asks) > 1.5  # draining_s is 1.0
    assert world.clients.endings == {"finished": 13}


def test_a_prefill_restarted_between_two_beats_serves_the_next_request() -> None:
    for seed in range(10):
        world = staged(
            (prefill("p0"), decode("d0")),
            [ask("before", 0.3, 12), ask("after", 0.7, 12)],
            Strike(0.4, Blow.KILL, "p0", 0.05),
            whole_at=0.8,
            seed=seed,
        )
        assert world.clients.ending("after") is Finish.LENGTH and world.clients.took_s("after") < 1.5, f"seed {seed}"
        assert world.shells["p0"].life.epoch not in ("e2", "e3")  # a new life under the old name


def test_a_transient_fault_parts_nobody_for_good() -> None:
    """Every write fails for a second and the ranks say that the peer is gone; after it all is as before."""
    asks = [ask(f"r{n}", 0.3 + 0.2 * n, 12) for n in range(4)] + [ask("after", 3.0, 12)]
    for can_sever in (True, False):
        odds = Odds(write_error=1.0, unreachable=1.0, attach_error=0.5)
        world = staged((prefill("p0"), decode("d0")), asks, odds=odds, whole_at=1.2, can_sever=can_sever)
        assert world.clients.ending("after") is Finish.LENGTH and world.clients.took_s("after") < 1.0
        assert world.happened["restart"] == 0


def test_one_transient_error_fails_no_request_of_a_lone_pair() -> None:
    """The way is tried again after a second; the attempts are not used up until then. With the deadlines as shipped."""
    for seed in range(10):
        odds = Odds(write_error=1.0, unreachable=1.0)
        pair = (prefill("p0"), decode("d0"))
        asks = [ask("hit", 1.0, 12), ask("next", 1.2, 12)]
        world = staged(pair, asks, odds=odds, whole_at=1.1, can_sever=False, seed=seed, brains=as_shipped())
        assert world.happened["write error"] >= 1, f"seed {seed}"
        assert world.clients.endings["finished"] == 3, f"seed {seed}: {world.clients.reasons}"
        assert max(world.clients.took_s("hit"), world.clients.took_s("next")) < 2.0, f"seed {seed}"


def test_two_that_can_never_reach_each_other_serve_with_others_and_none_waits_for_that() -> None:
    """And are told of each other once a life: the ranks raise a Violation where they are to attach again."""
    asks = [ask(f"r{n}", 0.3 + 0.05 * n, 12) for n in range(12)] + [ask("after", 4.0, 12)]
    for seed in range(12):
        kill = Strike(2.0, Blow.KILL, "d0", 0.2)
        world = staged(PAIRS, asks, kill, whole_at=2.5, misfits=(found := MISFITS[seed % 3]), seed=seed)
        assert world.clients.endings["finished"] == 14, f"seed {seed}: {world.clients.reasons}"
        assert max(world.clients.took_s(each.request_id) for each in asks) < 1.0, f"seed {seed}"
        assert world.happened["barred"] == 2 * len(found) and world.happened["exit"] == 0, f"seed {seed}"


def test_a_lone_pair_that_can_never_reach_each_other_refuses_at_once_saying_why() -> None:
    asks = [ask(f"r{n}", 0.5 + 0.5 * n, 12) for n in range(6)]
    for seed in range(12):
        pair, found = (prefill("p0"), decode("d0")), MISFITS[seed % 3]
        world = staged(pair, asks, misfits=found, seed=seed, num_probes=0)
        endings = [world.clients.ending(each.request_id) for each in asks]
        assert all(
            isinstance(each, End) and each.status == 503 and each.reason.endswith("injected") for each in endings
        )
        assert max(world.clients.took_s(each.request_id) for each in asks) < 0.3, f"seed {seed}"
        assert world.happened["barred"] == len(found) and world.happened["exit"] == 0, f"seed {seed}"


def test_joining_and_leaving_under_load_fails_and_repeats_nothing() -> None:
    asks = [ask(f"r{n}", 0.3 + 0.04 * n, 10 + n % 20) for n in range(60)]
    world = staged(
        (*PAIRS, prefill("p2", joins_at=0.8), decode("d2", joins_at=0.9)),
        asks,
        Strike(1.0, Blow.DRAIN, "p0", 0.0),
        Strike(1.4, Blow.DRAIN, "d0", 0.0),
        Strike(1.8, Blow.DRAIN, "p1", 0.0),
        is_calm=True,
    )
    assert world.clients.endings == {"finished": 61} and num_stamps(world, "repeated") == 0
    assert world.happened["drain under load"] == 3 and world.happened["exit"] == 3
    assert max(world.clients.took_s(each.request_id) for each in asks) < 1.5


def test_many_lives_of_one_instance_leave_nothing_behind() -> None:
    """`leftovers` looks into every brain at the end."""
    kills = [Strike(0.3 + 0.5 * n, Blow.KILL, name, 0.1) for n in range(20) for name in ("p0", "d0")]
    asks = [ask(f"r{n}", 0.3 + 0.1 * n, 10) for n in range(100)]
    world = staged(PAIRS, asks, *kills, whole_at=10.5)
    assert world.happened["restart"] == 40
    assert all("gave up after 4 attempts" in reason for reason in world.clients.reasons), "of 40 kills four met one"
    assert world.clients.endings["finished"] == 101 - len(world.clients.reasons) >= 98, world.clients.reasons


def test_prompts_about_a_page_a_chunk_and_the_limit_are_answered() -> None:
    sizes = {base + near for base in (PAGE, 2 * PAGE, 16, 2 * 16, MAX_MODEL_LEN - 1) for near in (-1, 0, 1)}
    asks = [ask(f"r{n}", 0.3, n, most) for n in sorted(sizes) if n < MAX_MODEL_LEN for most in (1, 2, 5)]
    asks = [
        ask(f"{each.request_id}-{k}", each.at, len(each.prompt), each.sampling.max_tokens)
        for k, each in enumerate(asks)
    ]
    for num_ranks in (1, 2):
        pools = (prefill("p0", num_ranks=num_ranks, num_pages=900), decode("d0", num_pages=900))
        world = staged(pools, asks, is_calm=True)
        assert world.clients.endings == {"finished": len(asks) + 1}


def test_what_can_never_fit_is_refused_and_nobody_starves_behind_it() -> None:
    """Longer than decode's whole pool, or than prefill's, and first in the queue."""
    for pools in ((64, 8), (8, 64)):
        asks = [ask("huge", 0.3, 40, 20)] + [ask(f"r{n}", 0.3, 8) for n in range(8)]
        world = staged((prefill("p0", num_pages=pools[0]), decode("d0", num_pages=pools[1])), asks)
        refused = world.clients.ending("huge")
        assert isinstance(refused, End) and refused.status == 400 and "pages" in refused.reason, refused
        assert max(world.clients.took_s(each.request_id) for each in asks) < 2.0
        assert world.clients.endings == {"400": 1, "finished": 9}


def test_a_preempted_answer_that_outgrew_prefills_pool_still_ends() -> None:
    """Prefill holds the prompt, but not prompt and half the answer: it must be refused at entry, or never need to."""
    asks = [ask(f"r{n}", 0.3, 16, 40) for n in range(6)]
    for seed in range(10):
        world = staged((prefill("p0", num_pages=6), decode("d0", num_pages=20)), asks, seed=seed)
        for each in asks:
            ending = world.clients.ending(each.request_id)
            assert ending is Finish.LENGTH or (isinstance(ending, End) and ending.status == 400), (
                f"seed {seed}: {ending}"
            )


def test_a_short_request_does_not_wait_for_a_cancelled_burst() -> None:
    burst = [ask(f"r{n}", 0.3, 60, leave_at=0.35) for n in range(20)]
    world = staged((prefill("p0"), decode("d0")), [*burst, ask("short", 0.36, 4, 2)], max_prefill_tokens=8)
    assert world.clients.took_s("short") < 0.5
    assert world.happened["client left"] == 20


def test_after_ten_idle_minutes_the_first_request_is_as_fast() -> None:
    world = staged((prefill("p0"), decode("d0")), [ask("before", 0.3, 12), ask("after", 600.0, 12)], is_calm=True)
    assert world.clients.took_s("after") < 2 * world.clients.took_s("before")
    assert world.shells["p0"].stamps["welcome"] == 1  # nobody had to come back


def test_an_idle_pair_settles_a_write_in_doubt_and_neither_cuts_the_other_off() -> None:
    """The connection fails under a write and comes back, the client leaves, and nobody writes anything after."""
    num_doubts = 0
    for seed in range(8):
        world = staged(
            [prefill("p0"), decode("d0")],
            [ask("r", 0.5, 9, leave_at=0.7)],
            odds=Odds(write_error=1.0, unreachable=1.0),
            whole_at=0.8,
            seed=seed,
        )
        num_doubts += world.happened["write in doubt"]
        assert world.happened["severed"] == 0, f"seed {seed}"
    assert num_doubts > 3
