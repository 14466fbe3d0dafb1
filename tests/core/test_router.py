"""The router's brain serves a request once, in order, whatever the messages do."""

from __future__ import annotations

import random

import pytest

from pd.runtime.config import RouterConfig
from pd.runtime.core.dispatch import Deadlines
from pd.runtime.core.events import Drain, Emit, End, Exit, HungUp, Peer, Received, Tick, Timings
from pd.runtime.wire.messages import (
    Cancel,
    Cancelled,
    Failed,
    FirstToken,
    Missing,
    Prefill,
    Refused,
    Reserve,
    Reserved,
    Wanted,
    Welcome,
)
from pd.runtime.wire.values import Finish, Handle, Role, Stage, Ticket, Token
from tests.core.routing import Bench, decoding, hello, only_prefill, only_reserve, pair_bench, sent


def test_a_request_is_reserved_then_prefilled_then_streamed_and_ends_once() -> None:
    bench = pair_bench()
    name, reserve = only_reserve(bench.submit("a"))
    assert (name, reserve.prefill, reserve.prefill_epoch) == ("d0", "p0", "1")
    assert (reserve.tokens, reserve.num_prompt, reserve.handle) == ((5, 6, 7), 3, Handle("a", 0))
    name, prefill = only_prefill(bench.reserved("d0", reserve.handle))
    assert (name, prefill.ticket) == ("p0", Ticket("d0", "1", (1, 2), 0, "1"))
    [first] = [e for e in bench.first("p0", reserve.handle, 3, 70) if isinstance(e, Emit)]
    assert first == Emit("a", 3, (Token(70),), None, 0)
    bench.tokens("d0", reserve.handle, 4, 71)
    effects = bench.tokens("d0", reserve.handle, 5, 72, finish=Finish.STOP)
    assert Emit("a", 5, (Token(72),), Finish.STOP) in effects
    assert not sent(effects, Cancel)
    assert bench.answer_of("a") == [70, 71, 72]
    assert len(bench.endings_of("a")) == 1 and bench.brain.is_idle()


def test_an_answers_end_says_where_its_time_went() -> None:
    bench = pair_bench()
    _, reserve = only_reserve(bench.submit("a"))
    bench.now += 0.25
    bench.reserved("d0", reserve.handle)
    bench.now += 0.75
    bench.hear("p0", FirstToken(reserve.handle, 3, Token(70), None, cached_tokens=0, prefill_s=0.5))
    bench.now += 0.125
    bench.tokens("d0", reserve.handle, 4, 71)
    bench.now += 3.0
    effects = bench.tokens("d0", reserve.handle, 5, 72, finish=Finish.STOP)
    assert [one.timings for one in effects if isinstance(one, Emit)] == [Timings(0.5, 0.5, 0.125)]


def test_colocated_there_is_no_handoff_in_an_answers_time() -> None:
    bench = Bench()
    bench.join(hello("c0", Role.COLOCATED))
    _, prefill = only_prefill(bench.submit("a"))
    bench.now += 1.0
    bench.hear("c0", FirstToken(prefill.handle, 3, Token(70), None, cached_tokens=0, prefill_s=0.25))
    bench.now += 1.0
    effects = bench.tokens("c0", prefill.handle, 4, 71, 72, 73, finish=Finish.LENGTH)
    assert [one.timings for one in effects if isinstance(one, Emit)] == [Timings(0.75, 0.25, 0.0)]


def test_one_token_needs_no_decode() -> None:
    bench = pair_bench()
    name, prefill = only_prefill(bench.submit("a", max_tokens=1))
    assert (name, prefill.ticket) == ("p0", None)
    bench.first("p0", prefill.handle, 3, 70, Finish.LENGTH)
    assert bench.answer_of("a") == [70] and bench.brain.is_idle()


def test_a_colocated_instance_serves_alone() -> None:
    bench = Bench()
    bench.join(hello("c0", Role.COLOCATED))
    name, prefill = only_prefill(bench.submit("a"))
    assert (name, prefill.ticket) == ("c0", None)
    bench.first("c0", prefill.handle, 3, 70)
    bench.tokens("c0", prefill.handle, 4, 71, 72, 73, finish=Finish.LENGTH)
    assert bench.answer_of("a") == [70, 71, 72, 73] and bench.brain.is_idle()


def test_decode_tokens_that_come_before_the_first_are_held() -> None:
    bench = pair_bench()
    _, reserve = only_reserve(bench.submit("a"))
    bench.reserved("d0", reserve.handle)
    bench.tokens("d0", reserve.handle, 4, 71)
    bench.tokens("d0", reserve.handle, 5, 72, finish=Finish.STOP)
    assert bench.answer_of("a") == []
    effects = bench.first("p0", reserve.handle, 3, 70)
    assert [e for e in effects if isinstance(e, Emit)] == [
        Emit("a", 3, (Token(70), Token(71), Token(72)), Finish.STOP, 0)
    ]
    assert bench.brain.is_idle()


@pytest.mark.parametrize("seed", range(50))
def test_any_order_with_duplicates_gives_each_position_once_in_order(seed: int) -> None:
    rng = random.Random(seed)
    bench = pair_bench()
    num_tokens = rng.randint(2, 12)
    _, reserve = only_reserve(bench.submit("a", max_tokens=num_tokens))
    bench.reserved("d0", reserve.handle)
    positions = [p for p in range(3, 3 + num_tokens) for _ in range(rng.randint(1, 3))]
    rng.shuffle(positions)
    for position in positions:
        finish = Finish.LENGTH if position == 2 + num_tokens else None
        if position == 3:
            bench.first("p0", reserve.handle, 3, 70)
        else:
            bench.tokens("d0", reserve.handle, position, 67 + position, finish=finish)
    assert bench.answer_of("a") == list(range(70, 70 + num_tokens)), f"seed {seed}"
    assert len(bench.endings_of("a")) == 1 and bench.brain.is_idle(), f"seed {seed}"


def test_a_first_token_that_ends_the_answer_frees_decode() -> None:
    bench = pair_bench()
    _, reserve = only_reserve(bench.submit("a"))
    bench.reserved("d0", reserve.handle)
    effects = bench.first("p0", reserve.handle, 3, 70, Finish.STOP)
    assert [name for name, _ in sent(effects, Cancel)] == ["d0"]
    assert bench.brain.is_idle()


def test_tokens_past_the_limit_go_to_nobody_and_the_instance_is_stopped() -> None:
    bench = pair_bench()
    handle = decoding(bench, "a", max_tokens=3)
    effects = bench.tokens("d0", handle, 4, 71, 72, 73)
    assert Emit("a", 4, (Token(71), Token(72)), Finish.LENGTH) in effects
    assert [name for name, _ in sent(effects, Cancel)] == ["d0"]


def test_a_retryable_failure_is_repeated_from_the_tokens_that_are_out() -> None:
    bench = pair_bench()
    bench.join(hello("d1", Role.DECODE))
    handle = decoding(bench, "a")
    bench.tokens("d0", handle, 4, 71)
    effects = bench.hear("d0", Failed(handle, Stage.DECODE, "lost its way", retryable=True))
    name, reserve = only_reserve(effects)
    assert name == "d1" and reserve.tokens == (5, 6, 7, 70, 71) and reserve.num_prompt == 3
    assert reserve.handle == Handle("a", 1)
    assert [name for name, _ in sent(effects, Cancel)] == ["d0"]  # prefill was done when decode's token came
    bench.reserved("d1", reserve.handle)
    bench.first("p0", reserve.handle, 5, 72)
    bench.tokens("d1", reserve.handle, 6, 73, finish=Finish.LENGTH)
    assert bench.answer_of("a") == [70, 71, 72, 73] and bench.brain.is_idle()


def test_the_last_token_of_a_repeated_attempt_needs_no_decode() -> None:
    bench = pair_bench()
    handle = decoding(bench, "a")
    bench.tokens("d0", handle, 4, 71, 72)
    effects = bench.hear("d0", Failed(handle, Stage.DECODE, "fell", retryable=True))
    name, prefill = only_prefill(effects)
    assert (name, prefill.ticket, prefill.tokens) == ("p0", None, (5, 6, 7, 70, 71, 72))


def test_an_old_attempts_message_changes_nothing() -> None:
    bench = pair_bench()
    handle = decoding(bench, "a")
    bench.hear("d0", Failed(handle, Stage.DECODE, "fell", retryable=True))
    before = bench.answer_of("a")
    bench.tokens("d0", handle, 4, 99)
    assert bench.answer_of("a") == before


def test_an_old_lifes_message_changes_nothing() -> None:
    bench = pair_bench()
    handle = decoding(bench, "a")
    bench.join(hello("d0", Role.DECODE, epoch="2"))
    bench.on(Received(Peer("d0", "1"), Failed(handle, Stage.DECODE, "fell", retryable=False)))
    assert not bench.endings_of("a")


def test_attempts_are_bounded_and_the_ending_names_stage_and_reason() -> None:
    bench = pair_bench(config=RouterConfig(max_attempts=2))
    for _ in range(2):
        bench.wait(1.0)
        effects = bench.effects if _ else bench.submit("a")
        handle = sent(effects, Reserve)[-1][1].handle
        effects = bench.hear("d0", Failed(handle, Stage.TRANSFER, "cable", retryable=True))
    [end] = bench.endings_of("a")
    assert isinstance(end, End) and end.status == 503 and end.retry_after_s == 1.0
    assert "d0 in stage transfer: cable" in end.reason and "2 attempts" in end.reason


def test_a_fault_that_persists_does_not_burn_all_attempts_at_once() -> None:
    bench = pair_bench()
    handle = only_reserve(bench.submit("a"))[1].handle
    again = only_reserve(bench.hear("d0", Failed(handle, Stage.TRANSFER, "cable", retryable=True)))[1]
    effects = bench.hear("d0", Failed(again.handle, Stage.TRANSFER, "cable", retryable=True))
    assert not sent(effects, Reserve)
    assert only_reserve(bench.wait(0.4))[1].handle == Handle("a", 2)


def test_a_prefill_that_is_lost_before_it_was_asked_costs_no_attempt() -> None:
    bench = pair_bench(config=RouterConfig(max_attempts=1))
    only_reserve(bench.submit("a"))
    bench.on(HungUp(bench.lives["p0"]))
    assert not bench.endings_of("a")
    assert only_reserve(bench.wait(0.1))[1].handle == Handle("a", 1), "it beats again"
    bench.reserved("d0", Handle("a", 1))
    bench.on(HungUp(bench.lives["p0"]))
    [end] = bench.endings_of("a")
    assert isinstance(end, End) and end.status == 503


def test_preemption_with_progress_is_no_failed_attempt() -> None:
    bench = pair_bench(config=RouterConfig(max_attempts=2))
    handle = only_reserve(bench.submit("a", max_tokens=20))[1].handle
    for attempt in range(6):
        bench.reserved("d0", handle)
        bench.first("p0", handle, 3 + attempt, 70 + attempt)
        effects = bench.hear("d0", Failed(handle, Stage.DECODE, "preempted: no page", retryable=True))
        handle = only_reserve(effects)[1].handle
    assert bench.answer_of("a") == [70, 71, 72, 73, 74, 75]
    bench.reserved("d0", handle)  # preempted without a token of its own: that counts
    handle = only_reserve(bench.hear("d0", Failed(handle, Stage.DECODE, "preempted: x", retryable=True)))[1].handle
    bench.reserved("d0", handle)
    bench.hear("d0", Failed(handle, Stage.DECODE, "preempted: x", retryable=True))
    assert len(bench.endings_of("a")) == 1


@pytest.mark.parametrize(("stage", "status"), [(Stage.QUEUE, 400), (Stage.RESERVE, 400), (Stage.PREFILL, 500)])
def test_what_cannot_be_repeated_ends_with_its_status(stage: Stage, status: int) -> None:
    bench = pair_bench()
    handle = only_reserve(bench.submit("a"))[1].handle
    bench.reserved("d0", handle)
    bench.hear("p0", Failed(handle, stage, "41 pages of 40", retryable=False))
    [end] = bench.endings_of("a")
    assert isinstance(end, End) and end.status == status and "41 pages of 40" in end.reason


def test_a_request_that_never_fits_one_instance_tries_the_other_and_then_is_400() -> None:
    bench = pair_bench()
    bench.join(hello("d1", Role.DECODE))
    name, reserve = only_reserve(bench.submit("a"))
    other, again = only_reserve(bench.hear(name, Refused(reserve.handle, "80 pages of 64", None)))
    assert {name, other} == {"d0", "d1"}
    bench.hear(other, Refused(again.handle, "80 pages of 64", None))
    [end] = bench.endings_of("a")
    assert isinstance(end, End) and (end.status, end.reason) == (400, "80 pages of 64")


def test_refused_for_now_waits_in_its_old_place_and_costs_no_attempt() -> None:
    bench = pair_bench(config=RouterConfig(max_attempts=1))
    first = only_reserve(bench.submit("a"))[1]
    bench.hear("d0", Refused(first.handle, "full", 0.5))
    assert not sent(bench.submit("b"), Reserve)
    reserves = sent(bench.wait(0.6), Reserve)
    assert [message.handle.request_id for _, message in reserves] == ["a", "b"]
    assert not bench.endings_of("a")


def test_only_who_was_asked_is_told_to_stop() -> None:
    bench = pair_bench()
    bench.submit("a")
    assert [name for name, _ in sent(bench.abandon("a"), Cancel)] == ["d0"]


def test_a_freed_place_ends_the_back_off_at_once() -> None:
    bench = pair_bench()
    handle = decoding(bench, "a", max_tokens=2)
    other = only_reserve(bench.submit("b"))[1]
    bench.hear("d0", Refused(other.handle, "full", 5.0))
    effects = bench.tokens("d0", handle, 4, 71, finish=Finish.LENGTH)
    assert only_reserve(effects)[1].handle == Handle("b", 1)


def test_the_queue_is_bounded_in_length_and_in_time() -> None:
    bench = pair_bench(config=RouterConfig(max_queue=2, queue_s=5.0))
    first = only_reserve(bench.submit("a"))[1]
    bench.hear("d0", Refused(first.handle, "full", 60.0))
    bench.submit("b")
    bench.submit("c")
    [end] = bench.endings_of("c")
    assert isinstance(end, End) and (end.status, end.retry_after_s) == (429, 1.0)
    bench.wait(5.2)
    for request_id in "ab":
        [end] = bench.endings_of(request_id)
        assert isinstance(end, End) and (end.status, end.retry_after_s) == (503, 1.0)
    assert "full" in bench.endings_of("a")[0].reason and bench.brain.is_idle()


def test_of_a_burst_that_comes_back_those_beyond_the_bound_are_turned_away_at_once_the_last_first() -> None:
    bench = pair_bench(config=RouterConfig(max_queue=2))
    decoding(bench, "streams", max_tokens=9)
    burst = [only_reserve(bench.submit(name))[1].handle for name in "abcd"]
    for handle in burst:
        bench.hear("d0", Refused(handle, "16 requests wait already", 60.0))
    for name in "cd":
        [end] = bench.endings_of(name)
        assert isinstance(end, End) and (end.status, end.retry_after_s) == (429, 1.0) and "16 requests" in end.reason
    assert not bench.endings_of("a") and not bench.endings_of("b")
    bench.wait(3.2, beating=["p0"])  # d0 is suspect, and what it decoded waits too
    assert [len(bench.endings_of(name)) for name in ("streams", "a", "b")] == [0, 0, 1]


def test_without_an_instance_of_a_role_the_answer_names_it() -> None:
    bench = Bench()
    bench.submit("a")
    bench.join(hello("p0", Role.PREFILL))
    bench.submit("b")
    assert bench.endings_of("a") == [End("a", 503, "no prefill and no decode instance is ready", 1.0)]
    assert bench.endings_of("b") == [End("b", 503, "no decode instance is ready", 1.0)]


def test_nonsense_is_turned_away_before_it_starts() -> None:
    bench = pair_bench()
    bench.submit("a", tokens=())
    bench.submit("b", max_tokens=0)
    assert [bench.endings_of(name)[0].status for name in "ab"] == [400, 400]


def test_abandon_cancels_both_ends_and_silences_the_request() -> None:
    bench = pair_bench()
    handle = decoding(bench, "a")
    effects = bench.abandon("a")
    assert sorted(name for name, _ in sent(effects, Cancel)) == ["d0", "p0"]
    before = len(bench.effects)
    bench.tokens("d0", handle, 4, 71, finish=Finish.STOP)
    bench.hear("d0", Cancelled(handle))
    bench.abandon("a")
    assert not [e for e in bench.effects[before:] if isinstance(e, Emit | End)]
    assert bench.brain.is_idle() and not bench.endings_of("a")


def wanted(bench: Bench) -> dict[str, Wanted]:
    """What each instance is told, the next time."""
    return dict(sent(bench.wait(1.0), Wanted))


def test_each_instance_is_told_each_second_what_is_wanted_of_it() -> None:
    bench = pair_bench()
    nothing = Wanted(())
    assert wanted(bench) == {"p0": nothing, "d0": nothing}
    handle = only_reserve(bench.submit("a"))[1].handle
    assert wanted(bench) == {"p0": nothing, "d0": Wanted((handle,))}  # prefill was not asked yet
    bench.reserved("d0", handle)
    assert wanted(bench) == {"p0": Wanted((handle,)), "d0": Wanted((handle,))}
    bench.first("p0", handle, 3, 70)
    assert wanted(bench)["p0"] == Wanted((), (handle,)), "it hands it off, or has done so"
    bench.tokens("d0", handle, 4, 71)
    assert wanted(bench) == {"p0": nothing, "d0": Wanted((handle,))}
    bench.abandon("a")
    assert set(wanted(bench).values()) == {nothing}


def test_late_pages_are_wanted_of_decode_from_the_first_token_on() -> None:
    bench = pair_bench(config=RouterConfig(reserve="late"))
    handle = only_prefill(bench.submit("a"))[1].handle
    assert wanted(bench) == {"p0": Wanted((handle,)), "d0": Wanted(())}
    bench.first("p0", handle, 3, 70)
    assert wanted(bench) == {"p0": Wanted((handle,)), "d0": Wanted((handle,))}
    bench.reserved("d0", handle)
    assert wanted(bench) == {"p0": Wanted((), (handle,)), "d0": Wanted((handle,))}


def test_what_is_missing_is_repeated_at_once_unless_it_may_be_gone() -> None:
    bench = pair_bench()
    handle = decoding(bench, "a")
    assert bench.hear("p0", Missing((handle, Handle("unknown", 0)))) == []
    effects = bench.hear("d0", Missing((handle,)))
    assert only_reserve(effects)[1].handle == Handle("a", 1)
    assert sorted(name for name, _ in sent(effects, Cancel)) == ["d0", "p0"]
    assert bench.hear("d0", Missing((handle,))) == [], "that attempt is over"


STAGES = {
    "reserve": (2.0, "no answer to Reserve within 2 s"),
    "prefill": (120.0, "no first token within 120 s"),
    "land": (30.0, "first token, but none of decode within 30 s"),
    "progress": (30.0, "no token within 30 s"),
    "gap": (3.0, "the token at position 5 was lost on its way"),
}


@pytest.mark.parametrize("stage", STAGES)
def test_each_stage_has_its_deadline_and_its_reason(stage: str) -> None:
    seconds, reason = STAGES[stage]
    bench = pair_bench(config=RouterConfig(max_attempts=1))
    handle = only_reserve(bench.submit("a", deadline_s=600.0))[1].handle
    if stage != "reserve":
        bench.reserved("d0", handle)
    if stage in ("land", "progress", "gap"):
        bench.first("p0", handle, 3, 70)
    if stage in ("progress", "gap"):
        bench.tokens("d0", handle, 4, 71)
    if stage == "gap":
        bench.tokens("d0", handle, 6, 73)
    bench.wait(seconds - 0.2)
    assert not bench.endings_of("a")
    effects = bench.wait(0.4)
    [end] = bench.endings_of("a")
    assert isinstance(end, End) and end.status == 503 and reason in end.reason
    assert "d0" in {name for name, _ in sent(effects, Cancel)}


def test_the_whole_answer_has_a_deadline_of_its_own() -> None:
    bench = pair_bench()
    handle = decoding(bench, "a", max_tokens=200)
    for position in range(4, 64):
        bench.wait(1.0)
        bench.tokens("d0", handle, position, 7)
    bench.wait(1.0)
    [end] = bench.endings_of("a")
    assert isinstance(end, End) and end.status == 504 and bench.brain.is_idle()


def test_a_lost_prefill_is_repeated_before_decode_has_everything_and_not_after() -> None:
    bench = pair_bench()
    bench.join(hello("p1", Role.PREFILL))
    before, after = decoding(bench, "a"), decoding(bench, "b")
    bench.tokens("d0", after, 4, 71)
    effects = bench.join(hello("p0", Role.PREFILL, epoch="2"))
    assert [message.handle for _, message in sent(effects, Reserve)] == [Handle("a", 1)]
    assert before.attempt == 0


def test_silence_of_decode_moves_its_requests_elsewhere() -> None:
    bench = pair_bench()
    bench.join(hello("d1", Role.DECODE))
    name = only_reserve(bench.submit("a"))[0]
    handle = Handle("a", 0)
    bench.reserved(name, handle)
    bench.first("p0", handle, 3, 70)
    rest = [other for other in bench.lives if other != name]
    effects = bench.wait(3.2, beating=rest)
    other, reserve = only_reserve(effects)
    assert other != name and reserve.tokens == (5, 6, 7, 70)


def test_cancelled_by_the_instance_itself_is_a_failure_to_repeat() -> None:
    bench = pair_bench()
    handle = decoding(bench, "a")
    assert only_reserve(bench.hear("d0", Cancelled(handle)))[1].handle == Handle("a", 1)


def test_a_duplicate_reserved_starts_prefill_once() -> None:
    bench = pair_bench()
    handle = only_reserve(bench.submit("a"))[1].handle
    bench.reserved("d0", handle)
    assert not sent(bench.reserved("d0", handle), Prefill)


def test_only_the_instance_that_was_asked_can_answer() -> None:
    bench = pair_bench()
    bench.join(hello("d1", Role.DECODE))
    name, reserve = only_reserve(bench.submit("a"))
    other = "d1" if name == "d0" else "d0"
    effects = bench.hear(other, Reserved(reserve.handle, Ticket(other, "1", (9,))))
    assert not sent(effects, Prefill)
    bench.hear(other, Failed(reserve.handle, Stage.DECODE, "not mine", retryable=False))
    assert not bench.endings_of("a")


def test_a_message_no_worker_sends_is_noted_and_harms_nobody() -> None:
    bench = pair_bench()
    handle = decoding(bench, "a")
    bench.hear("d0", Welcome())
    bench.tokens("d0", handle, 4, 71, 72, 73, finish=Finish.LENGTH)
    assert bench.answer_of("a") == [70, 71, 72, 73]


def test_tokens_before_there_is_a_prefill_are_nonsense() -> None:
    bench = pair_bench()
    handle = only_reserve(bench.submit("a"))[1].handle
    bench.tokens("d0", handle, 3, 66)
    assert bench.answer_of("a") == []


def test_work_goes_where_least_is_pending() -> None:
    bench = pair_bench()
    bench.join(hello("p1", Role.PREFILL), hello("d1", Role.DECODE))
    chosen = [only_reserve(bench.submit(str(i), tokens=tuple(range(i, i + 9))))[0:2] for i in range(8)]
    assert {(name, reserve.prefill) for name, reserve in chosen} == {("d0", "p0"), ("d1", "p1")}
    assert [name for name, _ in chosen].count("d0") == 4


def test_a_common_beginning_draws_prompts_to_its_instance_until_that_is_busier() -> None:
    bench = pair_bench()
    bench.join(hello("p1", Role.PREFILL))
    system = tuple(range(40))

    def place(user: int) -> Reserve:
        reserve = only_reserve(bench.submit(str(user), tokens=(*system, 50 + user)))[1]
        bench.reserved("d0", reserve.handle)
        return reserve

    assert place(0).prefill == "p0"
    assert place(1).prefill == "p1"  # p0 has 41 tokens to compute first
    for user in (0, 1):
        bench.first(f"p{user}", Handle(str(user), 0), 41, 70, Finish.STOP)
    other = only_reserve(bench.submit("other", tokens=tuple(range(200, 220))))[1]
    assert other.prefill == "p0"
    assert place(2).prefill == "p1"  # both hold the beginning, p0 is busier
    bench.first("p1", Handle("2", 0), 41, 70, Finish.STOP)
    bench.join(hello("p2", Role.PREFILL))
    assert place(3).prefill == "p1"  # p2 would compute all 41


def test_requests_count_until_their_stream_ends() -> None:
    bench = pair_bench()
    bench.join(hello("d1", Role.DECODE))
    _, first = only_reserve(bench.submit("a"))
    streaming = sent(bench.effects, Reserve)[0][0]
    bench.reserved(streaming, first.handle)
    bench.first("p0", first.handle, 3, 70)
    bench.tokens(streaming, first.handle, 4, 71)
    assert only_reserve(bench.submit("b"))[0] != streaming


def test_draining_lets_open_requests_end_and_takes_no_new_one() -> None:
    bench = pair_bench()
    handle = decoding(bench, "a", max_tokens=2)
    bench.on(Drain("SIGTERM"))
    bench.submit("b")
    [end] = bench.endings_of("b")
    assert isinstance(end, End) and end.status == 503
    effects = bench.tokens("d0", handle, 4, 71, finish=Finish.LENGTH)
    assert Exit("drained: SIGTERM", failed=False) in effects


def test_ten_thousand_requests_cost_a_tick_nothing() -> None:
    bench = pair_bench(config=RouterConfig(max_queue=20_000), deadlines=Deadlines())
    check = bench.brain.check
    bench.brain.check = lambda: None  # type: ignore[method-assign]
    for index in range(10_000):
        bench.submit(str(index))
    check()
    looked = 0
    answers = bench.brain._dispatch.answers
    bench.brain.on(Tick(), bench.now)  # says what is wanted, which it does once a second
    for _ in range(10):
        bench.now += 0.01
        looked += len(bench.brain.on(Tick(), bench.now))
    assert len(answers) == 10_000 and looked == 0
    assert bench.brain.state()["requests"] == {
        "queued": 0,
        "reserving": 10_000,
        "prefilling": 0,
        "handing": 0,
        "decoding": 0,
    }
