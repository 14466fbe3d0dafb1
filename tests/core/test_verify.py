"""Digests on both sides of a handoff: who makes them when, and that nothing of what differs is used."""

from __future__ import annotations

import msgspec
import pytest
from brains import EPOCH, Instance, answer, hello, prefill_for, reserve_for, said, sample, streamed, ticket_of
from routing import only_reserve, pair_bench

from pd.runtime.config import RouterConfig
from pd.runtime.core.events import Peer, Stamp
from pd.runtime.wire.messages import (
    Cancel,
    Deliver,
    Failed,
    Fenced,
    Heard,
    Landed,
    Peers,
    Ready,
    Released,
    Renewed,
    Reserve,
    Reserved,
    Stop,
    Tokens,
)
from pd.runtime.wire.plans import Digest, Transfer, WriteDone
from pd.runtime.wire.values import Role, Stage, Ticket, Token

D, P = Peer("d", EPOCH), Peer("p", EPOCH)
DECODE = hello("d", Role.DECODE)
TOP = (1 << 64) - 1
CHECKING_S = DRAINING_S = 10.0


def verified(num_tokens: int, **changes: object) -> Ticket:
    return msgspec.structs.replace(ticket_of(DECODE, num_tokens), verifies=True, **changes)


# ---- prefill ------------------------------------------------------------------------------------------------------


def prefiller(**changes: int) -> Instance:
    me = Instance(Role.PREFILL, **changes)
    me.meet(DECODE)
    return me


def test_landed_says_the_sum_of_what_every_rank_sent_with_every_job() -> None:
    me = prefiller(num_ranks=2)
    me.are_peers_deaf = True
    request = prefill_for("r", 19, ticket=verified(19))
    me.router(request)
    while me.flying:
        me.step()
    assert [(job.start, job.stop, job.is_digested) for job in me.jobs] == [(0, 8, True), (8, 16, True), (16, 19, True)]
    told = {job.job: (TOP - job.job, 1000 + job.job) for job in me.jobs}
    for job, digests in told.items():
        for rank, digest in enumerate(digests):
            me.rank(WriteDone(job, None, 1, 0.1, digest=digest), rank)
    (landed,) = said(me.effects, Landed)
    assert landed.digest == sum(map(sum, told.values())) % (1 << 64)
    (again,) = said(me.wait(0.7), Landed)
    assert again == landed, "until it is heard"
    me.peer(D, Heard(request.handle))
    assert me.brain.is_idle()


def test_a_ticket_that_does_not_ask_gets_no_digest() -> None:
    me = prefiller()
    me.router(prefill_for("r", 9, ticket=ticket_of(DECODE, 9)))
    me.settle()
    assert [landed.digest for landed in said(me.effects, Landed)] == [None]


def offering(me: Instance, *, is_late: bool) -> Digest:
    """Nine tokens that decode is to read, of which it holds four: what the ranks are asked for."""
    ticket = msgspec.structs.replace(verified(5), is_pull=True, held_tokens=4)
    request = prefill_for("r", 9, ticket=None if is_late else ticket)
    me.router(msgspec.structs.replace(request, hands_off=is_late))
    me.settle()
    if is_late:
        me.router(Deliver(request.handle, ticket))
    (order,) = said(me.effects, Digest)
    assert (order.is_own, order.job.start, order.job.stop, order.job.peer, len(order.job.src_pages)) == (
        False, 4, 9, "d", 2,
    )  # fmt: skip
    assert said(me.effects, Ready) == [] and said(me.effects, Transfer) == []
    return order


@pytest.mark.parametrize("is_late", [False, True])
def test_what_is_to_be_read_is_offered_with_its_digest_as_soon_as_all_ranks_told_theirs(is_late: bool) -> None:
    me = prefiller(num_ranks=2)
    job = offering(me, is_late=is_late).job.job
    assert said(me.rank(WriteDone(job, None, 0, 0.0, digest=TOP), 0), Ready) == []
    (ready,) = said(me.rank(WriteDone(job, None, 0, 0.0, digest=6), 1), Ready)
    assert ready.digest == 5
    me.peer(D, Released(ready.handle))
    assert me.brain.is_idle()


def test_what_is_stopped_while_it_is_digested_is_fenced_at_once_and_the_late_answer_changes_nothing() -> None:
    me = prefiller()
    order = offering(me, is_late=False)
    (handle,) = [message.handle for message in said(me.peer(D, Stop(prefill_for("r", 9).handle)), Fenced)]
    assert said(me.effects, Failed)[0].handle == handle
    assert me.rank(WriteDone(order.job.job, None, 0, 0.0, digest=1)) == []
    me.peer(D, Heard(handle))
    assert me.brain.is_idle()


def test_a_digest_that_is_not_made_in_time_fails_the_attempt() -> None:
    me = prefiller()
    offering(me, is_late=True)
    effects = me.wait(DRAINING_S + 0.5)
    assert said(effects, Failed)[0].reason == "its digest was not made within 10 s"
    assert len(said(effects, Fenced)) >= 1 and me.brain.load().num_free_pages == 64


# ---- decode -------------------------------------------------------------------------------------------------------


def landed(me: Instance, digest: int | None, *, name: str = "r") -> tuple[Reserve, Digest]:
    """Nine tokens whose writer told that digest: the request, and what the ranks are asked for."""
    me.meet(hello("p", Role.PREFILL))
    request = msgspec.structs.replace(reserve_for(name, 9, life=P), verifies=True)
    (reserved,) = said(me.router(request), Reserved)
    ticket = reserved.ticket
    assert ticket.verifies
    me.ranks.receive(request.tokens, ticket)
    effects = me.peer(P, Landed(request.handle, 9, Token(sample(request.tokens)), len(ticket.pages), digest))
    (order,) = said(effects, Digest)
    assert order.is_own and (order.job.start, order.job.stop, order.job.src_pages) == (
        ticket.held_tokens, 9, ticket.pages,
    )  # fmt: skip
    assert me.flying == [], "nothing is decoded before digests agree"
    return request, order


def test_what_landed_is_decoded_once_all_ranks_told_digests_that_add_up_to_the_writers() -> None:
    me = Instance(Role.DECODE, num_ranks=2)
    request, order = landed(me, 5)
    me.rank(WriteDone(order.job.job, None, 0, 0.0, digest=TOP), 0)
    assert me.flying == []
    me.rank(WriteDone(order.job.job, None, 0, 0.0, digest=6), 1)
    assert len(me.flying) > 0
    me.settle()
    tokens, finish = answer(request, 64)
    assert streamed(me.effects, request.handle) == (tokens[1:], finish)
    assert me.brain.is_idle()


@pytest.mark.parametrize(
    ("theirs", "answer_of_rank", "words"),
    [
        (5, {"digest": 6}, "is not what p sent: digest 0000000000000006 here, 0000000000000005 there"),
        (None, {"digest": 6}, "p told no digest"),
        (5, {"digest": None, "error": "out of memory"}, "out of memory"),
    ],
)
def test_what_differs_is_neither_decoded_nor_cached_and_the_router_hears_why(
    theirs: int | None, answer_of_rank: dict[str, object], words: str
) -> None:
    me = Instance(Role.DECODE)
    request, order = landed(me, theirs)
    done = msgspec.structs.replace(WriteDone(order.job.job, None, 0, 0.0), **answer_of_rank)
    effects = me.rank(done)
    (failed,) = said(effects, Failed)
    assert (failed.handle, failed.stage, failed.retryable) == (request.handle, Stage.VERIFY, True)
    assert words in failed.reason
    assert [stamp.detail for stamp in said(effects, Stamp) if stamp.what == "corrupted"] == [failed.reason]
    assert me.flying == [] and said(me.effects, Tokens) == [] and me.brain.is_idle()
    _, again = landed(me, 5, name="s")
    assert again.job.start == 0, "nothing of it is held for another"


def test_the_reason_names_tokens_layers_and_heads() -> None:
    me = Instance(Role.DECODE)
    _, order = landed(me, 5)
    (failed,) = said(me.rank(WriteDone(order.job.job, None, 0, 0.0, digest=6)), Failed)
    assert failed.reason.startswith("KV of tokens 0 to 8 (2 layers, 2 KV heads) is not what p sent")


def test_a_landing_said_again_admits_nothing() -> None:
    me = Instance(Role.DECODE)
    request, order = landed(me, 5)
    again = Landed(request.handle, 9, Token(sample(request.tokens)), 3, 5)
    assert said(me.peer(P, again), Digest) == [] and me.flying == []
    me.rank(WriteDone(order.job.job, None, 0, 0.0, digest=5))
    assert len(me.flying) > 0


def test_what_is_cancelled_while_it_is_compared_is_free_at_once_and_the_late_answer_changes_nothing() -> None:
    me = Instance(Role.DECODE)
    request, order = landed(me, 5)
    effects = me.router(Cancel(request.handle, "left"))
    assert said(effects, Stop) == [] and me.brain.is_idle()
    assert me.rank(WriteDone(order.job.job, None, 0, 0.0, digest=5)) == []


def test_a_digest_that_never_comes_fails_the_attempt_in_time() -> None:
    me = Instance(Role.DECODE)
    request, _ = landed(me, 5)
    assert said(me.wait(CHECKING_S - 0.5), Failed) == []
    (failed,) = said(me.wait(1.0), Failed)
    assert failed.handle == request.handle and "no digest of it within 10 s" in failed.reason
    assert me.brain.is_idle()


def test_the_writers_death_does_not_touch_what_landed() -> None:
    me = Instance(Role.DECODE)
    _, order = landed(me, 5)
    me.router(Peers(()))
    assert said(me.wait(4.0), Failed) == []
    me.rank(WriteDone(order.job.job, None, 0, 0.0, digest=5))
    assert len(me.flying) > 0


def test_what_was_read_is_released_and_then_compared() -> None:
    me = Instance(Role.DECODE)
    me.meet(hello("p", Role.PREFILL))
    request = msgspec.structs.replace(reserve_for("r", 9, life=P), verifies=True, is_pull=True)
    me.router(request)
    (transfer,) = said(me.peer(P, Ready(request.handle, 9, Token(sample(request.tokens)), (5, 6, 7), 6.0, 5)), Transfer)
    (job,) = transfer.jobs
    me.ranks.receive(request.tokens, msgspec.structs.replace(ticket_of(DECODE, 9), pages=job.dst_pages))
    me.peer(P, Renewed(request.handle, 0.0))
    me.wait(0.2)
    effects = me.rank(WriteDone(job.job, None, 1, 0.1))
    (order,) = said(effects, Digest)
    assert said(effects, Released) == [Released(request.handle)] and me.flying == []
    me.rank(WriteDone(order.job.job, None, 0, 0.0, digest=5))
    assert len(me.flying) > 0


# ---- the router ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("verify_kv", [False, True])
def test_the_router_asks_for_digests_where_it_was_told_to(verify_kv: bool) -> None:
    _, reserve = only_reserve(pair_bench(config=RouterConfig(verify_kv=verify_kv)).submit("r"))
    assert reserve.verifies is verify_kv


def test_what_was_corrupted_is_counted_and_repeated_from_the_tokens_that_are_out() -> None:
    bench = pair_bench(config=RouterConfig(verify_kv=True))
    _, reserve = only_reserve(bench.submit("r"))
    bench.reserved("d0", reserve.handle)
    bench.first("p0", reserve.handle, 3, 70)
    effects = bench.hear("d0", Failed(reserve.handle, Stage.VERIFY, "it differs", True))
    stamps = [(effect.what, effect.detail) for effect in effects if isinstance(effect, Stamp)]
    assert stamps[:2] == [("corrupted", "d0: it differs"), ("repeated", "d0 in stage verify: it differs")]
    _, again = only_reserve(effects)
    assert (again.handle.attempt, again.tokens) == (reserve.handle.attempt + 1, (5, 6, 7, 70))
