"""A prefill brain: chunks, writes, first tokens, and every way a handoff ends."""

from __future__ import annotations

import pytest
from brains import PAGE, Instance, answer, hello, prefill_for, said, sample, ticket_of

from pd.runtime.core.events import Peer, Stamp
from pd.runtime.wire.messages import (
    Cancel,
    Cancelled,
    Failed,
    Fenced,
    FirstToken,
    Heard,
    Landed,
    Peers,
    Prefill,
    Refused,
    Stop,
)
from pd.runtime.wire.plans import (
    Attach,
    PeerUnreachable,
    Sever,
    Severed,
    StepDone,
    StepKind,
    StepPlan,
    Transfer,
    WriteDone,
)
from pd.runtime.wire.values import Finish, Handle, Role, Stage, Token

DECODE = hello("d", Role.DECODE)
D = Peer("d", DECODE.epoch)


def prefiller(**changes: int) -> Instance:
    """Attached to one decode instance."""
    me = Instance(Role.PREFILL, **changes)
    me.meet(DECODE)
    return me


def submit(me: Instance, num_tokens: int, *, name: str = "r", first_page: int = 0, **sampling: object) -> Prefill:
    ticket = ticket_of(DECODE, num_tokens, first_page=first_page)
    request = prefill_for(name, num_tokens, ticket=ticket, **sampling)
    me.router(request)
    return request


@pytest.mark.parametrize("num_tokens", [1, 3, 4, 5, 7, 8, 9, 15, 16, 17])
def test_a_prompt_is_cut_into_chunks_and_written_in_whole_pages(num_tokens: int) -> None:
    me = prefiller(max_prefill_tokens=8)
    request = submit(me, num_tokens)
    me.settle()
    plans = [plan for plan in said(me.effects, StepPlan) if plan.chunks]
    chunks = [chunk for plan in plans for chunk in plan.chunks]
    starts = list(range(0, num_tokens, 8))
    assert [(chunk.start, chunk.stop) for chunk in chunks] == [(s, min(s + 8, num_tokens)) for s in starts]
    assert [chunk.sample for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    writes = [job for plan in plans for job in plan.writes]
    assert [(job.start, job.stop) for job in writes] == [(chunk.start, chunk.stop) for chunk in chunks]
    pages = tuple(page for job in writes for page in job.dst_pages)
    assert request.ticket is not None and pages == request.ticket.pages
    assert said(me.effects, FirstToken) == [
        FirstToken(request.handle, num_tokens, Token(sample(request.tokens)), None, 0)
    ]
    first, num_pages = Token(sample(request.tokens)), len(request.ticket.pages)
    assert said(me.effects, Landed) == [Landed(request.handle, num_tokens, first, num_pages)]
    assert me.brain.is_idle()


def test_a_chunk_that_ends_inside_a_page_sends_that_page_with_the_next_chunk() -> None:
    me = prefiller(max_prefill_tokens=6)
    submit(me, 14)
    me.settle()
    writes = [(job.start, job.stop) for plan in said(me.effects, StepPlan) for job in plan.writes]
    assert writes == [(0, 4), (4, 8), (8, 12), (12, 14)]  # jobs of at most one step's whole pages: 4 of 6 tokens


def test_two_page_sizes_meet_at_their_common_multiple() -> None:
    me = Instance(Role.PREFILL, max_prefill_tokens=16)
    peer = hello("d", Role.DECODE, page_size=6)
    me.meet(peer)
    request = prefill_for("r", 31, ticket=ticket_of(peer, 31))
    me.router(request)
    me.settle()
    jobs = [job for plan in said(me.effects, StepPlan) for job in plan.writes]
    assert [(job.start, job.stop) for job in jobs] == [(0, 12), (12, 24), (24, 31)]
    assert [len(job.src_pages) for job in jobs] == [3, 3, 2]
    assert [job.dst_pages for job in jobs] == [(0, 1), (2, 3), (4, 5)]


def test_two_steps_are_in_flight_and_requests_share_one_in_order_of_arrival() -> None:
    me = prefiller(max_prefill_tokens=8)
    submit(me, 3, name="a")
    submit(me, 9, name="bb", first_page=10)
    submit(me, 9, name="ccc", first_page=20)
    assert [[(each.start, each.stop) for each in plan.chunks] for plan in me.flying] == [[(0, 3)], [(0, 8)]]
    me.step()
    me.step()
    assert [[(each.start, each.stop) for each in plan.chunks] for plan in me.flying] == [[(8, 9), (0, 7)], [(7, 9)]]


def test_the_first_token_goes_out_before_the_kv_has_landed() -> None:
    me = prefiller()
    request = submit(me, 5)
    effects = me.step()
    assert [first.handle for first in said(effects, FirstToken)] == [request.handle]
    assert said(effects, Landed) == []
    assert [landed.handle for landed in said(me.end_job(me.jobs[0]), Landed)] == [request.handle]


def test_landed_waits_for_every_rank_and_for_the_token() -> None:
    me = prefiller(num_ranks=2)
    submit(me, 5)
    plan = me.flying.pop(0)
    tokens = me.ranks.run(plan)
    job = plan.writes[0].job
    effects = me.rank(WriteDone(job, None, 1, 0.1), 0) + me.rank(WriteDone(job, None, 1, 0.1), 1)
    effects += me.rank(StepDone(plan.step, (), 0.1), 1)
    assert said(effects, Landed) == said(effects, FirstToken) == []
    effects = me.rank(StepDone(plan.step, tokens, 0.1), 0)
    assert len(said(effects, FirstToken)) == len(said(effects, Landed)) == 1


def test_a_write_that_fails_on_one_rank_is_fenced_only_when_all_have_ended_it() -> None:
    me = prefiller(num_ranks=2)
    request = submit(me, 5)
    me.step()
    job = me.jobs.pop().job
    assert said(me.rank(WriteDone(job, "broken", 0, 0.1), 0), Fenced) == []
    assert not me.brain.is_idle()
    effects = me.rank(WriteDone(job, None, 1, 0.1), 1)
    assert [(each.stage, each.retryable) for each in said(effects, Failed)] == [(Stage.TRANSFER, True)]
    assert [fenced.handle for fenced in said(effects, Fenced)] == [request.handle]
    me.settle()
    assert me.brain.is_idle()


@pytest.mark.parametrize(("stop_ids", "max_tokens", "finish"), [(True, 8, Finish.STOP), (False, 1, Finish.LENGTH)])
def test_a_first_token_that_ends_the_answer_is_fenced_and_not_landed(
    stop_ids: bool, max_tokens: int, finish: Finish
) -> None:
    me = prefiller()
    like = prefill_for("r", 5)
    stop = (sample(like.tokens),) if stop_ids else ()
    submit(me, 5, max_tokens=max_tokens, stop_token_ids=stop)
    effects = me.settle()
    assert [first.finish for first in said(effects, FirstToken)] == [finish]
    assert (len(said(effects, Fenced)), said(effects, Landed), said(effects, Failed)) == (1, [], [])
    assert me.brain.is_idle()


def test_an_answer_of_one_token_needs_no_ticket_and_writes_nothing() -> None:
    me = prefiller()
    me.router(prefill_for("r", 9, max_tokens=1))
    effects = me.settle()
    assert [first.finish for first in said(effects, FirstToken)] == [Finish.LENGTH]
    assert [job for plan in said(me.effects, StepPlan) for job in plan.writes] == []
    assert me.brain.is_idle()


def test_stopped_while_computing_it_fences_after_the_launched_writes_and_plans_no_more() -> None:
    me = prefiller(max_prefill_tokens=4)
    request = submit(me, 16)
    effects = me.peer(D, Stop(request.handle))
    assert said(effects, Fenced) == []
    assert [failed.handle for failed in said(effects, Failed)] == [request.handle]
    me.step()
    me.step()
    assert [plan.kind for plan in me.flying] == [StepKind.IDLE]
    assert said(me.end_job(me.jobs[0]), Fenced) == []
    assert [fenced.handle for fenced in said(me.end_job(me.jobs[0]), Fenced)] == [request.handle]
    me.settle()
    assert me.brain.is_idle()


def test_a_stop_that_crossed_landed_is_answered_all_the_same() -> None:
    me = prefiller()
    request = submit(me, 5)
    me.settle()
    effects = me.peer(D, Stop(request.handle))
    assert [fenced.handle for fenced in said(effects, Fenced)] == [request.handle]
    assert said(effects, Failed) == []


@pytest.mark.parametrize("ends_well", [True, False])
def test_the_last_word_of_a_handoff_is_said_again_until_it_is_heard(ends_well: bool) -> None:
    me = prefiller()
    me.are_peers_deaf = True
    request = submit(me, 5)
    word = Landed if ends_well else Fenced
    if not ends_well:
        me.router(Cancel(request.handle, "left"))
    (said_first,) = said(me.settle(), word)
    assert me.brain.load().num_free_pages == 64 and not me.brain.is_idle()
    assert said(me.wait(1.3), word) == [said_first] * 2
    assert said(me.peer(Peer("d", "0"), Heard(request.handle)), object) == []  # another life
    assert said(me.peer(D, Stop(request.handle)), word) == [said_first]
    me.peer(D, Heard(request.handle))
    assert me.brain.is_idle() and said(me.wait(2.0), word) == []


def test_a_last_word_that_nobody_hears_ends_with_the_peer_or_by_its_deadline() -> None:
    for is_peer_lost in (True, False):
        me = prefiller()
        me.are_peers_deaf = True
        submit(me, 5)
        me.settle()
        effects = me.meet(hello("d", Role.DECODE, epoch="2")) if is_peer_lost else me.wait(10.2)
        assert me.brain.is_idle() and said(effects, Failed) == []


def test_a_stop_that_overtook_its_prefill_is_answered_and_the_prefill_refused() -> None:
    me = prefiller()
    request = prefill_for("r", 5, ticket=ticket_of(DECODE, 5))
    assert said(me.peer(D, Stop(request.handle)), Fenced) == [Fenced(request.handle, "nothing of it is open")]
    effects = me.router(request)
    assert [failed.retryable for failed in said(effects, Failed)] == [True]
    assert said(effects, StepPlan) == []
    assert me.brain.is_idle()


def test_a_repeated_prefill_is_not_begun_again() -> None:
    me = prefiller()
    request = submit(me, 5)
    assert said(me.router(request), StepPlan) == []
    me.settle()
    assert said(me.router(request), StepPlan) == said(me.router(request), Failed) == []


def test_a_newer_attempt_ends_the_older_one_and_an_older_one_is_not_begun() -> None:
    me = prefiller(max_prefill_tokens=4)
    old = submit(me, 16)
    newer = prefill_for("r", 16, ticket=ticket_of(DECODE, 16, first_page=30), attempt=2)
    me.router(newer)
    effects = me.settle()
    assert [fenced.handle for fenced in said(effects, Fenced)] == [old.handle]
    assert [landed.handle for landed in said(effects, Landed)] == [newer.handle]
    assert said(me.router(old), StepPlan) == []


def test_cancelled_while_queued_computing_or_draining_all_pages_come_back() -> None:
    for num_steps, num_fenced_at_once in ((0, 0), (1, 0), (4, 0)):
        me = prefiller(max_prefill_tokens=4)
        request = submit(me, 16)
        for _ in range(num_steps):
            me.step()
        effects = me.router(Cancel(request.handle, "left"))
        assert said(effects, Cancelled) == [Cancelled(request.handle)]
        assert len(said(effects, Fenced)) == num_fenced_at_once
        effects = me.settle()
        assert len(said(effects, Fenced)) == 1
        assert said(effects, Landed) == said(effects, Failed) == []
        assert me.brain.is_idle()


def test_a_cancelled_burst_does_not_keep_the_next_one_waiting() -> None:
    me = prefiller(num_pages=8, max_waiting=32)
    burst = [submit(me, 32, name="x" * n, first_page=10 * n, max_tokens=2) for n in range(1, 20)]
    for request in burst:
        me.router(Cancel(request.handle, "left"))
    short = submit(me, 4, name="short", first_page=500)
    while not said(me.effects, FirstToken):
        if me.flying:
            me.step()
        else:
            me.end_job(me.jobs[0])
    assert [first.handle for first in said(me.effects, FirstToken)] == [short.handle]
    assert sum(len(plan.chunks) for plan in said(me.effects, StepPlan)) == 3  # two of the dead were in flight


def test_what_can_never_fit_is_refused_at_entry_and_its_peer_told() -> None:
    me = prefiller(num_pages=4, max_model_len=64)
    effects = me.router(prefill_for("r", 17, ticket=ticket_of(DECODE, 17)))
    assert [(each.retryable, each.stage) for each in said(effects, Failed)] == [(False, Stage.QUEUE)]
    assert len(said(effects, Fenced)) == 1
    effects = me.router(prefill_for("limit", 64, ticket=ticket_of(DECODE, 64)))
    assert [each.retryable for each in said(effects, Failed)] == [False]
    submit(me, 16, name="fits", first_page=100)
    assert [first.handle for first in said(me.settle(), FirstToken)] == [Handle("fits", 1)]


def test_a_full_queue_answers_at_once() -> None:
    me = prefiller(num_pages=4, max_waiting=2)
    for number in range(4):
        submit(me, 16, name="x" * (number + 1), first_page=10 * number)
    assert [(each.handle.request_id, each.stage, each.retryable) for each in said(me.effects, Failed)] == [
        ("xxxx", Stage.QUEUE, True)
    ]


def test_a_request_without_its_first_token_fails_at_its_deadline() -> None:
    me = prefiller(num_pages=4)
    first = submit(me, 16, name="first")
    me.now = 10.0
    second = submit(me, 16, name="second", first_page=10)
    assert said(me.wait(19.8), Failed) == []
    failed = said(me.wait(0.4), Failed)
    assert [(each.handle, each.stage) for each in failed] == [(first.handle, Stage.PREFILL)]
    failed = said(me.wait(10.0), Failed)
    assert [(each.handle, each.stage) for each in failed] == [(second.handle, Stage.QUEUE)]
    assert all(each.retryable for each in failed)
    me.settle()
    assert me.brain.is_idle()


def test_draining_has_its_own_clock_and_every_job_that_ends_is_progress() -> None:
    me = prefiller(max_prefill_tokens=8)
    request = submit(me, 24)
    me.now = 25.0
    while me.flying:
        me.step()
    assert said(me.wait(9.0), Failed) == []
    me.end_job(me.jobs[0])
    assert said(me.wait(9.0), Failed) == []
    failed = said(me.wait(2.0), Failed)
    assert [(each.handle, each.stage, each.retryable) for each in failed] == [(request.handle, Stage.TRANSFER, True)]
    assert said(me.settle(), Fenced) == [Fenced(request.handle, "no write to d ended in time")]


def test_a_handoff_that_never_drains_cuts_the_peer_off_and_then_ends() -> None:
    me = prefiller()
    request = submit(me, 5)
    me.step()
    me.step()
    effects = me.wait(10.2)
    assert [failed.handle for failed in said(effects, Failed)] == [request.handle]
    assert said(effects, Sever) == said(effects, Fenced) == []
    effects = me.wait(10.2)
    assert said(effects, Sever) == [Sever("d", DECODE.epoch)]
    assert len(said(me.end_job(me.jobs[0], "severed"), Fenced)) == 1
    assert me.brain.is_idle()
    refused = said(me.router(prefill_for("next", 5, ticket=ticket_of(DECODE, 5))), Refused)
    assert [(each.handle.request_id, each.is_parted) for each in refused] == [("next", True)]


def test_a_lost_peer_fails_its_handoffs_and_its_next_life_is_attached_when_no_write_is_open() -> None:
    me = prefiller()
    request = submit(me, 5)
    me.step()
    reborn = hello("d", Role.DECODE, epoch="2")
    effects = me.meet(reborn)
    assert [failed.handle for failed in said(effects, Failed)] == [request.handle]
    assert said(effects, Sever) == [Sever("d", "1")]
    assert said(me.wait(1.0), Attach) == []
    effects = me.end_job(me.jobs[0], "severed")
    assert said(effects, Fenced) == []
    assert [attach.epoch for attach in said(me.wait(0.2), Attach)] == ["2"]
    me.settle()
    assert me.brain.is_idle()


def test_a_peer_that_vanishes_from_the_list_may_return_within_three_seconds() -> None:
    me = prefiller()
    request = submit(me, 5)
    me.router(Peers(()))
    me.wait(2.0)
    me.meet(DECODE)
    effects = me.wait(5.0) + me.settle()
    assert [landed.handle for landed in said(effects, Landed)] == [request.handle]
    request = submit(me, 5, name="rr")
    me.router(Peers(()))
    effects = me.wait(3.2)
    assert [failed.handle for failed in said(effects, Failed)] == [request.handle]
    assert said(effects, Sever) == [Sever("d", "1")]


def test_a_broken_way_fails_what_uses_it_and_is_tried_again() -> None:
    me = prefiller(num_ranks=2)
    request = submit(me, 5)
    effects = me.rank(PeerUnreachable("d", "1", "reset"), 0) + me.rank(PeerUnreachable("d", "1", "reset"), 1)
    assert [failed.handle for failed in said(effects, Failed)] == [request.handle]
    refused = me.router(prefill_for("rr", 5, ticket=ticket_of(DECODE, 5)))
    assert [each.retry_after_s for each in said(refused, Refused)] == [0.1]  # no failed attempt
    me.step()
    assert said(me.wait(2.0), Attach) == []  # its job is open
    me.settle()
    assert [attach.peer for attach in said(me.wait(0.3), Attach)] == ["d"]
    submit(me, 5, name="rrr")
    assert len(said(me.settle(), Landed)) == 1


def test_who_can_never_be_reached_is_tried_no_more_and_what_is_meant_for_it_is_refused_at_once_saying_why() -> None:
    me = prefiller(num_ranks=2)
    request = submit(me, 5)
    why = "head_dim: theirs is 16, ours is 8"
    effects = me.rank(PeerUnreachable("d", "1", why, is_final=True), 1)
    assert [failed.handle for failed in said(effects, Failed)] == [request.handle]
    refused = said(me.router(prefill_for("rr", 5, ticket=ticket_of(DECODE, 5))), Refused)
    assert [(each.retry_after_s, each.is_parted) for each in refused] == [(None, True)]
    assert refused[0].reason == why
    me.settle()
    assert said(me.wait(60.0), Attach) == [] and me.brain.is_idle()
    assert [each.what for each in said(me.effects, Stamp) if each.subject == "d"] == ["attached", "barred"]
    reborn = hello("d", Role.DECODE, epoch="2")
    assert [attach.epoch for attach in said(me.meet(reborn) + me.wait(0.2), Attach)] == ["2"]
    me.router(prefill_for("rrr", 5, ticket=ticket_of(reborn, 5)))
    assert len(said(me.settle(), Landed)) == 1


def test_a_ticket_for_another_life_of_ours_or_of_an_unknown_peer_is_not_written() -> None:
    me = prefiller()
    other = hello("d", Role.DECODE, epoch="0")
    tickets = (
        ticket_of(DECODE, 5, prefill_epoch="0"),
        ticket_of(other, 5),
        ticket_of(hello("unknown", Role.DECODE), 5),
        ticket_of(DECODE, 9),  # pages of another length
    )
    for number, ticket in enumerate(tickets):
        effects = me.router(prefill_for("x" * number, 5, ticket=ticket))
        if number in (1, 2):  # that peer may be on the list soon
            assert [each.retry_after_s for each in said(effects, Refused)] == [0.1]
        else:
            assert [(each.stage, each.retryable) for each in said(effects, Failed)] == [(Stage.TRANSFER, True)]
        assert len(said(effects, Fenced)) == 1
        assert said(effects, StepPlan) == []


def test_a_stop_of_another_life_of_the_peer_is_stale() -> None:
    me = prefiller()
    request = submit(me, 5)
    assert said(me.peer(Peer("d", "0"), Stop(request.handle)), Failed) == []
    assert len(said(me.settle(), Landed)) == 1


def test_a_cached_prefix_is_not_computed_again_but_sent() -> None:
    me = prefiller(max_prefill_tokens=8)
    submit(me, 13)
    me.settle()
    again = prefill_for("R", 13, ticket=ticket_of(DECODE, 13, first_page=20))
    effects = me.router(again)
    plans = said(effects, StepPlan)
    assert [(each.start, each.stop) for each in plans[0].chunks] == [(12, 13)]
    (ahead,) = said(effects, Transfer)
    kinds = [type(message) for message in said(effects, object) if isinstance(message, Transfer | StepPlan)]
    assert kinds[:2] == [StepPlan, Transfer], "it goes while the rest computes, which need not wait for it"
    assert not ahead.is_read and [(job.start, job.stop) for job in ahead.jobs] == [(0, 8), (8, 12)]
    assert [(job.start, job.stop) for job in plans[0].writes] == [(12, 13)]
    assert [first.cached_tokens for first in said(me.settle(), FirstToken)] == [12]
    assert [plan.kind for plan in plans] == [StepKind.PREFILL]


def test_severed_answers_of_ranks_are_awaited_once() -> None:
    me = prefiller(num_ranks=2)
    me.meet(hello("d", Role.DECODE, epoch="2"))
    assert me.rank(Severed("d", "1", True), 0) == me.rank(Severed("d", "1", True), 1) == []
    assert [stamp.what for stamp in me.rank(Severed("d", "1", True), 0)] == ["unexpected"]


def test_the_token_sampled_is_the_references() -> None:
    me = prefiller(max_prefill_tokens=PAGE)
    request = submit(me, 11)
    me.settle()
    assert said(me.effects, FirstToken)[0].token.id == answer(request, 64)[0][0]
