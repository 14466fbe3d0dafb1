"""Planted faults: each takes one safeguard away. The simulation must see what comes of every one of them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import msgspec

from pd.runtime.core import inbox, outbox, prefix
from pd.runtime.core.answer import Answer, Piece
from pd.runtime.core.attempts import Arrival, Attempts
from pd.runtime.core.decode import DecodePart
from pd.runtime.core.dispatch import Dispatch
from pd.runtime.core.doubts import Doubts
from pd.runtime.core.events import Abandon, Effect, End, Event, Peer, Send
from pd.runtime.core.flight import Flight
from pd.runtime.core.inbox import Inboxes
from pd.runtime.core.instance import InstanceBrain
from pd.runtime.core.lives import Links
from pd.runtime.core.member import Member
from pd.runtime.core.membership import Membership
from pd.runtime.core.offers import Offers
from pd.runtime.core.outbox import Outboxes
from pd.runtime.core.pages import PageTable, num_pages_for
from pd.runtime.core.prefill import PrefillPart
from pd.runtime.core.prefix import PrefixCache
from pd.runtime.core.ranks import Tally
from pd.runtime.core.reads import Reads
from pd.runtime.core.router import RouterBrain
from pd.runtime.core.step import Step
from pd.runtime.core.timetable import Timetable
from pd.runtime.core.work import Work
from pd.runtime.wire.messages import Fenced, Landed, Missing, Prefill, Reserve, Wanted
from pd.runtime.wire.plans import PeerUnreachable, Severed, WriteDone
from pd.runtime.wire.values import Finish, Handle, Ticket, Token
from pd.transfer.handoff import INBOX, OUTBOX, InboxState, OutboxState
from pd.transfer.handoff import Effect as Do
from pd.transfer.handoff import Event as On
from tests.cluster.drawing import Weather
from tests.cluster.faults_staging import STAGING_FAULTS
from tests.cluster.planting import Patch, Plant, instead
from tests.cluster.scenario import Profile


def inbox_rows(rows: Mapping[tuple[InboxState, On], Any]) -> Plant:
    return lambda patch: patch.setattr(inbox, "INBOX", MappingProxyType({**INBOX, **rows}))


def outbox_rows(rows: Mapping[tuple[OutboxState, On], Any]) -> Plant:
    return lambda patch: patch.setattr(outbox, "OUTBOX", MappingProxyType({**OUTBOX, **rows}))


# ---- at the router ----------------------------------------------------------------------------------------------


def find_any_attempt(self: Dispatch, member: Member, handle: Handle) -> Answer | None:
    answer = self.answers.get(handle.request_id)
    return answer if answer is not None and member in (answer.decode, answer.prefill) else None


def find_any_life(self: Membership, sender: Peer, now: float) -> Member | None:
    member = self._members.get(sender.name)
    if member is not None:
        member.heard_at = now
    return member


def accept_as_they_come(self: Answer, position: int, tokens: tuple[Token, ...], finish: Finish | None) -> Piece | None:
    self.known += [token.id for token in tokens]
    return Piece(position, tokens, finish)


def accept_an_early_end(patch: Patch) -> None:
    accept = Answer.accept

    def accept_it(self: Answer, position: int, tokens: tuple[Token, ...], finish: Finish | None) -> Piece | None:
        piece = accept(self, position, tokens, finish)
        return piece._replace(finish=self.finish) if piece is not None else None

    patch.setattr(Answer, "accept", accept_it)


def keep_silent_about(kind: type) -> Plant:
    """What would send such a message sends it not."""

    def plant(patch: Patch) -> None:
        for cls in (RouterBrain, InstanceBrain):
            on = cls.on

            def act(self: Any, event: Event, now: float, on: Any = on) -> list[Effect]:
                return [e for e in on(self, event, now) if not (isinstance(e, Send) and isinstance(e.message, kind))]

            patch.setattr(cls, "on", act)

    return plant


def end_twice(patch: Patch) -> None:
    end = Dispatch.end

    def end_again(self: Dispatch, answer: Answer, reason: str, now: float, **more: Any) -> None:
        end(self, answer, reason, now, **more)
        if answer.num_failures:  # one that was repeated: its first failure is told, too
            self._effects.append(End(answer.request_id, 503, answer.last_reason, 1.0))

    patch.setattr(Dispatch, "end", end_again)


def ignore_who_left(patch: Patch) -> None:
    on = RouterBrain.on

    def hear(self: RouterBrain, event: Event, now: float) -> list[Effect]:
        return [] if isinstance(event, Abandon) else on(self, event, now)

    patch.setattr(RouterBrain, "on", hear)


# ---- at the receiving end ---------------------------------------------------------------------------------------


def believe_any_fence(patch: Patch) -> None:
    fenced = Inboxes.fenced

    def believe(self: Inboxes, sender: Peer, handle: Handle, *, now: float) -> list[Effect] | None:
        box = self._inboxes.get(handle)
        return fenced(self, box.life if box is not None else sender, handle, now=now)

    patch.setattr(Inboxes, "fenced", believe)


def believe_the_peer_of_our_own_reads(patch: Patch) -> None:
    def believe(self: Inboxes, sender: Peer, handle: Handle, *, now: float) -> list[Effect] | None:
        box = self.find(handle, sender)
        return self.move(box, On.FENCED, now=now) if box is not None else None

    patch.setattr(Inboxes, "fenced", believe)


def believe_any_landing(patch: Patch) -> None:
    landed = Inboxes.landed

    def believe(self: Inboxes, sender: Peer, message: Landed, *, now: float) -> list[Effect] | None:
        for handle, box in self._inboxes.items():
            if handle.request_id == message.handle.request_id:
                position = len(box.reserve.tokens)
                num_pages = num_pages_for(position, self._settings.page_size) - box.table.num_shared
                message = msgspec.structs.replace(message, handle=handle, position=position, num_pages=num_pages)
                return landed(self, box.life, message, now=now)
        return None

    patch.setattr(Inboxes, "landed", believe)


def hold_what_has_not_landed(patch: Patch) -> None:
    take = Inboxes._take

    def take_and_cache(self: Inboxes, message: Reserve, limit: int, life: Peer) -> Any:
        table = take(self, message, limit, life)
        if isinstance(table, PageTable):
            self._pages.insert(table, message.tokens, len(message.tokens))
        return table

    patch.setattr(Inboxes, "_take", take_and_cache)


def sever_nobody(patch: Patch) -> None:
    cut = Links.cut
    patch.setattr(Links, "cut", lambda self, life: cut(self, life)[:0])


def promise_to_strangers(patch: Patch) -> None:
    patch.setattr(Inboxes, "_not_now", lambda self, message, life: None)


def severed_by_one_rank(self: Tally, rank: int, answer: Severed) -> Severed | None:
    return answer


# ---- at the writing end -----------------------------------------------------------------------------------------


def written_by_one_rank(self: Tally, rank: int, answer: WriteDone) -> WriteDone | None:
    return answer


def compare_clocks(patch: Patch) -> None:
    """The router's deadline is taken as a time of this host's clock."""
    submit = PrefillPart.submit

    def take(self: PrefillPart, message: Prefill, now: float) -> list[Effect]:
        return submit(self, msgspec.structs.replace(message, deadline_s=message.deadline_s - now), now)

    patch.setattr(PrefillPart, "submit", take)


def write_by_any_ticket(patch: Patch) -> None:
    """Also by one that was given to an earlier life of ours."""
    fault = PrefillPart._fault

    def take(self: PrefillPart, message: Prefill, limit: int) -> Any:
        if message.ticket is not None:
            ticket = msgspec.structs.replace(message.ticket, prefill_epoch=self._me.epoch)
            message = msgspec.structs.replace(message, ticket=ticket)
        return fault(self, message, limit)

    patch.setattr(PrefillPart, "_fault", take)


def fence_what_is_not_held(patch: Patch) -> None:
    deliver = Offers.deliver

    def take(self: Offers, handle: Handle, ticket: Ticket, *, now: float) -> list[Effect]:
        box = self._outboxes.find(handle)
        if box is not None and box.state is not OutboxState.HOLDING:
            return [Send(ticket.decode, Fenced(handle, "not held"))]
        return deliver(self, handle, ticket, now=now)

    patch.setattr(Offers, "deliver", take)


def tell_of_what_is_planned(patch: Patch) -> None:
    fill = PrefillPart.fill

    def fill_and_tell(self: PrefillPart, step: Step, now: float) -> list[Effect]:
        effects = fill(self, step, now)
        for request, stop in step.prompts:
            outbox = self.outboxes.find(request.handle)
            if outbox is not None and stop < len(request.tokens):
                effects += self.outboxes.tell(outbox, stop=stop, now=now)
        return effects

    patch.setattr(PrefillPart, "fill", fill_and_tell)


def never_attach_again(patch: Patch) -> None:
    break_off = Links.break_off

    def give_up(self: Links, life: Peer, reason: str, *, now: float) -> list[Effect]:
        effects = break_off(self, life, reason, now=now)
        if effects:
            self._links[life.name].attach_at = math.inf
        return effects

    patch.setattr(Links, "break_off", give_up)


def never_take_no_for_an_answer(patch: Patch) -> None:
    """Who can never be reached is tried again, as if its way were broken."""
    unreachable = Work._unreachable

    def try_on(self: Work, message: PeerUnreachable, now: float) -> list[Effect]:
        return unreachable(self, msgspec.structs.replace(message, is_final=False), now)

    patch.setattr(Work, "_unreachable", try_on)


# ---- pages ------------------------------------------------------------------------------------------------------


def free_under_a_step(self: Flight, table: PageTable, last_step: int) -> None:
    if table.pages:
        self._pages.release(table)


def free_twice(patch: Patch) -> None:
    release = Flight.release

    def release_again(self: Flight, table: PageTable, last_step: int) -> None:
        pages = list(table.pages)
        release(self, table, last_step)
        if pages and not table.pages:
            self._pages.pool.drop(pages[0])

    patch.setattr(Flight, "release", release_again)


def keep_what_is_cancelled(self: DecodePart, handle: Handle) -> bool:
    request = self.running.pop(handle, None) or self.ready.pop(handle, None)
    if request is None:
        return False
    self._flight.close(request)
    return True


def hold_no_match(patch: Patch) -> None:
    match = PrefixCache.match

    def take(self: PrefixCache, tokens: Any) -> PageTable:
        table = match(self, tokens)
        for page in table.pages:
            if self.pool.drop(page) == 1:
                self._idle[page] = None
        return table

    patch.setattr(PrefixCache, "match", take)


def forget_what_came_before(patch: Patch) -> None:
    """A page of the prefix cache is known by its own tokens alone."""
    add = PrefixCache._add

    def add_orphan(self: PrefixCache, page: int, key: Any, parent: Any) -> Any:
        entry = add(self, page, key, parent)
        del self._by_key[entry.key]
        entry.key, entry.number = (0, key[1]), 0
        self._by_key[entry.key] = entry
        return entry

    patch.setattr(prefix.PrefixCache, "_add", add_orphan)


R, F, S, Q = InboxState.RESERVED, InboxState.FENCING, InboxState.SEVERING, InboxState.QUARANTINED
C, D, T = OutboxState.COMPUTING, OutboxState.DRAINING, OutboxState.STOPPING
FREED = (InboxState.DONE, (Do.FREE,))

FAULTS: dict[str, Plant] = {
    # the receiving end
    "pages are free at once when the request is cancelled": inbox_rows({(R, On.CANCEL): FREED}),
    "pages are free at once when landing takes too long": inbox_rows({(R, On.TIMEOUT): FREED, (R, On.CANCEL): FREED}),
    "a lost writer is not severed": inbox_rows({(R, On.PEER_LOST): FREED, (F, On.PEER_LOST): FREED}),
    "a writer that could not be severed is trusted": inbox_rows({(S, On.UNCLEAN): FREED}),
    "quarantine ends by itself": inbox_rows({(Q, On.REMIND): (InboxState.DONE, (Do.READMIT,))}),
    "nobody reminds the writer of a Stop, and nobody gives up waiting": inbox_rows(
        {(F, On.REMIND): (F, ()), (F, On.TIMEOUT): (F, ())}
    ),
    "nobody is severed who should be": sever_nobody,
    "a new life's Fenced is taken for its predecessor's": believe_any_fence,
    "a peer's Fenced counts for a read of ours that may still land": believe_the_peer_of_our_own_reads,
    "any attempt's Landed is taken for this one's": believe_any_landing,
    "a peer counts as severed when the first rank has done it": instead(Tally, "severed", severed_by_one_rank),
    "pages are promised whoever is to write them": promise_to_strangers,
    "decode holds for others what has not landed": hold_what_has_not_landed,
    "pages are free while a read that is dropped goes on": inbox_rows(
        {(InboxState.READING, On.CANCEL): FREED, (InboxState.READING, On.TIMEOUT): FREED}
    ),
    "pages are free while what is read ahead comes": inbox_rows(
        {(InboxState.FOLLOWING, On.CANCEL): FREED, (InboxState.FOLLOWING, On.FENCED): FREED}
    ),
    "digests that differ are ignored": instead(
        Reads, "_compare", lambda self, inbox, done, now: self._inboxes.move(inbox, On.AGREED, now=now)
    ),
    "what landed is used before it is compared": inbox_rows(
        {
            (R, On.CHECK): (InboxState.DONE, (Do.ADMIT,)),
            (InboxState.READING, On.CHECK): (InboxState.DONE, (Do.SEND_RELEASED, Do.ADMIT)),
        }
    ),
    # the writing end
    "Ready is said before its digest is made": outbox_rows(
        {
            (C, On.DIGEST): (OutboxState.OFFERED, (Do.SEND_READY,)),
            (OutboxState.HOLDING, On.DIGEST): (OutboxState.OFFERED, (Do.SEND_READY,)),
        }
    ),
    "what is to be computed is said to be there": tell_of_what_is_planned,
    "Landed is said before the last write is done": outbox_rows(
        {(C, On.COMPUTED): (OutboxState.LANDED, (Do.SEND_LANDED, Do.FREE))}
    ),
    "Fenced is said while writes are under way": outbox_rows(
        {
            (C, On.STOP): (OutboxState.FENCED, (Do.SEND_FENCED, Do.FREE)),
            (D, On.STOP): (OutboxState.FENCED, (Do.SEND_FENCED, Do.FREE)),
        }
    ),
    "Landed is said once": outbox_rows({(OutboxState.LANDED, On.REMIND): (OutboxState.LANDED, ())}),
    "Fenced is said of failed writes whose bytes may still land": outbox_rows(
        {(C, On.DOUBT): (T, ()), (D, On.DOUBT): (T, ()), (T, On.DOUBT): (T, ())}
    ),
    "doubts are forgotten": instead(Doubts, "add", lambda self, handle, life, last_job: None),
    "a write counts as done when the first rank has done it": instead(Tally, "write_done", written_by_one_rank),
    "a handoff has no deadline": instead(Outboxes, "_set_deadline", lambda self, outbox, now: None),
    "a new life is attached while writes to the old one are open": instead(
        Outboxes, "has_open_jobs", lambda self, peer: False
    ),
    "a ticket counts for every life of the writer": write_by_any_ticket,
    "a broken way is never tried again": never_attach_again,
    "who can never be reached is tried again and again": never_take_no_for_an_answer,
    "clocks of two hosts are compared": compare_clocks,
    "a ticket that comes twice is fenced though its writes are under way": fence_what_is_not_held,
    # both
    "a repeated message begins its attempt again": instead(Attempts, "begin", lambda self, handle: Arrival.NEW),
    "a Stop that overtook its request is forgotten": instead(Attempts, "stop", lambda self, handle: None),
    # pages
    "pages are free while a launched step writes them": instead(Flight, "release", free_under_a_step),
    "pages are given back twice": free_twice,
    "a cancelled request keeps its pages": instead(DecodePart, "cancel", keep_what_is_cancelled),
    "a cached page that was matched is not held": hold_no_match,
    "a cached page is known by its own tokens alone": forget_what_came_before,
    "nobody gives way when pages are short": instead(DecodePart, "_preempt_younger", lambda self, request: None),
    **STAGING_FAULTS,
    # the router
    "the router takes old attempts for the current one": instead(Dispatch, "find", find_any_attempt),
    "the router takes an old life for the new one": instead(Membership, "find", find_any_life),
    "the router has no deadlines": instead(Timetable, "pop_due", lambda self, now: []),
    "the router passes tokens on as they come": instead(Answer, "accept", accept_as_they_come),
    "the router ends an answer before all its tokens are there": accept_an_early_end,
    "the router ends a repeated request twice": end_twice,
    "the router asks no stranger who it is": instead(Membership, "ask", lambda self, stranger, now: []),
    "the router goes on for a client that left": ignore_who_left,
    "the router never says again what it wants": keep_silent_about(Wanted),
    "an instance does not say what it never got": keep_silent_about(Missing),
}

LATE, LATE_READS = Weather(Profile.LATE), Weather(Profile.LATE, "pull")
FAULTY, CRASHES = Weather(Profile.FAULTS), Weather(Profile.CRASHES)
SHOWN_IN: dict[str, Weather] = {
    "a peer's Fenced counts for a read of ours that may still land": LATE_READS,
    "a slot that a lost peer's read may reach is free": LATE_READS,
    "pages are free while a read that is dropped goes on": LATE_READS,
    "pages are free while what is read ahead comes": LATE_READS,
    "what is in doubt stays so when its peer is severed": LATE_READS,
    "a ticket counts for every life of the writer": LATE,
    "quarantine ends by itself": LATE,
    "a peer counts as severed when the first rank has done it": LATE,
    "Fenced is said of failed writes whose bytes may still land": LATE,
    "a new life's Fenced is taken for its predecessor's": LATE,
    "a lost writer is not severed": LATE,
    "any attempt's Landed is taken for this one's": LATE,
    "a writer that could not be severed is trusted": LATE,
    "Landed is said once": FAULTY,
    "the router takes an old life for the new one": FAULTY,
    "the router ends an answer before all its tokens are there": CRASHES,
    "doubts are forgotten": CRASHES,
    "a handoff has no deadline": CRASHES,
    "nobody gives way when pages are short": Weather(Profile.TIGHT),
    "Ready is said before its digest is made": Weather(Profile.CALM),
}
"""Of what shows itself seldom: the weather it was seen in, whose seeds are played before the others."""
