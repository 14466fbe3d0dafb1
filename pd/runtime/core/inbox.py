"""The other end of the handoffs: pages promised to a prefill instance until landed, or surely left alone. Pure.

Rules
1. The router hears of an attempt's end at once; the pages stay until a proof that no write can come.
2. Landed and Fenced count only from the very life the pages were promised to.
3. A life is promised pages only while our ranks could sever it, and nothing more once they were told to.
4. A prefix that is here already is held, not promised: its pages are shared, and no peer may write them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from pd.runtime.core.decode import DecodePart
from pd.runtime.core.entry import never_fits, pages_to_promise
from pd.runtime.core.events import ROUTER, Effect, Exit, Peer, Send, Stamp
from pd.runtime.core.lives import Links
from pd.runtime.core.pages import PageTable, num_pages_for
from pd.runtime.core.prefix import PrefixCache
from pd.runtime.core.request import Phase, Request, limit_of
from pd.runtime.core.settings import BrainSettings
from pd.runtime.wire.messages import (
    Failed,
    Handle,
    Landed,
    Refused,
    Reserve,
    Reserved,
    Severed,
    Stage,
    Stop,
    Ticket,
)
from pd.transfer import handoff
from pd.transfer.handoff import INBOX, Event, InboxState


@dataclass(slots=True, eq=False)
class Inbox:
    reserve: Reserve
    life: Peer  # who may write
    limit: int
    table: PageTable
    deadline: float
    remind_at: float = 0.0
    state: InboxState = InboxState.RESERVED
    landed: Landed | None = None


class Inboxes:
    def __init__(
        self, settings: BrainSettings, me: Peer, *, pages: PrefixCache, links: Links, decode: DecodePart
    ) -> None:
        self._settings = settings
        self._me = me
        self._pages = pages
        self._decode = decode
        self._inboxes: dict[Handle, Inbox] = {}
        self._links = links

    def __iter__(self) -> Iterator[Inbox]:
        return iter(list(self._inboxes.values()))

    def reserve(self, message: Reserve, now: float) -> list[Effect]:
        """Promise pages, or say at once why not."""
        handle, size = message.handle, self._settings.page_size
        limit = limit_of(message.num_prompt, message.sampling, self._settings.max_model_len)
        life = Peer(message.prefill, message.prefill_epoch)
        refused = never_fits(message, limit, self._settings) or self._not_now(message, life)
        taken = refused or self._take(message, limit, life)
        if isinstance(taken, Refused):
            return [Send(ROUTER, taken), Stamp(str(handle), "refused", taken.reason)]
        self._inboxes[handle] = Inbox(message, life, limit, taken, now + message.deadline_s)
        written = taken.pages[taken.num_shared : num_pages_for(len(message.tokens), size)]
        held = taken.num_shared * size
        ticket = Ticket(self._me.name, self._me.epoch, tuple(written), held, life.epoch)
        return [Send(ROUTER, Reserved(handle, ticket)), Stamp(str(handle), "reserved", f"{held} tokens held")]

    def landed(self, sender: Peer, message: Landed, *, now: float) -> list[Effect] | None:
        """None if no such handoff waits for it."""
        inbox = self._inboxes.get(message.handle)
        if inbox is None or inbox.life != sender or message.position != len(inbox.reserve.tokens):
            return None
        inbox.landed = message
        return self._move(inbox, Event.LANDED, now=now)

    def fenced(self, sender: Peer, handle: Handle, *, now: float) -> list[Effect] | None:
        """None if no such handoff waits for it."""
        inbox = self._inboxes.get(handle)
        if inbox is None or inbox.life != sender:
            return None
        return self._move(inbox, Event.FENCED, now=now)

    def cancel(self, handle: Handle, reason: str, *, now: float) -> list[Effect] | None:
        """The pages are no longer wanted. None if none are promised."""
        inbox = self._inboxes.get(handle)
        return self._move(inbox, Event.CANCEL, now=now) if inbox else None

    def lose(self, life: Peer, now: float) -> list[Effect]:
        """That life of a prefill instance is over."""
        effects: list[Effect] = []
        reason = f"prefill instance {life.name} is lost"
        for inbox in self._of(life):
            effects += self._fail(inbox, Event.PEER_LOST, reason=reason, now=now)
        return effects

    def severed(self, answer: Severed, now: float) -> list[Effect]:
        """All ranks have answered a Sever."""
        life = Peer(answer.peer, answer.epoch)
        effects: list[Effect] = []
        for inbox in self._of(life):
            effects += self._move(inbox, Event.SEVERED if answer.clean else Event.UNCLEAN, now=now)
        return effects

    def sweep(self, now: float) -> list[Effect]:
        """Look at all deadlines."""
        effects: list[Effect] = []
        for inbox in self:
            if inbox.state is not InboxState.QUARANTINED and now >= inbox.deadline:
                reason = f"not landed within {inbox.reserve.deadline_s:g} s"
                effects += self._fail(inbox, Event.TIMEOUT, reason=reason, now=now)
            elif now >= inbox.remind_at:
                effects += self._move(inbox, Event.REMIND, now=now)
        num_quarantined = self._pages.pool.num_quarantined
        if num_quarantined > self._settings.num_pages // 2:
            effects.append(Exit(f"{num_quarantined} pages are quarantined: start again", failed=True))
        return effects

    def check(self) -> None:
        for handle, inbox in self._inboxes.items():
            is_quarantined = inbox.state is InboxState.QUARANTINED
            assert inbox.state is not InboxState.DONE, f"{handle} is done, and its inbox is still here"
            assert inbox.table.pages, f"the pages promised for {handle} were given back ({inbox.state})"
            for page in inbox.table.pages:
                is_referenced = self._pages.pool.is_referenced(page)
                assert is_referenced is not is_quarantined, f"page {page} of {handle} is free under a write"

    def _of(self, life: Peer) -> list[Inbox]:
        return [inbox for inbox in self._inboxes.values() if inbox.life == life]

    def _not_now(self, message: Reserve, life: Peer) -> Refused | None:
        """Why it cannot be served now, whatever the pages."""
        max_waiting = self._settings.step.max_waiting
        if self._links.find(life) is None:
            reason = f"{self._me.name} is not attached to {life.name} (epoch {life.epoch}), and could not sever it"
        elif len(self._inboxes) + len(self._decode.ready) >= max_waiting:
            reason = f"{max_waiting} requests wait already"
        else:
            return None
        return Refused(message.handle, reason, self._settings.deadlines.retry_after_s, self._links.is_cut(life))

    def _take(self, message: Reserve, limit: int, life: Peer) -> PageTable | Refused:
        """The pages whose prefix is here, and new ones for the rest; whole pages of either side."""
        peer, size = self._links.find(life), self._settings.page_size
        assert peer is not None, "nothing is promised to who is not attached"
        unit = math.lcm(size, peer.layout.page_size) // size
        table = self._pages.match(message.tokens)
        self._pages.trim(table, len(table.pages) // unit * unit)
        num_pages = pages_to_promise(message, limit, size) - len(table.pages)
        num_available = self._pages.num_available
        if num_pages + self._decode.headroom <= num_available and self._pages.grow(table, num_pages) is not None:
            return table
        self._pages.release(table)
        reason = f"{num_pages} pages are needed, {num_available} are free"
        return Refused(message.handle, reason, self._settings.deadlines.retry_after_s)

    def _fail(self, inbox: Inbox, event: Event, *, reason: str, now: float) -> list[Effect]:
        """Move on `event`; the first time, that is the end of the attempt and the router is told."""
        effects: list[Effect] = []
        if inbox.state is InboxState.RESERVED:
            handle = inbox.reserve.handle
            effects.append(Send(ROUTER, Failed(handle, Stage.TRANSFER, reason, retryable=True)))
            effects.append(Stamp(str(handle), "failed", reason))
        return effects + self._move(inbox, event, now=now)

    def _move(self, inbox: Inbox, event: Event, *, now: float) -> list[Effect]:
        before = inbox.state
        inbox.state, todo = handoff.step(INBOX, before, event)
        if inbox.state is not before:
            inbox.deadline = now + self._settings.deadlines.fencing_s
        is_quarantined = inbox.state is InboxState.QUARANTINED
        deadlines = self._settings.deadlines
        inbox.remind_at = now + (deadlines.sever_again_s if is_quarantined else deadlines.remind_s)
        effects: list[Effect] = []
        for effect in todo:
            effects += self._do(inbox, effect)
        if inbox.state is InboxState.DONE:
            del self._inboxes[inbox.reserve.handle]
        return effects

    def _do(self, inbox: Inbox, effect: handoff.Effect) -> list[Effect]:
        match effect:
            case handoff.Effect.ADMIT:
                return self._admit(inbox)
            case handoff.Effect.SEND_STOP:
                return [Send(inbox.life.name, Stop(inbox.reserve.handle))]
            case handoff.Effect.SEVER:
                return self._links.cut(inbox.life)
            case handoff.Effect.FREE:
                self._pages.release(inbox.table)
            case handoff.Effect.QUARANTINE:
                self._pages.quarantine(inbox.table)
                detail = f"{len(inbox.table.pages)} pages: {inbox.life.name} may still write them"
                return [Stamp(str(inbox.reserve.handle), "quarantined", detail)]
            case handoff.Effect.READMIT:
                self._pages.readmit(inbox.table)
            case _:
                raise AssertionError(f"{effect} is not for this end")
        return []

    def _admit(self, inbox: Inbox) -> list[Effect]:
        reserve, landed = inbox.reserve, inbox.landed
        assert landed is not None
        self._pages.insert(inbox.table, reserve.tokens, len(reserve.tokens))
        request = Request(
            reserve.handle,
            reserve.tokens,
            reserve.num_prompt,
            reserve.sampling,
            inbox.limit,
            Phase.READY,
            table=inbox.table,
            num_computed=len(reserve.tokens),
            capacity=len(inbox.table.pages) * self._settings.page_size,
        )
        return self._decode.land(request, landed.token)
