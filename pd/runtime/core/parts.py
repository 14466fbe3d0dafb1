"""The parts of an instance's brain by role, over one pool and one set of slots. Pure.

Inboxes ─ landed ─► DecodePart ─────────────────────┐
PrefillPart ─ onward (colocated) ─► DecodePart ─────┼─► Flight ─ plans ─► ranks
     └─ Outboxes ─ jobs on the plans ───────────────┘
"""

from __future__ import annotations

from collections.abc import Iterable

from pd.runtime.core.decode import DecodePart
from pd.runtime.core.events import Peer
from pd.runtime.core.flight import Flight
from pd.runtime.core.inbox import Inboxes
from pd.runtime.core.lives import Links
from pd.runtime.core.offers import Offers
from pd.runtime.core.outbox import Outboxes
from pd.runtime.core.pages import PagePool, PageTable
from pd.runtime.core.prefill import PrefillPart
from pd.runtime.core.prefix import PrefixCache
from pd.runtime.core.prompts import Prompts
from pd.runtime.core.reads import Reads
from pd.runtime.core.request import Request
from pd.runtime.core.settings import BrainSettings
from pd.runtime.wire.values import Handle, Load, Role
from pd.transfer.handoff import InboxState


class Parts:
    """`decode` where tokens follow the first, `prefill` where prompts are computed, `inboxes` where KV lands."""

    def __init__(self, settings: BrainSettings, role: Role, me: Peer) -> None:
        self._settings = settings
        self.pages = PrefixCache(PagePool(settings.num_pages), settings.page_size, enabled=settings.prefix_cache)
        self.flight = Flight(self.pages, num_slots=settings.step.max_running)
        self.links = Links(settings.deadlines.attach_s)
        self.decode: DecodePart | None = None
        self.prefill: PrefillPart | None = None
        self.offers: Offers | None = None
        self.inboxes: Inboxes | None = None
        self.reads: Reads | None = None
        if role is not Role.PREFILL:
            self.decode = DecodePart(settings, self.pages, self.flight)
        if role is not Role.DECODE:
            outboxes = Outboxes(settings, self.flight, self.links)
            self.prefill = PrefillPart(
                settings,
                me,
                prompts=Prompts(settings, self.pages, flight=self.flight, onward=self.decode),
                outboxes=outboxes,
                links=self.links,
                onward=self.decode,
            )
            self.offers = Offers(settings, me, prefill=self.prefill, outboxes=outboxes, links=self.links)
        if role is Role.DECODE and self.decode is not None:
            self.inboxes = Inboxes(settings, me, pages=self.pages, links=self.links, decode=self.decode)
            self.reads = Reads(settings, self.inboxes, self.links)

    @property
    def has_work(self) -> bool:
        """A step could do something: most events find nothing, and that must cost nothing."""
        decode, prefill = self.decode, self.prefill
        if self.flight.is_retiring or (decode is not None and (decode.running or decode.ready or decode.num_stalled)):
            return True
        return prefill is not None and bool(prefill.prompts.waiting or prefill.prompts.computing)

    def load(self) -> Load:
        num_waiting = num_tokens = 0
        if self.decode is not None:
            num_waiting += len(self.decode.ready)
        if self.inboxes is not None:
            num_waiting += sum(inbox.is_wanted for inbox in self.inboxes)
        if self.prefill is not None:
            num_waiting += len(self.prefill.prompts.waiting)
            num_tokens = self.prefill.prompts.num_waiting_tokens
        return Load(
            self._settings.step.max_running - self.flight.num_free_slots,
            num_waiting,
            self.pages.num_available,
            self._settings.num_pages,
            num_tokens,
        )

    def held(self) -> dict[Handle, None]:
        """Attempts that are served here; not those that were given up, and whose pages wait for a peer or a rank."""
        handles: dict[Handle, None] = {}  # a set in order
        if self.decode is not None:
            handles |= dict.fromkeys(request.handle for request in self.decode)
        if self.inboxes is not None:
            handles |= dict.fromkeys(inbox.reserve.handle for inbox in self.inboxes if inbox.is_wanted)
        if self.prefill is not None:
            handles |= dict.fromkeys((*self.prefill.prompts.waiting, *self.prefill.prompts.computing))
            handles |= dict.fromkeys(box.request.handle for box in self.prefill.outboxes if not box.is_over)
        return handles

    def is_done(self) -> bool:
        """No request and no handoff is left but those whose pages are quarantined."""
        num_left = len(self._running())
        if self.decode is not None:
            num_left += len(self.decode.ready)
        if self.prefill is not None:
            num_left += len(self.prefill.prompts.waiting) + len(self.prefill.outboxes)
        if self.inboxes is not None:
            num_left += sum(inbox.state is not InboxState.QUARANTINED for inbox in self.inboxes)
        return not num_left

    def is_idle(self) -> bool:
        """Nothing is left at all: every page is free or only in the prefix cache."""
        return self.is_done() and self.pages.num_available == self._settings.num_pages

    def check(self, reachable: Iterable[int]) -> None:
        """Raise AssertionError with the invariant that is broken."""
        running = self._running()
        tables: dict[int, PageTable] = {id(table): table for table in self._tables(running)}
        self.pages.check(tables.values())
        self.flight.check(running)
        if self.prefill is not None:
            self.prefill.outboxes.check()
        if self.inboxes is not None:
            self.inboxes.check()
        for page in reachable:
            assert self.pages.pool.is_kept(page), f"page {page} is free, and a peer may still write it"

    def _tables(self, running: list[Request]) -> list[PageTable]:
        tables = [*self.flight.tables(), *(request.table for request in running)]
        if self.decode is not None:
            tables += [request.table for request in self.decode.ready.values()]
        if self.prefill is not None:
            tables += [outbox.request.table for outbox in self.prefill.outboxes]
        if self.inboxes is not None:
            tables += [inbox.table for inbox in self.inboxes if inbox.state is not InboxState.QUARANTINED]
        return tables

    def _running(self) -> list[Request]:
        """Requests with a slot."""
        running = list(self.decode.running.values()) if self.decode is not None else []
        return running + (list(self.prefill.prompts.computing.values()) if self.prefill is not None else [])
