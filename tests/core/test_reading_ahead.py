"""KV that decode reads while prefill still computes: what is told of it, what is read, and what holds its pages."""

from __future__ import annotations

import msgspec
import pytest
from brains import PAGE, Instance, answer, chains, hello, prefill_for, reserve_for, said, streamed, ticket_of
from test_policies import DECODE, D, P, prefiller, pulled, said_first

from pd.runtime.core.events import Effect
from pd.runtime.wire.messages import Ahead, Cancel, Failed, Fenced, Ready, Released, Renew, Renewed, Reserve
from pd.runtime.wire.plans import Transfer, WriteDone, WriteJob
from pd.runtime.wire.values import Role

LEASE_S = 6.0
PAGES = (5, 6, 7, 8, 9)
"""The peer's, of 18 tokens."""


def ahead(me: Instance) -> list[tuple[int, int]]:
    """Tokens and pages of each word of it so far."""
    return [(each.num_tokens, len(each.pages)) for each in said(me.effects, Ahead)]


def test_prefill_tells_of_each_chunk_when_it_is_computed_and_of_the_last_by_its_offer() -> None:
    me = prefiller(max_prefill_tokens=6)
    me.router(prefill_for("r", 18, ticket=pulled(18)))
    assert len(me.flying) == 2 and ahead(me) == [], "planned is not computed"
    me.step()
    assert ahead(me) == [(4, 1)], "whole pages"
    me.settle()
    assert ahead(me) == [(4, 1), (12, 3)]
    (ready,) = said(me.effects, Ready)
    assert ready.position == 18
    for each in said(me.effects, Ahead):
        assert each.pages == ready.pages[: len(each.pages)]
    cells = [me.ranks.cells[ready.pages[i // PAGE], i % PAGE] for i in range(18)]
    assert cells == chains(prefill_for("r", 18).tokens)


def test_a_cached_prefix_may_be_read_before_anything_is_computed() -> None:
    me = prefiller(max_prefill_tokens=8)
    me.router(prefill_for("r", 18, ticket=pulled(18)))
    me.settle()
    me.peer(D, Released(prefill_for("r", 18).handle))
    me.effects.clear()
    me.router(prefill_for("s", 18, ticket=pulled(18)))  # as long a name: the same tokens
    assert ahead(me) == [(16, 4)]


def test_what_decode_holds_is_not_told_and_pages_are_whole_on_both_sides() -> None:
    me = Instance(Role.PREFILL, max_prefill_tokens=5)
    large = hello("d", Role.DECODE, page_size=2 * PAGE)
    me.meet(large)
    ticket = msgspec.structs.replace(ticket_of(large, 18 - 8), held_tokens=8, is_pull=True)
    me.router(prefill_for("r", 18, ticket=ticket))
    me.settle()
    assert ahead(me) == [], "16 is reached with the last chunk only"
    me = Instance(Role.PREFILL, max_prefill_tokens=8)
    me.meet(large)
    me.router(prefill_for("r", 18, ticket=ticket))
    me.settle()
    assert ahead(me) == [(16, 2)]


def test_a_late_ticket_and_one_that_is_written_by_are_told_nothing() -> None:
    me = prefiller(max_prefill_tokens=6)
    me.router(msgspec.structs.replace(prefill_for("late", 18), hands_off=True))
    me.router(prefill_for("push", 18, ticket=ticket_of(DECODE, 18)))
    me.settle()
    assert ahead(me) == []


# ---- decode -------------------------------------------------------------------------------------------------------


def following(me: Instance, num_tokens: int = 8) -> tuple[Reserve, WriteJob]:
    """18 tokens are asked for, and of the first of them a read is open."""
    me.meet(hello("p", Role.PREFILL))
    request = msgspec.structs.replace(reserve_for("r", 18, life=P), is_pull=True)
    me.router(request)
    return request, read(me.peer(P, Ahead(request.handle, num_tokens, PAGES[: num_tokens // PAGE])))


def read(effects: list[Effect]) -> WriteJob:
    (transfer,) = said(effects, Transfer)
    assert transfer.is_read
    (job,) = transfer.jobs
    return job


def offer(request: Reserve) -> Ready:
    return Ready(request.handle, 18, said_first(request), PAGES, LEASE_S)


def done(job: WriteJob) -> WriteDone:
    return WriteDone(job.job, None, 1, 0.1)


@pytest.mark.parametrize("is_lost", [False, True])
def test_each_word_has_read_what_came_since_and_a_lost_one_is_made_up_for(is_lost: bool) -> None:
    me = Instance(Role.DECODE)
    request, first = following(me)
    assert (first.start, first.stop, first.src_pages) == (0, 8, PAGES[:2])
    jobs = [first]
    if not is_lost:
        jobs.append(read(me.peer(P, Ahead(request.handle, 16, PAGES[:4]))))
        assert (jobs[1].start, jobs[1].stop, jobs[1].src_pages) == (8, 16, PAGES[2:4])
        for late in (Ahead(request.handle, 8, PAGES[:2]), Ahead(request.handle, 16, PAGES[:4])):
            assert said(me.peer(P, late), Transfer) == [], "known already"
    assert said(me.effects, Renew) == [], "nothing is offered yet"
    jobs.append(read(me.peer(P, offer(request))))
    start = 8 if is_lost else 16
    assert (jobs[-1].start, jobs[-1].stop, jobs[-1].src_pages) == (start, 18, PAGES[start // PAGE :])
    pages = tuple(page for job in jobs for page in job.dst_pages)
    me.ranks.receive(request.tokens, msgspec.structs.replace(ticket_of(DECODE, 18), pages=pages))
    for job in reversed(jobs):
        assert me.flying == [] and said(me.effects, Released) == []
        me.peer(P, Renewed(request.handle, 0.0))
        me.rank(done(job))
    assert said(me.effects, Released) == [Released(request.handle)]
    me.settle()
    tokens, finish = answer(request, 64)
    assert streamed(me.effects, request.handle) == (tokens[1:], finish)
    assert me.brain.is_idle()


def test_what_is_read_ahead_has_the_requests_own_deadline() -> None:
    me = Instance(Role.DECODE)
    request, job = following(me)
    me.rank(done(job))
    assert said(me.wait(29.0), Failed) == [], "prefill may compute for long"
    assert said(me.wait(1.5), Failed)[0].reason == "not landed within 30 s"
    assert said(me.effects, Released) == [Released(request.handle)] and me.brain.is_idle()


@pytest.mark.parametrize("how", ["cancelled", "fenced", "failed"])
def test_pages_stay_until_every_read_ahead_has_ended(how: str) -> None:
    me = Instance(Role.DECODE)
    request, first = following(me)
    second = read(me.peer(P, Ahead(request.handle, 16, PAGES[:4])))
    match how:
        case "cancelled":
            me.router(Cancel(request.handle, "left"))
        case "fenced":
            me.peer(P, Fenced(request.handle, "it failed there"))
        case _:
            me.rank(WriteDone(first.job, "broken", 0, 0.1))
    num_free = me.brain.load().num_free_pages
    assert num_free < 64
    if how != "failed":
        me.rank(done(first))
    assert me.brain.load().num_free_pages == num_free and not me.brain.is_idle()
    assert said(me.peer(P, Ahead(request.handle, 16, PAGES[:4])), Transfer) == []
    me.rank(done(second))
    assert me.brain.is_idle() and said(me.effects, Released) == [Released(request.handle)]


def test_words_that_do_not_fit_are_ignored_and_an_offer_fails_the_attempt() -> None:
    me = Instance(Role.DECODE)
    me.meet(hello("p", Role.PREFILL))
    request = msgspec.structs.replace(reserve_for("r", 18, life=P), is_pull=True)
    me.router(request)
    for num_tokens, pages in ((7, PAGES[:2]), (8, PAGES[:1]), (8, PAGES), (20, PAGES), (0, ()), (-4, ())):
        assert said(me.peer(P, Ahead(request.handle, num_tokens, pages)), Transfer) == [], (num_tokens, pages)
    stranger = hello("q", Role.PREFILL)
    assert said(me.peer(P._replace(name=stranger.worker), Ahead(request.handle, 8, PAGES[:2])), Transfer) == []
    short = msgspec.structs.replace(offer(request), pages=PAGES[:3])
    assert said(me.peer(P, short), Failed)[0].reason == "p offers 3 pages, and 5 have what is not here"
    assert me.brain.is_idle()
