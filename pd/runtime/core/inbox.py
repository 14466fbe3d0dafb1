"""The other end of the handoffs: pages promised to a prefill instance until landed, or surely left alone. Pure.

Rules
1. The router hears of an attempt's end at once; the pages stay until a proof that no write can come.
2. Landed and Fenced count only from the very life the pages were promised to, and Landed only of all these pages.
3. A life is promised pages only while our ranks could sever it, and nothing more once they were told to.
4. A prefix that is here already is held, not promised: its pages are shared, and no peer may write them.
5. Where digests are compared, nothing is cached or decoded of what landed before they agree.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from pd.runtime.core.decode import DecodePart
from pd.runtime.core.entry import apart, never_fits, pages_to_promise
from pd.runtime.core.events import ROUTER, Effect, Exit, Order, Peer, Send, Stamp
from pd.runtime.core.lives import Links
from pd.runtime.core.pages import PageTable, num_pages_for
from pd.runtime.core.prefix import PrefixCache
from pd.runtime.core.request import Phase, Request, limit_of
from pd.runtime.core.settings import BrainSettings, Deadlines
from pd.runtime.wire.messages import Failed, Landed, Ready, Refused, Released, Renew, Reserve, Reserved, Stop
from pd.runtime.wire.plans import Digest, Severed, Transfer, WriteJob
from pd.runtime.wire.values import Handle, Stage, Ticket, Token
from pd.transfer import handoff
from pd.transfer.handoff import INBOX, Event, InboxState

_WANTED = (
    InboxState.RESERVED,
    InboxState.AWAITING,
    InboxState.FOLLOWING,
    InboxState.READING,
    InboxState.CHECKING,
)


@dataclass(slots=True, eq=False)
class Inbox:
    reserve: Reserve
    life: Peer  # who may write
    limit: int
    table: PageTable
    deadline: float
    remind_at: float = 0.0
    state: InboxState = InboxState.RESERVED
    first: Token | None = None
    num_held: int = 0  # tokens that were here before
    page_size: int = 1  # the peer's
    num_read: int = 0  # tokens given to reads, or held
    num_offered: int = 0  # tokens that may be read
    offered: tuple[int, ...] = ()  # the peer's pages of them, but for those held
    ready: Ready | None = None  # all may be read
    digest: int | None = None  # of what the peer sent, by its own word
    num_open: int = 0  # reads
    is_doubtful: bool = False  # a read has failed, and bytes of it may land
    read_at: float | None = None  # when the last read was done
    proven_until: float = -math.inf  # the peer's offer is known to stand so long

    @property
    def is_wanted(self) -> bool:
        """Not handed on, and not given up."""
        return self.state in _WANTED

    @property
    def arrived(self) -> Event:
        """What it is that every page is here."""
        return Event.CHECK if self.reserve.verifies and self.is_wanted else Event.LANDED

    @property
    def drained(self) -> Event:
        """What it is that no read is under way."""
        return Event.DOUBT if self.is_doubtful else Event.DRAINED


class ReadJobs:
    """The reads that are open: given to the ranks, and not ended by all of them."""

    def __init__(self) -> None:
        self._inboxes: dict[int, Inbox] = {}
        self._last_job = 0

    def begin(self, inbox: Inbox, page_size: int) -> WriteJob:
        """All that the peer offers and that was not read yet, into the pages that are not held."""
        start, stop, held = inbox.num_read, inbox.num_offered, inbox.num_held
        assert start < stop, f"nothing is to be read of {inbox.reserve.handle} between {start} and {stop}"
        inbox.num_read = stop
        src = inbox.offered[(start - held) // inbox.page_size : num_pages_for(stop - held, inbox.page_size)]
        dst = inbox.table.pages[start // page_size : num_pages_for(stop, page_size)]
        return WriteJob(self._open(inbox), inbox.life.name, start, stop, src, tuple(dst))

    def digest(self, inbox: Inbox, page_size: int) -> Digest:
        """A job that moves nothing: all that landed."""
        start, stop = inbox.num_held, len(inbox.reserve.tokens)
        pages = inbox.table.pages[start // page_size : num_pages_for(stop, page_size)]
        return Digest(WriteJob(self._open(inbox), inbox.life.name, start, stop, tuple(pages), ()), is_own=True)

    def end(self, job: int) -> Inbox:
        inbox = self._inboxes.pop(job)
        inbox.num_open -= 1
        return inbox

    def is_open(self, job: int) -> bool:
        return job in self._inboxes

    def has_open(self, peer: str) -> bool:
        """Of any life of `peer`."""
        return any(inbox.life.name == peer for inbox in self._inboxes.values())

    def _open(self, inbox: Inbox) -> int:
        """The number of its next job."""
        self._last_job += 1
        self._inboxes[self._last_job] = inbox
        inbox.num_open += 1
        return self._last_job


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
        self.reads = ReadJobs()

    def __iter__(self) -> Iterator[Inbox]:
        return iter(list(self._inboxes.values()))

    def find(self, handle: Handle, life: Peer) -> Inbox | None:
        """What waits for that life's KV."""
        inbox = self._inboxes.get(handle)
        return inbox if inbox is not None and inbox.life == life else None

    def reserve(self, message: Reserve, now: float) -> list[Effect]:
        """Promise pages, or say at once why not."""
        handle, size = message.handle, self._settings.page_size
        limit = limit_of(message.num_prompt, message.sampling, self._settings.max_model_len)
        life = Peer(message.prefill, message.prefill_epoch)
        refused = never_fits(message, limit, self._settings) or self._not_now(message, life)
        taken = refused or self._take(message, limit, life)
        if isinstance(taken, Refused):
            return [Send(ROUTER, taken), Stamp(str(handle), "refused", taken.reason)]
        inbox = self._inboxes[handle] = Inbox(message, life, limit, taken, now + message.deadline_s)
        held = inbox.num_held = inbox.num_read = taken.num_shared * size
        if message.is_pull and (peer := self._links.find(life)) is not None:
            inbox.state, inbox.page_size = InboxState.AWAITING, peer.layout.page_size
        written = taken.pages[taken.num_shared : num_pages_for(len(message.tokens), size)]
        ticket = Ticket(*self._me, tuple(written), held, life.epoch, message.is_pull, message.verifies)
        return [Send(ROUTER, Reserved(handle, ticket)), Stamp(str(handle), "reserved", f"{held} tokens held")]

    def landed(self, sender: Peer, message: Landed, *, now: float) -> list[Effect] | None:
        """None if no such handoff waits for it."""
        inbox = self.find(message.handle, sender)
        if inbox is None or message.position != len(inbox.reserve.tokens):
            return None
        num_promised = num_pages_for(message.position, self._settings.page_size) - inbox.table.num_shared
        if message.num_pages != num_promised and inbox.state is InboxState.RESERVED:
            reason = f"{sender.name} says that it wrote {message.num_pages} pages, and {num_promised} are its to write"
            return self.fail(inbox, Event.FENCED, reason=reason, now=now)  # for it writes no more
        inbox.first, inbox.digest = message.token, message.digest
        return self.move(inbox, inbox.arrived, now=now)

    def fenced(self, sender: Peer, handle: Handle, *, now: float) -> list[Effect] | None:
        """None if no such handoff waits for it."""
        inbox = self.find(handle, sender)
        if inbox is None:
            return None
        if inbox.is_doubtful:  # what may still land is a read of our own, of which the peer can promise nothing
            return []
        return self.move(inbox, Event.FENCED, now=now)

    def cancel(self, handle: Handle, reason: str, *, now: float) -> list[Effect] | None:
        """The pages are no longer wanted. None if none are promised."""
        inbox = self._inboxes.get(handle)
        return self.move(inbox, Event.CANCEL, now=now) if inbox else None

    def lose(self, life: Peer, now: float) -> list[Effect]:
        """That life of a prefill instance is over."""
        effects: list[Effect] = []
        reason = f"prefill instance {life.name} is lost"
        for inbox in self:
            if inbox.life == life and inbox.state is not InboxState.CHECKING:  # that needs nobody else
                effects += self.fail(inbox, Event.PEER_LOST, reason=reason, now=now)
        return effects

    def severed(self, answer: Severed, now: float) -> list[Effect]:
        """All ranks have answered a Sever."""
        life = Peer(answer.peer, answer.epoch)
        effects: list[Effect] = []
        for inbox in self:
            if inbox.life == life:
                effects += self.move(inbox, Event.SEVERED if answer.clean else Event.UNCLEAN, now=now)
        return effects

    def sweep(self, now: float) -> list[Effect]:
        """Look at all deadlines."""
        effects: list[Effect] = []
        for inbox in self:
            if inbox.state is not InboxState.QUARANTINED and now >= inbox.deadline:
                reason = f"not landed within {inbox.reserve.deadline_s:g} s"
                if inbox.state is InboxState.READING:
                    reason = f"not read within {self._settings.deadlines.draining_s:g} s"
                if inbox.state is InboxState.CHECKING:
                    reason = f"landed, and no digest of it within {self._settings.deadlines.checking_s:g} s"
                effects += self.fail(inbox, Event.TIMEOUT, reason=reason, now=now)
            elif now >= inbox.remind_at:
                effects += self.move(inbox, Event.REMIND, now=now)
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

    def _not_now(self, message: Reserve, life: Peer) -> Refused | None:
        """Why it cannot be served now, whatever the pages."""
        max_waiting = self._settings.step.max_waiting
        if self._links.find(life) is None:
            reason = f"{self._me.name} is not attached to {life.name} (epoch {life.epoch}), and could not sever it"
            reason, how = apart(life, self._links, reason)
            return Refused(message.handle, reason, *how)
        if len(self._inboxes) + len(self._decode.ready) >= max_waiting:
            reason = f"{max_waiting} requests wait already"
            return Refused(message.handle, reason, self._settings.deadlines.retry_after_s)
        return None

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

    def fail(
        self, inbox: Inbox, event: Event, *, reason: str, now: float, stage: Stage = Stage.TRANSFER
    ) -> list[Effect]:
        """Move on `event`; the first time, that is the end of the attempt and the router is told."""
        effects: list[Effect] = []
        if inbox.is_wanted:
            handle = inbox.reserve.handle
            effects.append(Send(ROUTER, Failed(handle, stage, reason, retryable=True)))
            effects.append(Stamp(str(handle), "failed", reason))
        return effects + self.move(inbox, event, now=now)

    def move(self, inbox: Inbox, event: Event, *, now: float) -> list[Effect]:
        before = inbox.state
        inbox.state, todo = handoff.step(INBOX, before, event)
        has_moved = inbox.state is not before and inbox.state is not InboxState.FOLLOWING  # the request's goes on there
        if has_moved or handoff.Effect.SEVER in todo:
            inbox.deadline = now + _patience(inbox.state, self._settings.deadlines)
        is_quarantined = inbox.state is InboxState.QUARANTINED
        deadlines = self._settings.deadlines
        inbox.remind_at = now + (deadlines.sever_again_s if is_quarantined else deadlines.remind_s)
        effects: list[Effect] = []
        for effect in todo:
            effects += self._do(inbox, effect, now=now)
        if inbox.state is InboxState.DONE:
            del self._inboxes[inbox.reserve.handle]
        elif inbox.state is InboxState.DROPPING and not inbox.num_open and event is not Event.DRAINED:
            effects += self.move(inbox, inbox.drained, now=now)
        return effects

    def _do(self, inbox: Inbox, effect: handoff.Effect, *, now: float) -> list[Effect]:
        handle, peer = inbox.reserve.handle, inbox.life.name
        match effect:
            case handoff.Effect.ADMIT:
                return self._admit(inbox)
            case handoff.Effect.SEND_STOP:
                return [Send(peer, Stop(handle))]
            case handoff.Effect.SEND_RENEW:
                return [Send(peer, Renew(handle, now))]
            case handoff.Effect.SEND_RELEASED:
                return [Send(peer, Released(handle))]
            case handoff.Effect.READ:
                return [Order(Transfer((self.reads.begin(inbox, self._settings.page_size),), is_read=True))]
            case handoff.Effect.DIGEST:
                return [Order(self.reads.digest(inbox, self._settings.page_size))]
            case handoff.Effect.SEVER:
                return self._links.cut(inbox.life)
            case handoff.Effect.FREE:
                self._pages.release(inbox.table)
            case handoff.Effect.QUARANTINE:
                self._pages.quarantine(inbox.table)
                detail = f"{len(inbox.table.pages)} pages: {peer} may still write them"
                return [Stamp(str(handle), "quarantined", detail)]
            case handoff.Effect.READMIT:
                self._pages.readmit(inbox.table)
            case _:
                raise AssertionError(f"{effect} is not for this end")
        return []

    def _admit(self, inbox: Inbox) -> list[Effect]:
        reserve, first = inbox.reserve, inbox.first
        assert first is not None, f"{reserve.handle} landed without its first token"
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
        return self._decode.land(request, first)


def _patience(state: InboxState, deadlines: Deadlines) -> float:
    """How long a state may last that was entered now."""
    match state:
        case InboxState.READING:
            return deadlines.draining_s
        case InboxState.DROPPING:
            return deadlines.stopping_s
        case InboxState.CHECKING:
            return deadlines.checking_s
        case _:
            return deadlines.fencing_s
