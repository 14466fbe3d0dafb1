"""The parts of an instance's brain, joined by role over one pool: steps out, and what the ranks answer. Pure.

Inboxes ─ landed ─► DecodePart ─────────────────────┐
PrefillPart ─ onward (colocated) ─► DecodePart ─────┼─► Flight ─ plans ─► ranks
     └─ Outboxes ─ jobs on the plans ───────────────┘
"""

from __future__ import annotations

from pd.runtime.core.decode import DecodePart
from pd.runtime.core.events import Effect, Exit, Peer, Stamp
from pd.runtime.core.flight import Flight
from pd.runtime.core.inbox import Inboxes
from pd.runtime.core.lives import Lives
from pd.runtime.core.pages import PagePool, PageTable
from pd.runtime.core.prefill import PrefillPart
from pd.runtime.core.prefix import PrefixCache
from pd.runtime.core.ranks import Tally
from pd.runtime.core.request import Request
from pd.runtime.core.settings import BrainSettings
from pd.runtime.wire.messages import (
    AnyMessage,
    Handle,
    Hello,
    Load,
    PeerUnreachable,
    Role,
    Severed,
    Stage,
    StepDone,
    WriteDone,
)


class Parts:
    """`decode` where tokens follow the first, `prefill` where prompts are computed, `inboxes` where KV lands."""

    def __init__(self, settings: BrainSettings, role: Role, me: Peer) -> None:
        self._settings = settings
        self._pages = PrefixCache(PagePool(settings.num_pages), settings.page_size, enabled=settings.prefix_cache)
        self._flight = Flight(self._pages, num_slots=settings.step.max_running)
        self._tally = Tally(settings.num_ranks)
        self._lives = Lives(settings.deadlines.vanished_s)
        self.decode: DecodePart | None = None
        self.prefill: PrefillPart | None = None
        self.inboxes: Inboxes | None = None
        if role is not Role.PREFILL:
            self.decode = DecodePart(settings, self._pages, self._flight)
        if role is not Role.DECODE:
            self.prefill = PrefillPart(settings, me, pages=self._pages, flight=self._flight, onward=self.decode)
        if role is Role.DECODE and self.decode is not None:
            self.inboxes = Inboxes(settings, me, pages=self._pages, lives=self._lives, decode=self.decode)

    def plan(self, now: float) -> list[Effect]:
        """Launch what can be launched."""
        effects: list[Effect] = []
        while self._flight.has_room:
            step = self._flight.draft()
            if self.decode is not None:
                effects += self.decode.fill(step, lambda: self._give_way(now))
            if self.prefill is not None:
                effects += self.prefill.fill(step, now)
            launch = self._flight.launch(step, now)
            if launch is None:
                break
            effects.append(launch)
        return effects

    def hear_rank(self, rank: int, message: AnyMessage, *, now: float) -> list[Effect] | None:
        """Take a rank's answer; it counts when all ranks have given theirs. None if nobody waits for it."""
        match message:
            case StepDone() if self._flight.is_waiting_for(message.step):
                step_done = self._tally.step_done(rank, message)
                return self._step_done(step_done, now) if step_done else []
            case WriteDone() if self.prefill is not None and self.prefill.outboxes.is_open(message.job):
                write_done = self._tally.write_done(rank, message)
                return self.prefill.write_done(write_done, now) if write_done else []
            case Severed() if self.inboxes is not None and self.inboxes.was_asked(message):
                severed = self._tally.severed(rank, message)
                return self.inboxes.severed(severed, now) if severed else []
            case Severed() if self.prefill is not None:
                return []  # the jobs' own ends tell what is needed
            case PeerUnreachable() if self.prefill is not None:
                life = Peer(message.peer, message.epoch)
                return self.prefill.unreachable(life, message.reason, now=now)
            case PeerUnreachable():  # membership and deadlines tell what becomes of what was promised to it
                return [Stamp(message.peer, "unreachable", message.reason)]
            case _:
                return None

    def meet(self, peers: tuple[Hello, ...], now: float) -> list[Effect]:
        """The router's whole list of the other role's instances."""
        new, lost = self._lives.update(peers, now)
        effects = self._lose(lost, now)
        if self.prefill is not None:
            for hello in new:
                self.prefill.links.meet(hello, now)
            effects += self.prefill.links.sweep(now)
        return effects

    def cancel(self, handle: Handle, reason: str, *, now: float) -> list[Effect] | None:
        """Give up an attempt, wherever it is. None if nothing of it is here."""
        if self.decode is not None and self.decode.cancel(handle):
            return []
        for part in (self.inboxes, self.prefill):
            effects = part.cancel(handle, reason, now=now) if part is not None else None
            if effects is not None:
                return effects
        return None

    def clear_queue(self, reason: str, now: float) -> list[Effect]:
        """Fail what has not begun; the router places it elsewhere."""
        effects: list[Effect] = []
        if self.prefill is not None:
            for handle in list(self.prefill.prompts.waiting):
                effects += self.prefill.fail(handle, Stage.QUEUE, reason=reason, now=now)
        return effects

    def sweep(self, now: float) -> list[Effect]:
        """Look at all deadlines."""
        effects = self._lose(self._lives.sweep(now), now)
        for part in (self.inboxes, self.prefill):
            effects += part.sweep(now) if part is not None else []
        launched_at, step_s = self._flight.oldest_launch(), self._settings.deadlines.step_s
        if launched_at is not None and now >= launched_at + step_s:
            effects.append(Exit(f"a step is not done after {step_s:g} s: a rank hangs", failed=True))
        return effects

    def load(self) -> Load:
        num_waiting = num_tokens = 0
        if self.decode is not None:
            num_waiting += len(self.decode.ready)
        if self.inboxes is not None:
            num_waiting += self.inboxes.num_reserved
        if self.prefill is not None:
            num_waiting += len(self.prefill.prompts.waiting)
            num_tokens = self.prefill.prompts.num_waiting_tokens
        return Load(
            self._settings.step.max_running - self._flight.num_free_slots,
            num_waiting,
            self._pages.num_available,
            self._settings.num_pages,
            num_tokens,
        )

    def is_done(self) -> bool:
        """No request and no handoff is left but those whose pages are quarantined."""
        num_left = len(self._running())
        if self.decode is not None:
            num_left += len(self.decode.ready)
        if self.prefill is not None:
            num_left += len(self.prefill.prompts.waiting) + len(self.prefill.outboxes)
        if self.inboxes is not None:
            num_left += self.inboxes.num_pending
        return not num_left

    def is_idle(self) -> bool:
        """Nothing is left at all: every page is free or only in the prefix cache."""
        return self.is_done() and self._pages.num_available == self._settings.num_pages

    def check(self) -> None:
        """Raise AssertionError with what is wrong."""
        tables: dict[int, PageTable] = {}
        for table in self._tables():
            tables[id(table)] = table
        self._pages.check(tables.values())
        self._flight.check(self._running())
        if self.prefill is not None:
            self.prefill.outboxes.check()
        if self.inboxes is not None:
            self.inboxes.check()

    def _tables(self) -> list[PageTable]:
        tables = [*self._flight.tables(), *(request.table for request in self._running())]
        if self.decode is not None:
            tables += [request.table for request in self.decode.ready.values()]
        if self.prefill is not None:
            tables += [outbox.request.table for outbox in self.prefill.outboxes]
        if self.inboxes is not None:
            tables += self.inboxes.tables()
        return tables

    def _running(self) -> list[Request]:
        """Requests with a slot."""
        running = list(self.decode.running.values()) if self.decode is not None else []
        return running + (list(self.prefill.prompts.computing.values()) if self.prefill is not None else [])

    def _lose(self, lives: list[Peer], now: float) -> list[Effect]:
        effects: list[Effect] = []
        for life in lives:
            for part in (self.inboxes, self.prefill):
                effects += part.lose(life, now) if part is not None else []
        return effects

    def _step_done(self, done: StepDone, now: float) -> list[Effect]:
        effects: list[Effect] = []
        for step, answer in self._flight.finish(done):
            num_decodes = len(step.decodes)
            if self.decode is not None and num_decodes:
                effects += self.decode.report(step, answer.tokens[:num_decodes])
            if self.prefill is not None and step.prompts:
                effects += self.prefill.computed(step, answer.tokens[num_decodes:], now=now)
        return effects

    def _give_way(self, now: float) -> list[Effect] | None:
        request = self.prefill.prompts.youngest() if self.prefill is not None else None
        if self.prefill is None or request is None:
            return None
        reason = "preempted: no page left for an older request"
        return self.prefill.fail(request.handle, Stage.DECODE, reason=reason, now=now)
