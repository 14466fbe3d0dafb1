"""Prompts that wait for pages and a slot, and prompts being computed, chunk by chunk. Pure."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from typing import NamedTuple

from pd.runtime.core.decode import DecodePart
from pd.runtime.core.flight import Flight
from pd.runtime.core.pages import num_pages_for
from pd.runtime.core.prefix import PrefixCache
from pd.runtime.core.request import Phase, Request
from pd.runtime.core.settings import BrainSettings
from pd.runtime.core.step import Step, add_chunk, admit
from pd.runtime.wire.values import Handle


class Planned(NamedTuple):
    request: Request
    is_new: bool


class Prompts:
    """First come, first served. With `onward`, a request decodes there once its last chunk is planned."""

    def __init__(
        self, settings: BrainSettings, pages: PrefixCache, *, flight: Flight, onward: DecodePart | None
    ) -> None:
        self._settings = settings
        self._pages = pages
        self._flight = flight
        self._onward = onward
        self._blocked: tuple[Handle, int] | None = None  # the first in the queue, and pages released by then
        self.waiting: OrderedDict[Handle, Request] = OrderedDict()
        self.computing: dict[Handle, Request] = {}  # until its first token is known, or it went onward

    @property
    def is_full(self) -> bool:
        return len(self.waiting) >= self._settings.step.max_waiting

    @property
    def num_waiting_tokens(self) -> int:
        """Queued or begun, and not in a launched step."""
        waiting = sum(len(request.tokens) for request in self.waiting.values())
        return waiting + sum(each.num_tokens - each.num_computed for each in self.computing.values())

    def find(self, handle: Handle) -> Request | None:
        return self.waiting.get(handle) or self.computing.get(handle)

    def youngest(self) -> Request | None:
        """Of those that have pages."""
        return next(reversed(self.computing.values()), None)

    def end(self, request: Request, *, releases: bool) -> None:
        """Nothing more is computed for it. Without `releases` its pages are another's to give back."""
        self.waiting.pop(request.handle, None)
        self.computing.pop(request.handle, None)
        self._flight.close(request)
        if releases:
            self._flight.release(request.table, request.last_step)

    def plan(self, step: Step) -> Iterator[Planned]:
        """Add chunks to `step` in what its decodes leave of the token budget. Each request as it is added."""
        budget = max(self._settings.step.max_prefill_tokens - len(step.decodes), 1)
        for request in list(self.computing.values()):
            if budget > 0 and request.num_computed < len(request.tokens):
                budget -= self._advance(step, request, budget)
                yield Planned(request, is_new=False)
        while budget > 0 and (newcomer := self._admit(step)) is not None:
            budget -= self._advance(step, newcomer, budget)
            yield Planned(newcomer, is_new=True)

    def cache(self, step: Step) -> None:
        """`step` is done: keep the pages it filled."""
        for request, stop in step.prompts:
            if request.phase is not Phase.ENDED:
                self._pages.insert(request.table, request.tokens, stop)

    def _advance(self, step: Step, request: Request, budget: int) -> int:
        num_tokens = add_chunk(step, request, budget)
        if self._onward is not None and request.num_computed == len(request.tokens):
            del self.computing[request.handle]
            self._onward.join(request)
        return num_tokens

    def _admit(self, step: Step) -> Request | None:
        """Give the first in the queue its pages, cached ones first, and a slot; None if it has to wait."""
        request = next(iter(self.waiting.values()), None)
        if request is None or not self._flight.num_free_slots:
            return None
        if self._blocked == (request.handle, self._pages.num_released):
            return None
        table = self._pages.match(request.tokens)
        num_cached = len(table.pages) * self._settings.page_size
        headroom = self._onward.headroom if self._onward is not None else 0
        num_pages = num_pages_for(self._num_tokens(request), self._settings.page_size) - len(table.pages)
        if num_pages + headroom > self._pages.num_available or self._pages.grow(table, num_pages) is None:
            self._pages.release(table)
            self._blocked = (request.handle, self._pages.num_released)
            return None
        request.table = table
        request.num_cached = request.num_computed = num_cached
        request.capacity = len(table.pages) * self._settings.page_size
        del self.waiting[request.handle]
        request.move(Phase.COMPUTING)
        self.computing[request.handle] = request
        admit(step, request, self._flight.take_slot())
        return request

    def _num_tokens(self, request: Request) -> int:
        """That need pages from the start: with the first decoded one, where it is decoded here."""
        num_tokens = len(request.tokens)
        if self._onward is None:
            return num_tokens
        return max(num_tokens, min(num_tokens + 1, request.limit - 1))
