"""Requests that decode: slots, growth page by page, tokens to the router. Pure.

Rules
1. `running` is in order of age. Pages go to the oldest first; when there are none, the youngest gives way.
2. The oldest never gives way, so it ends; then the next is the oldest. So all end.
3. A younger one that finds no page waits: it keeps what it has until an older one needs it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator

from pd.runtime.core.events import ROUTER, Effect, Send, Stamp
from pd.runtime.core.flight import Flight
from pd.runtime.core.prefix import PrefixCache
from pd.runtime.core.request import Phase, Request
from pd.runtime.core.settings import BrainSettings
from pd.runtime.core.step import Step, add_decodes, admit
from pd.runtime.wire.messages import Failed, Progress, Tokens
from pd.runtime.wire.values import Finish, Handle, Stage, Token

GiveWay = Callable[[], list[Effect] | None]
"""Preempt the youngest request that is still computing its prompt; None if there is none."""


class DecodePart:
    def __init__(self, settings: BrainSettings, pages: PrefixCache, flight: Flight) -> None:
        self._settings = settings
        self._pages = pages
        self._flight = flight
        self.ready: OrderedDict[Handle, Request] = OrderedDict()
        self.running: dict[Handle, Request] = {}
        self.num_stalled = 0  # running requests that found no page for their next token

    def __iter__(self) -> Iterator[Request]:
        yield from self.running.values()
        yield from self.ready.values()

    @property
    def headroom(self) -> int:
        """Pages that newcomers must leave, so that those who run can grow. All of them, while one cannot."""
        if self.num_stalled:
            return self._settings.num_pages
        return min(len(self.running) + len(self.ready), self._settings.num_pages // 8)

    def land(self, request: Request, token: Token) -> list[Effect]:
        """All KV of `request` but the first token's is here, and its pages are ours."""
        finish = request.take(token.id)
        if finish is not None:  # prefill's limits allowed more: no token follows, but an ending
            end = Progress(request.handle, request.num_tokens, (), finish)
            return [Send(ROUTER, Tokens((end,))), *self.finish(request, finish)]
        request.tokens = (*request.tokens, token.id)
        request.generated.clear()
        self.ready[request.handle] = request
        return [Stamp(str(request.handle), "landed")]

    def join(self, request: Request) -> None:
        """Its last chunk is planned here: it decodes from the next step on."""
        request.move(Phase.RUNNING)
        self.running[request.handle] = request

    def fill(self, step: Step, give_way: GiveWay) -> list[Effect]:
        """Plan one token for each request that can have one."""
        effects: list[Effect] = []

        def grow(request: Request) -> tuple[int, ...] | None:
            return self._grow(request, give_way, effects=effects)

        self.num_stalled = add_decodes(step, list(self.running.values()), grow)
        newcomers = [] if self.num_stalled else self._admit(step)
        self.num_stalled += add_decodes(step, newcomers, grow)
        return effects

    def report(self, step: Step, tokens: tuple[Token, ...]) -> list[Effect]:
        """The tokens of `step`'s decodes, to the router in one message."""
        progress: list[Progress] = []
        ended: list[tuple[Request, Finish]] = []
        for request, token in zip(step.decodes, tokens, strict=True):
            if request.phase is Phase.ENDED:  # found out while this step was in flight
                continue
            position = request.num_tokens
            finish = request.take(token.id)
            progress.append(Progress(request.handle, position, (token,), finish))
            if finish is not None:
                ended.append((request, finish))
        effects: list[Effect] = [Send(ROUTER, Tokens(tuple(progress)))] if progress else []
        for request, finish in ended:
            effects += self.finish(request, finish)
        return effects

    def finish(self, request: Request, finish: Finish) -> list[Effect]:
        """`request` has its last token, and the router was told."""
        self._end(request)
        return [Stamp(str(request.handle), "finished", finish.value)]

    def cancel(self, handle: Handle) -> bool:
        """Whether it was here."""
        request = self.running.get(handle) or self.ready.get(handle)
        if request is None:
            return False
        self._end(request)
        return True

    def _admit(self, step: Step) -> list[Request]:
        admitted = []
        while self.ready and self._flight.num_free_slots:
            handle, request = self.ready.popitem(last=False)
            admit(step, request, self._flight.take_slot())
            request.move(Phase.RUNNING)
            self.running[handle] = request
            admitted.append(request)
        return admitted

    def _grow(self, request: Request, give_way: GiveWay, *, effects: list[Effect]) -> tuple[int, ...] | None:
        while (pages := self._pages.grow(request.table, 1)) is None:
            if self._flight.holds_pages:
                return None
            preempted = give_way() or self._preempt_younger(request)
            if preempted is None:
                effects += self._fail_if_hopeless(request)
                return None
            effects += preempted
        request.capacity += self._settings.page_size
        return pages

    def _preempt_younger(self, request: Request) -> list[Effect] | None:
        """Preempt the youngest, unless that is `request` itself."""
        victim = next(reversed(self.ready.values()), None) or next(reversed(self.running.values()))
        if victim is request:
            return None
        return self._fail(victim, f"preempted: no page left for {request.handle}, which is older")

    def _fail_if_hopeless(self, request: Request) -> list[Effect]:
        """It has every page that is not quarantined and needs one more."""
        if len(request.table.pages) + self._pages.pool.num_quarantined < self._settings.num_pages:
            return []
        return self._fail(request, f"no page left: {self._pages.pool.num_quarantined} are quarantined")

    def _fail(self, request: Request, reason: str) -> list[Effect]:
        self._end(request)
        failed = Failed(request.handle, Stage.DECODE, reason, retryable=True)
        return [Send(ROUTER, failed), Stamp(str(request.handle), "preempted", reason)]

    def _end(self, request: Request) -> None:
        self.running.pop(request.handle, None)
        self.ready.pop(request.handle, None)
        self._release(request)

    def _release(self, request: Request) -> None:
        self._flight.close(request)
        if self._settings.prefix_cache and request.generated:  # what was sampled from is computed
            self._pages.insert(request.table, (*request.tokens, *request.generated), request.num_tokens - 1)
        self._flight.release(request.table, request.last_step)
