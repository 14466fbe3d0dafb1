"""What all roles share: membership, the gate for strangers, draining, and a colocated instance."""

from __future__ import annotations

import pytest
from brains import EPOCH, Instance, answer, hello, prefill_for, reserve_for, said, streamed, ticket_of

from pd.runtime.core.events import Abandon, Exit, Peer, Stamp
from pd.runtime.wire.messages import (
    Beat,
    Bye,
    Cancel,
    Cancelled,
    DrainInstance,
    Failed,
    Fenced,
    FirstToken,
    Hello,
    Landed,
    Missing,
    Prefill,
    Refusal,
    Refused,
    Reserve,
    Stop,
    Wanted,
    Welcome,
    WhoAreYou,
)
from pd.runtime.wire.plans import StepDone, StepKind, StepPlan, WriteDone
from pd.runtime.wire.values import Finish, Handle, Role, Stage, Token

ALL = (Role.PREFILL, Role.DECODE, Role.COLOCATED)


@pytest.mark.parametrize("role", ALL)
def test_hello_is_said_each_second_until_welcome_and_beats_follow(role: Role) -> None:
    me = Instance(role)
    effects = me.wait(3.95)
    assert said(effects, Hello) == [me.hello] * 4
    assert said(effects, Beat) == []
    me.router(Welcome())
    effects = me.wait(2.0)
    assert said(effects, Hello) == []
    assert len(said(effects, Beat)) == 4


@pytest.mark.parametrize("start", [-5000.0, 0.0, 1e7])
def test_deadlines_hold_wherever_the_hosts_clock_stands(start: float) -> None:
    me = Instance(Role.DECODE)
    me.now = start
    me.wait(0.1)
    me.router(Welcome())
    me.meet(hello("p", Role.PREFILL))
    me.router(reserve_for("r", 4, life=Peer("p", EPOCH), deadline_s=2.0))
    effects = me.wait(1.9)
    assert (len(said(effects, Beat)), said(effects, Failed)) == (4, [])
    assert len(said(me.wait(0.3), Failed)) == 1


def test_a_router_that_does_not_answer_is_complained_of_every_ten_seconds() -> None:
    me = Instance(Role.DECODE)
    stamps = [stamp for stamp in said(me.wait(35.0), Stamp) if stamp.what == "unwelcome"]
    assert len(stamps) == 3


def test_a_restarted_router_is_greeted_again() -> None:
    me = Instance(Role.DECODE)
    me.wait(0.1)
    me.router(Welcome())
    assert said(me.router(WhoAreYou()), Hello) == [me.hello]
    assert said(me.wait(1.2), Hello) == [me.hello]
    me.router(Welcome())
    assert said(me.wait(2.0), Hello) == []


def test_a_refusal_ends_the_life_it_names_and_no_other() -> None:
    me = Instance(Role.DECODE)
    assert said(me.router(Refusal("old", "another")), Exit) == []
    assert said(me.router(Refusal("dtype: bfloat16 and float32", EPOCH)), Exit) == [
        Exit("dtype: bfloat16 and float32", failed=True, refused=True)
    ]
    assert said(me.router(Refusal("again", "")), Exit) == []


@pytest.mark.parametrize("role", ALL)
def test_what_is_not_meant_for_it_is_dropped_with_a_stamp(role: Role) -> None:
    me = Instance(role)
    router, peer, rank = Peer("router", ""), Peer("x", "1"), Peer("0", "")
    strange = [
        (router, StepDone(1, (), 0.1)),
        (router, Landed(Handle("r", 1), 1, Token(1), 1)),
        (peer, Welcome()),
        (peer, reserve_for("r", 4, life=peer)),
        (rank, StepDone(1, (), 0.1)),
        (rank, WriteDone(1, None, 1, 0.1)),
        (rank, Cancel(Handle("r", 1), "")),
        (Peer("7", ""), StepDone(1, (), 0.1)),
        (Peer("nobody", ""), Welcome()),
    ]
    if role is not Role.DECODE:
        strange += [(router, reserve_for("r", 4, life=peer)), (peer, Landed(Handle("r", 1), 1, Token(1), 1))]
        strange += [(peer, Fenced(Handle("r", 1), ""))]
    else:
        strange += [(router, prefill_for("r", 4)), (peer, Stop(Handle("r", 1)))]
    for sender, message in strange:
        assert [stamp.what for stamp in said(me.peer(sender, message), object)] == ["unexpected"], message
    assert [stamp.what for stamp in said(me.on(Abandon("r", "left")), object)] == ["unexpected"]
    assert me.brain.is_idle()


@pytest.mark.parametrize("role", ALL)
def test_a_cancel_is_always_answered(role: Role) -> None:
    me = Instance(role)
    handle = Handle("unknown", 3)
    assert said(me.router(Cancel(handle, "left")), Cancelled) == [Cancelled(handle)]


@pytest.mark.parametrize("role", ALL)
def test_what_the_router_wants_no_more_is_given_up_though_its_cancel_was_lost(role: Role) -> None:
    me = Instance(role)
    me.meet(hello("p", Role.PREFILL), hello("d", Role.DECODE))
    kept, lost = asked_of(me, "kept"), asked_of(me, "lost")
    effects = me.router(Wanted((kept,)))
    assert said(effects, Cancelled) == [Cancelled(lost)]
    assert said(effects, Stop) == ([Stop(lost)] if role is Role.DECODE else [])
    assert said(me.router(Wanted((), (kept,))), Cancelled) == [], "prefill may have it still"
    me.router(Wanted(()))
    me.peer(Peer("p", EPOCH), Fenced(kept, ""))
    me.peer(Peer("p", EPOCH), Fenced(lost, ""))
    me.settle()
    assert me.brain.is_idle()


@pytest.mark.parametrize("role", ALL)
def test_what_is_wanted_and_not_here_is_said_to_be_missing_the_second_time(role: Role) -> None:
    me = Instance(role)
    me.meet(hello("p", Role.PREFILL), hello("d", Role.DECODE))
    here, never_came = asked_of(me, "here"), Handle("never", 1)
    assert said(me.router(Wanted((here, never_came))), Missing) == []
    assert said(me.router(Wanted((here,))), Missing) == []
    assert said(me.router(Wanted((here, never_came))), Missing) == []
    for _ in range(2):
        assert said(me.router(Wanted((here, never_came))), Missing) == [Missing((never_came,))]
    assert said(me.router(Wanted((here,), (never_came,))), Missing) == [], "it need not be here"


def test_what_failed_is_said_again_while_the_router_wants_it() -> None:
    me = Instance(Role.PREFILL)
    peer = hello("d", Role.DECODE)
    me.meet(peer)
    handle = asked_of(me, "r")
    (failed,) = said(me.meet(hello("d", Role.DECODE, epoch="2")), Failed)
    assert failed.handle == handle
    for listed in (Wanted((handle,)), Wanted((), (handle,))):
        effects = me.router(listed)
        assert said(effects, Failed) == [failed] and said(effects, Missing) == []
    assert said(me.router(Wanted(())), Failed) == said(me.router(Wanted((handle,))), Failed) == []


def asked_of(me: Instance, name: str) -> Handle:
    """A request that is under way here."""
    ticket = ticket_of(hello("d", Role.DECODE), 4, first_page=ord(name[0]))
    message = prefill_for(name, 4, ticket=ticket if me.hello.role is Role.PREFILL else None)
    me.router(reserve_for(name, 4, life=Peer("p", EPOCH)) if me.hello.role is Role.DECODE else message)
    return message.handle


def test_a_draining_instance_tells_a_new_router_that_it_drains() -> None:
    me = Instance(Role.COLOCATED)
    handle = asked_of(me, "r")
    me.drain()
    effects = me.router(WhoAreYou())
    assert said(effects, Hello) == [me.hello] and len(said(effects, Bye)) == 1
    assert said(me.router(Wanted(())), Cancelled) == [Cancelled(handle)], "that router wants nothing of it"
    me.settle()
    assert [exit.failed for exit in said(me.effects, Exit)] == [False]


def test_a_draining_instance_says_so_with_its_beats() -> None:
    me = Instance(Role.COLOCATED)
    me.wait(0.1)
    me.router(Welcome())
    me.router(prefill_for("r", 4))
    assert [beat.is_draining for beat in said(me.wait(1.0), Beat)] == [False, False]
    me.drain()
    assert [beat.is_draining for beat in said(me.wait(1.0), Beat)] == [True, True]


def test_an_idle_instance_drains_at_once() -> None:
    me = Instance(Role.DECODE)
    effects = me.drain()
    assert said(effects, Bye) == [Bye("test")]
    assert [exit.failed for exit in said(effects, Exit)] == [False]
    assert said(me.drain(), Exit) == said(me.wait(1.0), Exit) == []


def test_an_instance_drains_when_the_router_says_so_and_only_if_it_is_meant() -> None:
    me = Instance(Role.DECODE)
    assert said(me.router(DrainInstance("another", "by hand")), Bye) == []
    effects = me.router(DrainInstance(me.hello.worker, "by hand"))
    assert said(effects, Bye) == [Bye("by hand")]
    assert [exit.failed for exit in said(effects, Exit)] == [False]


def test_draining_a_decode_instance_refuses_what_is_new_and_ends_what_was_promised() -> None:
    me = Instance(Role.DECODE)
    me.meet(hello("p", Role.PREFILL))
    life = Peer("p", EPOCH)
    request = reserve_for("r", 4, life=life, max_tokens=4)
    me.router(request)
    assert said(me.drain(), Exit) == []
    refused = said(me.router(reserve_for("rr", 4, life=life)), Refused)
    assert [each.retry_after_s for each in refused] == [1.0]
    me.ranks.compute(request.tokens, [0], start=0, stop=4)
    me.peer(life, Landed(request.handle, 4, Token(answer(request, 64)[0][0]), 1))
    effects = me.settle()
    assert streamed(me.effects, request.handle) == (answer(request, 64)[0][1:], Finish.LENGTH)
    assert [exit.failed for exit in said(effects, Exit)] == [False]


def test_draining_a_prefill_instance_fails_its_queue_and_ends_what_it_began() -> None:
    me = Instance(Role.PREFILL, num_pages=4)
    peer = hello("d", Role.DECODE)
    me.meet(peer)
    begun = prefill_for("begun", 16, ticket=ticket_of(peer, 16))
    queued = prefill_for("queued", 16, ticket=ticket_of(peer, 16, first_page=9))
    me.router(begun)
    me.router(queued)
    effects = me.drain()
    assert [(each.handle, each.stage, each.retryable) for each in said(effects, Failed)] == [
        (queued.handle, Stage.QUEUE, True)
    ]
    assert [fenced.handle for fenced in said(effects, Fenced)] == [queued.handle]
    late = said(me.router(prefill_for("late", 4, ticket=ticket_of(peer, 4))), Failed)
    assert [each.retryable for each in late] == [True]
    effects = me.settle()
    assert [landed.handle for landed in said(effects, Landed)] == [begun.handle]
    assert [exit.failed for exit in said(me.effects, Exit)] == [False]


def test_a_step_that_never_ends_ends_the_instance() -> None:
    me = Instance(Role.COLOCATED)
    me.router(prefill_for("r", 4))
    me.now = 599.0
    assert said(me.wait(0.9), Exit) == []
    assert [exit.failed for exit in said(me.wait(0.5), Exit)] == [True]


def test_an_instance_that_has_cut_off_every_living_peer_ends() -> None:
    me = Instance(Role.DECODE)
    me.meet(hello("p", Role.PREFILL))
    me.router(reserve_for("r", 4, life=Peer("p", EPOCH), deadline_s=1.0))
    assert said(me.wait(32.0), Exit) == []
    me.peer(Peer("p", EPOCH), Fenced(Handle("r", 1), "late"))
    assert [exit.failed for exit in said(me.wait(0.2), Exit)] == [True]


# ---- colocated --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_tokens", [1, 3, 4, 5, 7, 8, 9, 17])
@pytest.mark.parametrize("max_tokens", [1, 2, 9])
def test_a_colocated_instance_goes_from_first_token_to_last(num_tokens: int, max_tokens: int) -> None:
    me = Instance(Role.COLOCATED)
    request = prefill_for("r", num_tokens, max_tokens=max_tokens)
    me.router(request)
    effects = me.settle()
    tokens, finish = answer(request, 64)
    first = said(me.effects, FirstToken)
    assert [(each.position, each.token.id) for each in first] == [(num_tokens, tokens[0])]
    if max_tokens == 1:
        assert first[0].finish is finish
        assert streamed(me.effects, request.handle) == ((), None)
    else:
        assert streamed(me.effects, request.handle) == (tokens[1:], finish)
    assert said(effects, Failed) == []
    assert me.brain.is_idle()


def test_its_first_decode_step_is_launched_with_its_prompt_still_computing() -> None:
    me = Instance(Role.COLOCATED)
    me.router(prefill_for("r", 5))
    assert [[(c.start, c.stop, c.sample) for c in plan.chunks] for plan in me.flying] == [
        [(0, 5, True)],
        [(5, 6, True)],
    ]
    assert [plan.kind for plan in me.flying] == [StepKind.PREFILL, StepKind.DECODE]


def test_decodes_come_first_and_prompts_share_the_rest_of_the_budget() -> None:
    me = Instance(Role.COLOCATED, max_prefill_tokens=8)
    me.router(prefill_for("a", 4, max_tokens=30))
    me.router(prefill_for("bb", 4, max_tokens=30))
    me.step()
    me.step()
    me.router(prefill_for("ccc", 20, max_tokens=30))
    effects = me.step()
    plan = said(effects, StepPlan)[0]
    assert plan.kind is StepKind.MIXED
    assert [c.stop - c.start for c in plan.chunks] == [1, 1, 6]
    assert [c.sample for c in plan.chunks] == [True, True, False]


def test_a_prompt_advances_however_many_decode() -> None:
    me = Instance(Role.COLOCATED, max_prefill_tokens=2, max_running=8)
    for number in range(4):
        me.router(prefill_for("x" * (number + 1), 2, max_tokens=40))
    for _ in range(14):
        me.step()
    assert len(said(me.effects, FirstToken)) == 4


def test_a_stop_token_as_the_first_ends_it_and_the_step_in_flight_is_ignored() -> None:
    me = Instance(Role.COLOCATED)
    like = prefill_for("r", 5)
    request = prefill_for("r", 5, stop_token_ids=(answer(like, 64)[0][0],))
    me.router(request)
    me.settle()
    assert [first.finish for first in said(me.effects, FirstToken)] == [Finish.STOP]
    assert streamed(me.effects, request.handle) == ((), None)
    assert me.brain.is_idle()


def test_a_second_turn_finds_the_first_answer_in_the_cache() -> None:
    me = Instance(Role.COLOCATED)
    request = prefill_for("r", 6, max_tokens=8)
    me.router(request)
    me.settle()
    tokens = request.tokens + answer(request, 64)[0]
    again = Prefill(Handle("again", 1), (*tokens, 1, 2), len(tokens) + 2, request.sampling, None, 30.0)
    me.router(again)
    me.settle()
    cached = said(me.effects, FirstToken)[1].cached_tokens
    assert cached == 12  # whole pages of the 13 positions whose KV was computed
    assert streamed(me.effects, again.handle)[0] == answer(again, 64)[0][1:]


def test_the_youngest_prompt_gives_way_to_those_that_decode() -> None:
    me = Instance(Role.COLOCATED, num_pages=8, max_prefill_tokens=4, max_model_len=32)
    old = prefill_for("a", 4, max_tokens=28)
    me.router(old)
    for _ in range(10):
        me.step()
    young = prefill_for("bb", 11, max_tokens=2)
    me.router(young)
    me.settle()
    assert streamed(me.effects, old.handle) == (answer(old, 32)[0][1:], Finish.LENGTH)
    ends = [each.handle for each in said(me.effects, Failed)] + [
        young.handle for _ in [0] if streamed(me.effects, young.handle)[1]
    ]
    assert ends == [young.handle]
    assert me.brain.is_idle()


def test_cancelled_anywhere_a_colocated_request_frees_its_pages_within_two_steps() -> None:
    for num_steps in range(6):
        me = Instance(Role.COLOCATED, max_prefill_tokens=4)
        request = prefill_for("r", 9, max_tokens=20)
        me.router(request)
        for _ in range(num_steps):
            me.step()
        me.router(Cancel(request.handle, "left"))
        while me.flying and me.flying[0].chunks:
            me.step()
        assert me.brain.is_idle(), num_steps


def test_a_colocated_instance_takes_no_ticket_and_a_prefill_instance_needs_one() -> None:
    peer = hello("d", Role.DECODE)
    with_ticket = Instance(Role.COLOCATED).router(prefill_for("r", 4, ticket=ticket_of(peer, 4)))
    without = Instance(Role.PREFILL).router(prefill_for("r", 4))
    for effects in (with_ticket, without):
        assert [(each.stage, each.retryable) for each in said(effects, Failed)] == [(Stage.RESERVE, True)]


def test_a_reserve_at_a_prefill_instance_is_unexpected() -> None:
    me = Instance(Role.PREFILL)
    request: Reserve = reserve_for("r", 4, life=Peer("p", "1"))
    assert [stamp.what for stamp in said(me.router(request), Stamp)] == ["unexpected"]
