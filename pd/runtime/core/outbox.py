"""The writing end of the handoffs: which tokens' KV goes to which peer, and when none is under way any more. Pure.

Rules
1. A job is open from the launch of the plan it rides on, or goes beside, until every rank has ended it. Only then are
   its pages let go.
2. A job covers whole pages of both sides (units of the least common multiple); the last one ends with the prompt.
3. A table of pages in a handoff is given back by FREE and by nothing else.
4. What decode reads is offered once, whole, and kept for `lease_s` from each Renew that is heard. Before that it may
   read what is computed of a request that goes on: that is kept anyhow, and if the request ends, nothing counts.
5. A handoff whose last word is not known to be heard holds nothing, and has a deadline.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple, assert_never

from pd.runtime.core.doubts import Doubts
from pd.runtime.core.events import Effect, Order, Peer, Send, Stamp
from pd.runtime.core.flight import Flight
from pd.runtime.core.lives import Links
from pd.runtime.core.pages import num_pages_for
from pd.runtime.core.proofs import Proofs
from pd.runtime.core.ranks import DIGESTS
from pd.runtime.core.request import Request
from pd.runtime.core.settings import BrainSettings
from pd.runtime.wire.messages import Ahead, Fenced, Landed, Ready, Renewed
from pd.runtime.wire.plans import Digest, WriteDone, WriteJob
from pd.runtime.wire.values import Handle, Ticket, Token
from pd.transfer import handoff
from pd.transfer.handoff import OUTBOX, Event, OutboxState

_SAID = (OutboxState.LANDED, OutboxState.FENCED)
_OVER = (OutboxState.STOPPING, OutboxState.ABANDONED, OutboxState.WITHDRAWN, *_SAID)


@dataclass(slots=True, eq=False)
class Outbox:
    request: Request
    ticket: Ticket | None = None  # None: decode has not reserved yet
    life: Peer | None = None  # the ticket's
    page_size: int = 1  # the peer's
    num_sent: int = 0  # tokens given to jobs, or held by the peer from the start
    num_told: int = 0  # tokens that the peer may read ahead
    state: OutboxState = OutboxState.QUEUED
    num_open: int = 0  # jobs
    num_written: int = 0  # the peer's pages, by jobs that ended well
    deadline: float | None = None
    first: Token | None = None
    reason: str = ""  # why it is fenced
    remind_at: float = math.inf  # when the last word is said again
    renewed_at: float = 0.0  # the peer's time in its latest Renew
    digest: int = 0  # of what ended jobs have sent, where the ticket asks for it

    @property
    def is_said(self) -> bool:
        """Only the peer's answer to its last word is waited for."""
        return self.state in _SAID

    @property
    def is_over(self) -> bool:
        """The router was told how the attempt ended here, or need not be."""
        return self.state in _OVER


class _Job(NamedTuple):
    outbox: Outbox
    num_pages: int  # the peer's


class DigestJobs:
    """Of what is to be offered: given to the ranks, and not told by all. One may outlive its handoff."""

    def __init__(self) -> None:
        self._outboxes: dict[int, Outbox] = {}

    def begin(self, outbox: Outbox, job: WriteJob) -> Digest:
        self._outboxes[job.job] = outbox
        return Digest(job, is_own=False)

    def end(self, done: WriteDone) -> Outbox:
        """Every rank has told its own."""
        outbox = self._outboxes.pop(done.job)
        outbox.digest = done.digest or 0
        return outbox

    def is_open(self, job: int) -> bool:
        return job in self._outboxes


class Outboxes:
    def __init__(self, settings: BrainSettings, flight: Flight, links: Links) -> None:
        self._settings = settings
        self._flight = flight
        self._links = links
        self._outboxes: dict[Handle, Outbox] = {}
        self._jobs: dict[int, _Job] = {}
        self.digests = DigestJobs()
        self.doubts = Doubts()
        self.proofs = Proofs(links, self.doubts, settings.deadlines.stopping_s)
        self.last_job = 0  # the highest number that was given

    def __len__(self) -> int:
        return len(self._outboxes)

    def __iter__(self) -> Iterator[Outbox]:
        return iter(list(self._outboxes.values()))

    def find(self, handle: Handle) -> Outbox | None:
        return self._outboxes.get(handle)

    def prove(self, life: Peer, *, now: float) -> list[Effect]:
        """Have a write of nothing done, which ends the doubts about all before it."""
        effects = self.proofs.begin(life, self.last_job + 1, now=now)
        self.last_job += len(effects)
        return effects

    def has_open_jobs(self, peer: str) -> bool:
        """To any life of `peer`."""
        lives = [job.outbox.life for job in self._jobs.values()]
        return self.proofs.has_open(peer) or any(life is not None and life.name == peer for life in lives)

    def is_open(self, job: int) -> bool:
        return job in self._jobs

    def open(self, request: Request) -> Outbox:
        """Begin a handoff."""
        outbox = self._outboxes[request.handle] = Outbox(request)
        return outbox

    def assign(self, outbox: Outbox, ticket: Ticket) -> None:
        """Now it is known whose pages it is for. The ticket has no fault."""
        life = Peer(ticket.decode, ticket.epoch)
        peer = self._links.find(life)
        assert peer is not None, "a ticket of no attached peer is a fault"
        outbox.ticket, outbox.life = ticket, life
        outbox.page_size, outbox.num_sent = peer.layout.page_size, ticket.held_tokens

    def write(self, outbox: Outbox, *, stop: int) -> list[WriteJob]:
        """The KV before `stop` is there, or will be when the jobs begin: those for what was not sent yet."""
        if outbox.ticket is None or outbox.ticket.is_pull:
            return []
        outbox.state, effects = handoff.step(OUTBOX, outbox.state, Event.CHUNK)
        if handoff.Effect.WRITE not in effects:
            return []
        size = self._settings.page_size
        unit = math.lcm(size, outbox.page_size)
        longest = max(unit, self._settings.step.max_prefill_tokens // unit * unit)
        end = stop if stop == len(outbox.request.tokens) else stop // unit * unit
        jobs: list[WriteJob] = []
        while outbox.num_sent < end:
            start = outbox.num_sent
            outbox.num_sent = min(end, start + longest)
            job = self._job(outbox, outbox.ticket, start, stop=outbox.num_sent)
            self._jobs[job.job] = _Job(outbox, len(job.dst_pages))
            outbox.num_open += 1
            jobs.append(job)
        return jobs

    def tell(self, outbox: Outbox, *, stop: int, now: float) -> list[Effect]:
        """The KV before `stop` is there: a peer that reads may begin with what is whole pages of both sides."""
        ticket = outbox.ticket
        if ticket is None or not ticket.is_pull:
            return []
        unit = math.lcm(self._settings.page_size, outbox.page_size)
        num_whole = stop // unit * unit
        if num_whole <= max(outbox.num_told, ticket.held_tokens):
            return []
        outbox.num_told = num_whole
        return self.move(outbox, Event.FILLED, now=now)

    def end_job(self, done: WriteDone, now: float) -> Outbox:
        """Every rank has ended this job, well or not. The caller moves its outbox on."""
        outbox, num_pages = self._jobs.pop(done.job)
        outbox.num_open -= 1
        outbox.num_written += num_pages if done.error is None else 0
        outbox.digest = (outbox.digest + (done.digest or 0)) % DIGESTS
        self._set_deadline(outbox, now)
        return outbox

    def move(self, outbox: Outbox, event: Event, *, now: float) -> list[Effect]:
        """Let `event` happen, and DRAINED too if nothing is under way."""
        before = outbox.state
        outbox.state, todo = handoff.step(OUTBOX, before, event)
        if outbox.life is None:  # nobody was promised anything, and nobody will answer
            outbox.state, _ = handoff.step(OUTBOX, outbox.state, Event.HEARD)
        if outbox.state is not before:
            self._set_deadline(outbox, now)
        effects: list[Effect] = []
        for effect in todo:
            effects += self._do(outbox, effect, now=now)
        if outbox.is_said:
            outbox.remind_at = now + self._settings.deadlines.remind_s
        if outbox.state is OutboxState.DONE:
            self._outboxes.pop(outbox.request.handle, None)
        elif event is not Event.DRAINED:
            effects += self.settle(outbox, now)
        return effects

    def settle(self, outbox: Outbox, now: float) -> list[Effect]:
        """Let DRAINED happen if nothing is under way."""
        return [] if outbox.num_open else self.move(outbox, Event.DRAINED, now=now)

    def check(self) -> None:
        for outbox in self._outboxes.values():
            num_open = sum(job.outbox is outbox for job in self._jobs.values())
            assert outbox.num_open == num_open, f"{outbox.request.handle} counts {outbox.num_open} of {num_open}"
        for job, (outbox, _) in self._jobs.items():
            handle = outbox.request.handle
            assert self._outboxes.get(handle) is outbox, f"job {job} of {handle} outlived its handoff"
            assert outbox.request.table.pages, f"job {job} of {handle} reads pages that were given back"

    def _job(self, outbox: Outbox, ticket: Ticket, start: int, *, stop: int) -> WriteJob:
        """The next, of tokens that were not sent."""
        self.last_job += 1
        size, held = self._settings.page_size, ticket.held_tokens
        ours = outbox.request.table.pages[start // size : num_pages_for(stop, size)]
        theirs = ticket.pages[(start - held) // outbox.page_size : num_pages_for(stop - held, outbox.page_size)]
        return WriteJob(self.last_job, ticket.decode, start, stop, tuple(ours), theirs, ticket.verifies)

    def _set_deadline(self, outbox: Outbox, now: float) -> None:
        deadlines = self._settings.deadlines
        match outbox.state:
            case OutboxState.DRAINING | OutboxState.DIGESTING:
                outbox.deadline = now + deadlines.draining_s
            case OutboxState.STOPPING | OutboxState.ABANDONED:
                outbox.deadline = now + deadlines.stopping_s
            case OutboxState.HOLDING:
                outbox.deadline = now + deadlines.holding_s
            case OutboxState.OFFERED:
                outbox.deadline = now + deadlines.lease_s
            case OutboxState.LANDED | OutboxState.FENCED:
                outbox.deadline = now + deadlines.heard_s
            case OutboxState.WITHDRAWN:
                pass  # what is left of the lease
            case OutboxState.QUEUED | OutboxState.COMPUTING | OutboxState.DONE:
                outbox.deadline = None  # the request's own
            case _:
                assert_never(outbox.state)

    def _do(self, outbox: Outbox, effect: handoff.Effect, *, now: float) -> list[Effect]:
        request, life, lease_s = outbox.request, outbox.life, self._settings.deadlines.lease_s
        if effect is handoff.Effect.FREE:
            self._flight.release(request.table, request.last_step)
            return []
        if life is None:
            assert effect is handoff.Effect.SEND_FENCED, f"{effect} without a ticket"
            return []  # nobody was promised anything
        match effect:
            case handoff.Effect.SEND_LANDED:
                assert outbox.first is not None, f"{request.handle} drained before its first token"
                num_tokens, digest = len(request.tokens), _digest_of(outbox)
                landed = Landed(request.handle, num_tokens, outbox.first, outbox.num_written, digest)
                said = Send(life.name, landed)
                is_news = outbox.remind_at == math.inf
                return [said, Stamp(str(request.handle), "drained", f"to {life.name}")] if is_news else [said]
            case handoff.Effect.SEND_FENCED:
                return [Send(life.name, Fenced(request.handle, outbox.reason))]
            case handoff.Effect.SEND_AHEAD:
                pages = _pages_to_read(outbox, outbox.num_told, self._settings.page_size)
                return [Send(life.name, Ahead(request.handle, outbox.num_told, pages))]
            case handoff.Effect.SEND_READY:
                ready = _ready(outbox, self._settings.page_size, lease_s)
                return [Send(life.name, ready), Stamp(str(request.handle), "offered")]
            case handoff.Effect.DIGEST:
                assert outbox.ticket is not None, f"{request.handle} is offered to nobody"
                job = self._job(outbox, outbox.ticket, outbox.num_sent, stop=len(request.tokens))
                return [Order(self.digests.begin(outbox, job))]
            case handoff.Effect.SEND_RENEWED:
                outbox.deadline = now + lease_s
                return [Send(life.name, Renewed(request.handle, outbox.renewed_at))]
            case handoff.Effect.SEVER:
                outbox.deadline = now + self._settings.deadlines.stopping_s
                return self._links.cut(life)
            case _:
                raise AssertionError(f"{effect} is not for the writing end")


def _ready(outbox: Outbox, page_size: int, lease_s: float) -> Ready:
    request, num_tokens = outbox.request, len(outbox.request.tokens)
    assert outbox.first is not None, f"{request.handle} is offered too early"
    pages = _pages_to_read(outbox, num_tokens, page_size)
    return Ready(request.handle, num_tokens, outbox.first, pages, lease_s, _digest_of(outbox))


def _pages_to_read(outbox: Outbox, stop: int, page_size: int) -> tuple[int, ...]:
    """Of tokens before `stop` that the peer does not hold."""
    assert outbox.ticket is not None, f"{outbox.request.handle} is offered to nobody"
    return tuple(outbox.request.table.pages[outbox.ticket.held_tokens // page_size : num_pages_for(stop, page_size)])


def _digest_of(outbox: Outbox) -> int | None:
    return outbox.digest if outbox.ticket is not None and outbox.ticket.verifies else None


def offering(ticket: Ticket) -> Event:
    """What it is that all is computed which decode is to read."""
    return Event.DIGEST if ticket.verifies else Event.OFFER
