"""A decode brain: promises, overlap, growth, preemption, and pages that no writer may touch any more."""

from __future__ import annotations

import pytest
from brains import EPOCH, PAGE, Instance, answer, hello, reserve_for, said, sample, streamed

from pd.runtime.core.events import Effect, Exit, Peer, Stamp
from pd.runtime.wire.messages import (
    Cancel,
    Cancelled,
    Failed,
    Fenced,
    Heard,
    Landed,
    Progress,
    Refused,
    Reserve,
    Reserved,
    Stop,
    Tokens,
)
from pd.runtime.wire.plans import Attach, PeerUnreachable, Sever, Severed, StepDone, StepKind, StepPlan
from pd.runtime.wire.values import Finish, Handle, Role, Stage, Token

PREFILL = hello("p", Role.PREFILL)
P = Peer("p", PREFILL.epoch)


def decoder(**changes: int) -> Instance:
    """Attached to one prefill instance."""
    me = Instance(Role.DECODE, **changes)
    me.meet(PREFILL)
    return me


def reserve(me: Instance, num_tokens: int, *, name: str = "r", **changes: object) -> Reserve:
    request = reserve_for(name, num_tokens, life=P, **changes)
    me.router(request)
    return request


def land(me: Instance, request: Reserve) -> list[Effect]:
    """The peer writes all of it and says so."""
    reserved = [each for each in said(me.effects, Reserved) if each.handle == request.handle]
    num_tokens = len(request.tokens)
    me.ranks.receive(request.tokens, reserved[0].ticket)
    num_pages = len(reserved[0].ticket.pages)
    return me.peer(P, Landed(request.handle, num_tokens, Token(sample(request.tokens)), num_pages))


@pytest.mark.parametrize("num_tokens", [1, 3, 4, 5, 7, 8, 9])
def test_a_landed_request_goes_on_from_the_first_token_to_its_end(num_tokens: int) -> None:
    me = decoder()
    request = reserve(me, num_tokens, max_tokens=9)
    assert len(said(me.effects, Reserved)[0].ticket.pages) == -(-num_tokens // PAGE)
    land(me, request)
    me.settle()
    tokens, finish = answer(request, 64)
    assert streamed(me.effects, request.handle) == (tokens[1:], finish)
    first = said(me.effects, Tokens)[0].progress[0]
    assert first.position == num_tokens + 1
    assert me.brain.is_idle()


def test_the_next_step_is_launched_before_this_one_is_done_and_none_is_planned_beyond_the_limit() -> None:
    me = decoder()
    request = reserve(me, 4, max_tokens=4)
    land(me, request)
    assert [[(c.start, c.stop) for c in plan.chunks] for plan in me.flying] == [[(4, 5)], [(5, 6)]]
    me.settle()
    plans = said(me.effects, StepPlan)
    assert [(c.start, c.stop) for plan in plans for c in plan.chunks] == [(4, 5), (5, 6), (6, 7)]
    assert [plan.kind for plan in plans] == [StepKind.DECODE] * 3 + [StepKind.IDLE]
    assert plans[-1].retire == (0,)


def test_the_token_of_the_step_after_a_stop_is_ignored_and_the_slot_retired_in_the_plan_after() -> None:
    me = decoder()
    like = reserve_for("r", 4, life=P, max_tokens=30)
    second = answer(like, 64)[0][1]
    request = reserve(me, 4, max_tokens=30, stop_token_ids=(second,))
    land(me, request)
    effects = me.step()
    assert streamed(effects, request.handle) == ((second,), Finish.STOP)
    assert me.brain.load().num_running == 0
    assert not me.brain.is_idle()  # the step in flight still writes its page
    effects = me.step()
    assert said(effects, Tokens) == []
    assert me.brain.is_idle()
    assert [(plan.kind, plan.retire) for plan in said(effects, StepPlan)] == [(StepKind.IDLE, (0,))]


def test_pages_come_back_only_when_every_rank_is_done_with_the_last_step_that_names_them() -> None:
    me = decoder(num_ranks=2, num_pages=3)
    request = reserve(me, 4, max_tokens=3)
    land(me, request)
    me.router(Cancel(request.handle, "left"))
    first, second = me.flying
    me.flying.clear()
    for plan in (first, second):
        me.rank(StepDone(plan.step, me.ranks.run(plan), 0.1), 0)
    me.rank(StepDone(first.step, (), 0.1), 1)
    assert me.brain.load().num_free_pages == 1
    assert [each.retry_after_s for each in said(me.router(reserve_for("rr", 8, life=P, max_tokens=2)), Refused)] == [
        1.0
    ]
    me.rank(StepDone(second.step, (), 0.1), 1)
    assert me.brain.load().num_free_pages == 3


def test_a_slot_given_up_is_taken_again_in_the_same_plan() -> None:
    me = decoder(max_running=1)
    one, two = reserve(me, 4, name="a", max_tokens=2), reserve(me, 4, name="bb", max_tokens=2)
    land(me, one)
    land(me, two)
    assert me.brain.load().num_waiting == 1
    effects = me.step()
    plan = said(effects, StepPlan)[0]
    assert (plan.retire, [init.slot for init in plan.admits]) == ((0,), [0])
    me.settle()
    for request in (one, two):
        assert streamed(me.effects, request.handle) == (answer(request, 64)[0][1:], Finish.LENGTH)


def test_one_message_a_step_tells_all_tokens() -> None:
    me = decoder()
    requests = [reserve(me, 4, name="x" * (n + 1), max_tokens=9) for n in range(3)]
    for request in requests:
        land(me, request)
    me.step()
    me.step()
    effects = me.step()
    assert [[each.handle for each in message.progress] for message in said(effects, Tokens)] == [
        [request.handle for request in requests]
    ]


def test_landed_beyond_our_own_limit_ends_with_an_empty_last_word() -> None:
    me = decoder(max_model_len=5)
    request = reserve(me, 4)
    effects = land(me, request)
    assert said(effects, Tokens) == [Tokens((Progress(request.handle, 5, (), Finish.LENGTH),))]
    assert said(effects, StepPlan) == []
    assert me.brain.is_idle()


@pytest.mark.parametrize(("num_tokens", "max_tokens"), [(64, 1), (60, 16), (15, 20), (0, 4)])
def test_what_can_never_fit_is_refused_for_good(num_tokens: int, max_tokens: int) -> None:
    me = decoder(num_pages=8, max_model_len=64)
    effects = me.router(reserve_for("r", num_tokens, life=P, max_tokens=max_tokens))
    assert [each.retry_after_s for each in said(effects, Refused)] == [None]
    assert me.brain.is_idle()


def test_what_fits_only_into_the_empty_pool_is_taken() -> None:
    me = decoder(num_pages=8)
    request = reserve(me, 28, max_tokens=5)
    land(me, request)
    me.settle()
    assert streamed(me.effects, request.handle)[1] is Finish.LENGTH


def test_a_full_pool_refuses_at_once_and_room_to_grow_is_kept() -> None:
    me = decoder(num_pages=16)
    for number in range(3):
        reserve(me, 15, name="x" * (number + 1))
    assert len(said(me.effects, Reserved)) == 3
    land(me, reserve_for("x", 15, life=P))
    assert me.brain.load().num_free_pages == 3
    effects = me.router(reserve_for("yyyy", 11, life=P))
    assert len(said(effects, Refused)) == 1  # it needs 3; the running one may need one of them
    assert len(said(me.router(reserve_for("zzzzz", 7, life=P)), Reserved)) == 1


def test_the_youngest_gives_way_to_the_oldest_which_never_does() -> None:
    me = decoder(num_pages=9, max_model_len=64)
    old = reserve(me, 8, name="a", max_tokens=20)
    young = reserve(me, 8, name="bb", max_tokens=20)
    land(me, old)
    land(me, young)
    me.settle()
    failed = said(me.effects, Failed)
    assert [(each.handle, each.stage, each.retryable) for each in failed] == [(young.handle, Stage.DECODE, True)]
    assert "preempted" in failed[0].reason
    assert streamed(me.effects, old.handle) == (answer(old, 64)[0][1:], Finish.LENGTH)
    assert me.brain.is_idle()


def test_one_without_a_page_waits_while_others_are_about_to_give_theirs_back() -> None:
    me = decoder(num_pages=6)
    short, long = reserve(me, 8, name="a", max_tokens=2), reserve(me, 8, name="bb", max_tokens=12)
    land(me, short)
    land(me, long)
    me.settle()
    assert said(me.effects, Failed) == []
    assert streamed(me.effects, long.handle) == (answer(long, 64)[0][1:], Finish.LENGTH)


def test_cancelled_before_landing_the_pages_wait_for_the_fence() -> None:
    me = decoder(num_pages=4)
    request = reserve(me, 15, max_tokens=2)
    effects = me.router(Cancel(request.handle, "left"))
    assert said(effects, Cancelled) == [Cancelled(request.handle)]
    assert said(effects, Stop) == [Stop(request.handle)]
    assert len(said(me.router(reserve_for("rr", 4, life=P)), Refused)) == 1
    assert said(me.peer(Peer("p", "another"), Fenced(request.handle, "")), Refused) == []
    assert not me.brain.is_idle()
    me.peer(P, Fenced(request.handle, "stopped"))
    assert me.brain.is_idle()
    assert len(said(me.router(reserve_for("rrr", 4, life=P)), Reserved)) == 1


def test_a_stop_is_repeated_until_landed_or_fenced_answers_it() -> None:
    me = decoder()
    request = reserve(me, 4)
    me.router(Cancel(request.handle, "left"))
    assert len(said(me.wait(1.65), Stop)) == 3
    assert said(land(me, request), StepPlan) == []
    assert me.brain.is_idle()
    assert said(me.wait(2.0), Stop) == []


def test_a_reservation_that_does_not_land_is_failed_then_fenced_then_severed() -> None:
    me = decoder()
    request = reserve(me, 4, deadline_s=5.0)
    effects = me.wait(5.1)
    assert [(each.stage, each.retryable) for each in said(effects, Failed)] == [(Stage.TRANSFER, True)]
    assert said(effects, Stop) == [Stop(request.handle)]
    effects = me.wait(30.1)
    assert said(effects, Failed) == []
    assert said(effects, Sever) == [Sever("p", EPOCH)]
    assert not me.brain.is_idle()
    me.rank(Severed("p", EPOCH, True))
    assert me.brain.is_idle()
    refused = said(me.router(reserve_for("rr", 4, life=P)), Refused)
    assert [each.is_parted for each in refused] == [True]


def test_nothing_is_promised_to_who_can_never_be_reached_and_the_reason_is_told() -> None:
    me = decoder()
    before = reserve(me, 4)
    why = "shm cannot reach p.1.0: it runs on another host"
    effects = me.rank(PeerUnreachable("p", EPOCH, why, is_final=True))
    assert said(effects, Failed) == [], "its own word of the promise comes"
    (refused,) = said(me.router(reserve_for("rr", 4, life=P)), Refused)
    assert (refused.retry_after_s, refused.is_parted) == (None, True) and refused.reason == why
    me.peer(P, Fenced(before.handle, "barred there, too"))
    assert said(me.wait(60.0), Attach) == [] and me.brain.is_idle()
    assert said(me.effects, Exit) == []
    me.meet(hello("p", Role.PREFILL, epoch="2"))
    me.wait(0.2)
    assert len(said(me.router(reserve_for("rrr", 4, life=Peer("p", "2"))), Reserved)) == 1


def test_a_lost_peers_pages_wait_until_all_ranks_have_severed_it() -> None:
    me = decoder(num_ranks=2)
    request = reserve(me, 4)
    effects = me.meet(hello("p", Role.PREFILL, epoch="2"))
    assert [failed.handle for failed in said(effects, Failed)] == [request.handle]
    assert said(effects, Sever) == [Sever("p", EPOCH)]
    assert [attach.epoch for attach in said(effects, Attach)] == ["2"]
    me.rank(Severed("p", EPOCH, True), 1)
    assert not me.brain.is_idle()
    me.rank(Severed("p", EPOCH, True), 0)
    assert me.brain.is_idle()


def test_what_one_rank_could_not_sever_is_quarantined_until_it_could() -> None:
    me = decoder(num_ranks=2, num_pages=8)
    reserve(me, 7)
    me.meet(hello("p", Role.PREFILL, epoch="2"))
    me.rank(Severed("p", EPOCH, True), 0)
    me.rank(Severed("p", EPOCH, False), 1)
    assert (me.brain.load().num_free_pages, me.brain.is_idle()) == (6, False)
    effects = me.wait(2.2)
    assert said(effects, Sever) == [Sever("p", EPOCH)]
    assert said(me.wait(5.0), Sever) == []  # the ranks have not answered yet
    me.rank(Severed("p", EPOCH, True), 0)
    me.rank(Severed("p", EPOCH, True), 1)
    assert me.brain.is_idle()


def test_too_much_quarantine_ends_the_instance() -> None:
    me = decoder(num_pages=8)
    reserve(me, 19)
    me.meet(hello("p", Role.PREFILL, epoch="2"))
    me.rank(Severed("p", EPOCH, False))
    assert [exit.failed for exit in said(me.wait(0.2), Exit)] == [True]


def test_a_fence_after_prefill_failed_frees_without_a_word_to_the_router() -> None:
    me = decoder()
    request = reserve(me, 4)
    effects = me.peer(P, Fenced(request.handle, "write failed"))
    assert said(effects, Failed) == said(effects, Cancelled) == []
    assert me.brain.is_idle()


def test_landed_again_late_or_for_an_unknown_handle_is_dropped() -> None:
    me = decoder()
    request = reserve(me, 4, max_tokens=3)
    land(me, request)
    effects = land(me, request)
    assert [stamp.what for stamp in said(effects, Stamp)] == ["stale"]
    assert said(effects, Heard) == [Heard(request.handle)], "else it would be said for ever"
    me.settle()
    for handle in (request.handle, Handle("unknown", 1)):
        assert said(me.peer(P, Landed(handle, 4, Token(1), 1)), StepPlan) == []
    assert me.brain.is_idle()


def test_landed_of_another_life_or_at_another_position_is_dropped() -> None:
    me = decoder()
    request = reserve(me, 4)
    assert said(me.peer(Peer("p", "0"), Landed(request.handle, 4, Token(1), 1)), StepPlan) == []
    assert said(me.peer(P, Landed(request.handle, 5, Token(1), 1)), StepPlan) == []
    assert len(said(land(me, request), StepPlan)) == 2


@pytest.mark.parametrize("num_pages", [0, 1, 3])
def test_landed_with_another_number_of_pages_than_was_promised_fails_the_attempt_naming_both(num_pages: int) -> None:
    me = decoder()
    request = reserve(me, 8)
    effects = me.peer(P, Landed(request.handle, 8, Token(sample(request.tokens)), num_pages))
    (failed,) = said(effects, Failed)
    assert failed.reason == f"p says that it wrote {num_pages} pages, and 2 are its to write" and failed.retryable
    assert said(effects, Heard) == [Heard(request.handle)] and said(effects, StepPlan) == []
    assert me.brain.is_idle() and me.brain.load().num_free_pages == 64


def test_a_reservation_for_a_life_that_ranks_could_not_sever_is_refused() -> None:
    me = decoder()
    for life in (Peer("p", "0"), Peer("unknown", "1")):
        effects = me.router(reserve_for(f"r{life.name}", 4, life=life))
        assert [each.retry_after_s for each in said(effects, Refused)] == [0.1]  # it may be on the list by then


def test_a_repeated_or_older_reservation_takes_no_pages() -> None:
    me = decoder()
    old, new = reserve_for("r", 4, life=P), reserve_for("r", 4, life=P, attempt=2)
    me.router(new)
    for late in (new, old):
        assert said(me.router(late), Reserved) == said(me.router(late), Refused) == []
    assert me.brain.load().num_free_pages == 62


def test_a_cancel_that_overtook_its_reservation_keeps_it_from_being_made() -> None:
    me = decoder()
    request = reserve_for("r", 4, life=P)
    assert said(me.router(Cancel(request.handle, "left")), Cancelled) == [Cancelled(request.handle)]
    assert said(me.router(request), Reserved) == []
    assert me.brain.is_idle()


def test_a_newer_attempt_stops_the_older_one() -> None:
    me = decoder()
    old = reserve(me, 4)
    effects = me.router(reserve_for("r", 4, life=P, attempt=2))
    assert said(effects, Stop) == [Stop(old.handle)]
    assert [each.handle.attempt for each in said(effects, Reserved)] == [2]
