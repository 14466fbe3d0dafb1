"""Tickets that come when all is computed, and KV that decode reads: what is held, offered, and believed."""

from __future__ import annotations

import msgspec
from brains import (
    EPOCH,
    PAGE,
    Instance,
    answer,
    chains,
    hello,
    prefill_for,
    reserve_for,
    said,
    sample,
    streamed,
    ticket_of,
)

from pd.runtime.core.events import Effect, Peer, Stamp
from pd.runtime.wire.messages import (
    Cancel,
    Deliver,
    Failed,
    Fenced,
    FirstToken,
    Landed,
    Prefill,
    Ready,
    Refused,
    Released,
    Renew,
    Renewed,
    Reserve,
    Tokens,
)
from pd.runtime.wire.plans import Sever, Severed, Transfer, WriteDone
from pd.runtime.wire.values import Role, Ticket, Token

D = Peer("d", EPOCH)
DECODE = hello("d", Role.DECODE)
P = Peer("p", EPOCH)
LEASE_S = 6.0


# ---- prefill ------------------------------------------------------------------------------------------------------


def prefiller(**changes: int) -> Instance:
    me = Instance(Role.PREFILL, **changes)
    me.meet(DECODE)
    return me


def held(me: Instance, num_tokens: int = 9) -> Prefill:
    """A prompt that is computed, and for which decode has not reserved."""
    request = msgspec.structs.replace(prefill_for("r", num_tokens), hands_off=True)
    me.router(request)
    me.settle()
    assert len(said(me.effects, FirstToken)) == 1
    return request


def pulled(num_tokens: int, held_tokens: int = 0) -> Ticket:
    ticket = ticket_of(DECODE, num_tokens - held_tokens)
    return msgspec.structs.replace(ticket, held_tokens=held_tokens, is_pull=True)


def test_a_late_ticket_has_all_that_is_held_written_and_then_landed() -> None:
    me = prefiller()
    request = held(me)
    assert me.brain.load().num_free_pages == 61 and said(me.effects, Transfer) == []
    effects = me.router(Deliver(request.handle, ticket_of(DECODE, 9)))
    (transfer,) = said(effects, Transfer)
    assert [(job.start, job.stop, job.dst_pages) for job in transfer.jobs] == [(0, 8, (0, 1)), (8, 9, (2,))]
    assert not transfer.is_read
    first, second = transfer.jobs
    assert said(me.rank(WriteDone(second.job, None, 1, 0.1)), Landed) == []
    (landed,) = said(me.rank(WriteDone(first.job, None, 1, 0.1)), Landed)
    assert (landed.handle, landed.position) == (request.handle, 9)
    assert me.brain.is_idle()


def test_a_ticket_that_comes_twice_is_obeyed_once_and_nothing_is_promised_of_it() -> None:
    me = prefiller()
    request = held(me)
    deliver = Deliver(request.handle, ticket_of(DECODE, 9))
    (transfer,) = said(me.router(deliver), Transfer)
    again = me.router(deliver)
    assert said(again, Transfer) == [] and said(again, Fenced) == []
    for job in transfer.jobs:
        me.rank(WriteDone(job.job, None, 1, 0.1))
    assert said(me.router(deliver), Fenced) == [Fenced(request.handle, "nothing of it is held")]


def test_who_is_to_stream_layers_and_cannot_says_so_once() -> None:
    late, pull, early = (prefiller(stream_layers=2) for _ in range(3))
    for name in ("a", "bb"):
        late.router(msgspec.structs.replace(prefill_for(name, 9), hands_off=True))
        pull.router(prefill_for(name, 9, ticket=pulled(9)))
        early.router(prefill_for(name, 9, ticket=ticket_of(DECODE, 9)))
    told = [[stamp.detail for stamp in said(me.effects, Stamp) if stamp.what == "unused"] for me in (late, pull, early)]
    assert told == [
        ["--stream-layers 2, as the router has --reserve late: KV goes when all is computed"],
        ["--stream-layers 2, as the router has --direction pull: decode reads the KV"],
        [],
    ]


def test_what_no_ticket_comes_for_is_given_up_in_time() -> None:
    me = prefiller()
    request = held(me)
    assert said(me.wait(5.5), Failed) == []
    (failed,) = said(me.wait(1.5), Failed)
    assert failed.handle == request.handle and "no ticket came within 6 s" in failed.reason
    assert me.brain.is_idle()


def test_a_late_ticket_of_a_peer_that_was_cut_off_is_refused_as_parted() -> None:
    me = prefiller()
    request = held(me)
    me.meet()
    me.wait(4.0)  # decode has vanished from the router's list, and is severed
    assert said(me.effects, Sever) == [Sever(*D)]
    effects = me.router(Deliver(request.handle, ticket_of(DECODE, 9)))
    assert [each.is_parted for each in said(effects, Refused)] == [True]
    assert len(said(effects, Fenced)) == 1 and me.brain.is_idle()


def offered(me: Instance) -> tuple[Prefill, Ready]:
    request = held(me)
    (ready,) = said(me.router(Deliver(request.handle, pulled(9, held_tokens=4))), Ready)
    return request, ready


def test_an_offer_names_the_pages_after_what_decode_holds_and_stands_until_released() -> None:
    me = prefiller()
    request, ready = offered(me)
    pages = said(me.effects, Ready)[0].pages
    assert (ready.position, ready.lease_s, len(pages)) == (9, LEASE_S, 2)
    cells = [me.ranks.cells[pages[i // PAGE], i % PAGE] for i in range(5)]
    assert cells == chains(request.tokens)[4:]
    assert me.brain.load().num_free_pages == 61
    me.peer(D, Released(request.handle))
    assert me.brain.is_idle()


def test_an_early_ticket_to_be_read_is_offered_as_soon_as_all_is_computed() -> None:
    me = prefiller()
    request = prefill_for("r", 9, ticket=pulled(9))
    me.router(request)
    effects = me.settle()
    assert me.jobs == [] and [each.handle for each in said(effects, Ready)] == [request.handle]


def test_renewals_keep_an_offer_and_their_absence_ends_it() -> None:
    me = prefiller()
    request, _ = offered(me)
    for at in (100.0, 105.0, 110.0):
        me.wait(5.0)
        assert said(me.peer(D, Renew(request.handle, at)), Renewed) == [Renewed(request.handle, at)]
    assert me.brain.load().num_free_pages == 61
    effects = me.wait(6.5)
    assert "did not renew" in said(effects, Failed)[0].reason
    assert len(said(effects, Fenced)) == 1 and me.brain.is_idle()
    assert said(me.peer(D, Renew(request.handle, 111.0)), Fenced) == [
        Fenced(request.handle, "nothing of it is offered")
    ]


def test_a_cancelled_offer_is_withdrawn_but_kept_until_nobody_can_believe_in_it() -> None:
    me = prefiller()
    request, _ = offered(me)
    me.wait(2.0)
    assert len(said(me.router(Cancel(request.handle, "left")), Fenced)) == 1
    assert said(me.peer(D, Renew(request.handle, 1.0)), Renewed) == []
    me.wait(3.5)
    assert me.brain.load().num_free_pages == 61
    me.wait(0.7)
    assert me.brain.is_idle()


# ---- decode -------------------------------------------------------------------------------------------------------


def test_an_offer_of_another_number_of_pages_than_it_takes_fails_the_attempt_and_is_released() -> None:
    me = Instance(Role.DECODE)
    me.meet(hello("p", Role.PREFILL, page_size=8))
    request = msgspec.structs.replace(reserve_for("r", 9, life=P), is_pull=True)
    me.router(request)
    effects = me.peer(P, Ready(request.handle, 9, said_first(request), (5, 6, 7), LEASE_S))
    (failed,) = said(effects, Failed)
    assert failed.reason == "p offers 3 pages, and 2 have what is not here" and said(effects, Transfer) == []
    assert said(effects, Released) == [Released(request.handle)]
    assert me.brain.is_idle()


def reading(me: Instance) -> tuple[Reserve, int]:
    """Nine tokens that are being read: the request, and the job."""
    me.meet(hello("p", Role.PREFILL))
    request = msgspec.structs.replace(reserve_for("r", 9, life=P), is_pull=True)
    me.router(request)
    ready = Ready(request.handle, 9, said_first(request), (5, 6, 7), LEASE_S)
    (transfer,) = said(me.peer(P, ready), Transfer)
    (job,) = transfer.jobs
    assert transfer.is_read and (job.start, job.stop, job.src_pages) == (0, 9, (5, 6, 7))
    ticket = msgspec.structs.replace(ticket_of(DECODE, 9), pages=job.dst_pages)
    me.ranks.receive(request.tokens, ticket)
    return request, job.job


def said_first(request: Reserve) -> Token:
    return Token(sample(request.tokens))


def renewals(effects: list[Effect]) -> list[float]:
    return [each.at for each in said(effects, Renew)]


def test_what_was_read_counts_once_a_renewal_before_its_end_is_confirmed() -> None:
    me = Instance(Role.DECODE)
    request, job = reading(me)
    assert renewals(me.effects) == [0.0]
    me.wait(1.0)
    assert me.flying == [] and said(me.rank(WriteDone(job, None, 1, 1.0)), Released) == []
    effects = me.peer(P, Renewed(request.handle, 0.0))
    assert said(effects, Released) == [Released(request.handle)]
    me.settle()
    tokens, finish = answer(request, 64)
    assert streamed(me.effects, request.handle) == (tokens[1:], finish)


def test_what_was_read_after_the_lease_counts_only_if_a_later_renewal_is_confirmed() -> None:
    me = Instance(Role.DECODE)
    request, job = reading(me)
    me.wait(LEASE_S * 0.95)
    effects = me.rank(WriteDone(job, None, 1, 1.0))
    assert len(renewals(effects)) == 1, "it asks at once"
    assert said(me.peer(P, Renewed(request.handle, 0.0)), Released) == [] and me.flying == []
    assert said(me.peer(P, Renewed(request.handle, me.now)), Released) == [Released(request.handle)]
    assert len(me.flying) > 0


def test_what_was_read_of_a_withdrawn_offer_is_dropped() -> None:
    me = Instance(Role.DECODE)
    request, job = reading(me)
    me.rank(WriteDone(job, None, 1, 1.0))
    effects = me.peer(P, Fenced(request.handle, "withdrawn"))
    assert said(effects, Released) == [Released(request.handle)] and said(me.effects, Tokens) == []
    assert me.brain.is_idle()


def test_pages_stay_while_a_read_that_nobody_wants_goes_on() -> None:
    me = Instance(Role.DECODE)
    request, job = reading(me)
    me.router(Cancel(request.handle, "left"))
    assert me.brain.load().num_free_pages == 61
    assert said(me.wait(10.5), Sever) == [Sever(*P)], "so that it fails"
    assert me.brain.load().num_free_pages == 61
    me.rank(WriteDone(job, "severed", 0, 1.0))
    assert me.brain.is_idle()


def test_a_failed_read_fails_the_attempt_and_frees_both_ends() -> None:
    me = Instance(Role.DECODE)
    request, job = reading(me)
    effects = me.rank(WriteDone(job, "broken", 0, 1.0))
    assert said(effects, Failed)[0].reason == "read from p failed: broken"
    assert said(effects, Released) == [Released(request.handle)] and me.brain.is_idle()


def test_a_peers_word_frees_nothing_that_a_failed_read_of_ours_may_reach() -> None:
    """What a lost peer has sent of it may still come; its Fenced, sent before it died, is of writes alone."""
    me = Instance(Role.DECODE)
    request, job = reading(me)
    effects = me.rank(WriteDone(job, "lost", 0, 1.0, may_land=True))
    assert said(effects, Sever) == [Sever(*P)]
    me.peer(P, Fenced(request.handle, "left"))
    assert me.brain.load().num_free_pages == 61
    me.rank(Severed(*P, clean=False))
    me.peer(P, Fenced(request.handle, "left"))
    assert me.brain.load().num_free_pages == 61 and not me.brain.is_idle()
    assert said(me.wait(2.1), Sever) == [Sever(*P)], "asked again: it may have ended since"
    me.rank(Severed(*P, clean=True))
    assert me.brain.is_idle()


def test_an_offer_that_nobody_waits_for_is_released_at_once() -> None:
    me = Instance(Role.DECODE)
    request = reserve_for("r", 9, life=P)
    ready = Ready(request.handle, 9, said_first(request), (5, 6, 7), LEASE_S)
    assert said(me.peer(P, ready), Released) == [Released(request.handle)]
