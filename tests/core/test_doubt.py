"""A write that failed and whose bytes may still land: nothing may be promised of the pages it was for."""

from __future__ import annotations

from brains import Instance, hello, prefill_for, said, ticket_of

from pd.runtime.core.events import Effect, Peer
from pd.runtime.wire.messages import Failed, Fenced, Landed, Prefill, Stop
from pd.runtime.wire.plans import PeerUnreachable, Sever, Transfer, WriteDone
from pd.runtime.wire.values import Handle, Role

DECODE = hello("d", Role.DECODE)
D = Peer("d", DECODE.epoch)


def doubtful(num_ranks: int = 1) -> tuple[Instance, Handle, list[Effect]]:
    """A prefill instance whose one write to d failed with the connection; and what it said upon that."""
    me = Instance(Role.PREFILL, num_ranks=num_ranks)
    me.meet(DECODE)
    request = submit(me, "r")
    me.step()
    job = me.jobs.pop().job
    effects = me.rank(WriteDone(job, "lost", 0, 0.1, may_land=True), 0)
    for rank in range(1, num_ranks):
        effects += me.rank(WriteDone(job, None, 1, 0.1), rank)
    effects += me.rank(PeerUnreachable("d", DECODE.epoch, "lost"))
    return me, request.handle, effects


def submit(me: Instance, name: str) -> Prefill:
    request = prefill_for(name, 5, ticket=ticket_of(DECODE, 5))
    me.router(request)
    return request


def test_the_router_is_told_and_the_peer_is_promised_nothing() -> None:
    for num_ranks in (1, 2):
        me, handle, effects = doubtful(num_ranks)
        assert [failed.handle for failed in said(effects, Failed)] == [handle]
        assert said(effects, Fenced) == said(effects, Landed) == []
        assert said(me.peer(D, Stop(handle)), Fenced) == []
        me.settle()
        assert me.brain.is_idle()  # our own pages are not in doubt


def test_a_later_write_that_is_done_is_the_proof() -> None:
    me, handle, _ = doubtful()
    me.wait(1.2)  # attached again
    submit(me, "s")
    while me.flying:
        me.step()
    me.end_job(me.jobs[0])
    assert [fenced.handle for fenced in said(me.peer(D, Stop(handle)), Fenced)] == [handle]


def test_where_nothing_else_is_written_a_write_of_nothing_is_the_proof() -> None:
    """An idle pair: else decode would hear nothing for 30 s, and cut its only prefill instance off."""
    for num_ranks in (1, 2):
        me, handle, _ = doubtful(num_ranks)
        assert said(me.peer(D, Stop(handle)), Transfer) == [], "there is no way to it"
        me.wait(1.2)  # attached again
        (order,) = said(me.peer(D, Stop(handle)), Transfer)
        (job,) = order.jobs
        assert (job.peer, job.start, job.stop, job.src_pages, job.dst_pages) == (
            "d",
            0,
            0,
            (),
            (),
        ) and not order.is_read
        assert said(me.peer(D, Stop(handle)), Transfer) == [], "one at a time"
        for rank in range(num_ranks):
            assert said(me.peer(D, Stop(handle)), Fenced) == []
            me.rank(WriteDone(job.job, None, 0, 0.1), rank)
        assert [fenced.handle for fenced in said(me.peer(D, Stop(handle)), Fenced)] == [handle]
        assert me.brain.is_idle()


def test_a_proof_that_fails_proves_nothing_and_the_next_question_begins_another() -> None:
    me, handle, _ = doubtful()
    me.wait(1.2)
    (first,) = said(me.peer(D, Stop(handle)), Transfer)
    me.rank(WriteDone(first.jobs[0].job, "lost again", 0, 0.1))
    (second,) = said(me.peer(D, Stop(handle)), Transfer)
    assert second.jobs[0].job > first.jobs[0].job


def test_a_proof_that_does_not_end_is_made_to_fail() -> None:
    me, handle, _ = doubtful()
    me.wait(1.2)
    me.peer(D, Stop(handle))
    assert said(me.wait(9.0), Sever) == [] and said(me.wait(1.5), Sever) == [Sever(*D)]


def test_a_write_that_was_given_before_the_doubt_proves_nothing() -> None:
    """Another rank's share of it may have gone by a connection that is whole."""
    me = Instance(Role.PREFILL)
    me.meet(DECODE)
    first, second = submit(me, "a"), submit(me, "b")
    while me.flying:
        me.step()
    older, newer = me.jobs
    me.jobs.clear()
    me.rank(WriteDone(older.job, "lost", 0, 0.1, may_land=True))
    me.rank(WriteDone(newer.job, None, 1, 0.1))
    assert said(me.peer(D, Stop(first.handle)), Fenced) == []
    assert [landed.handle for landed in said(me.effects, Landed)] == [second.handle]


def test_a_life_that_is_only_unheard_of_is_promised_nothing() -> None:
    """It left the router's list because it drains, or the router was restarted: it may still run other requests."""
    me, handle, _ = doubtful()
    me.meet()
    me.wait(4.0)
    assert said(me.peer(D, Stop(handle)), Fenced) == []


def test_with_that_life_the_doubt_ends() -> None:
    me, handle, _ = doubtful()
    me.meet(hello("d", Role.DECODE, epoch="next"))
    assert [fenced.handle for fenced in said(me.peer(D, Stop(handle)), Fenced)] == [handle]
