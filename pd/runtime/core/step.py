"""One step: who computes which positions. Pure.

Rules
1. Decoding requests come first, one token each; prompts share what is left of the token budget, first come first
   served. A prompt always gets a token, however many decode, so that it cannot starve.
2. No position is planned whose token nobody wants: the last sampled position is `limit - 1`.
3. The slots of ended requests are given up before others take them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from pd.runtime.core.request import Phase, Request
from pd.runtime.wire.plans import Chunk, SlotInit, StepKind, StepPlan, WriteJob


@dataclass(slots=True, eq=False)
class Step:
    """A step while it is planned, and what of it must be remembered until it is done."""

    number: int
    decodes: list[Request] = field(default_factory=list)
    prompts: list[tuple[Request, int]] = field(default_factory=list)  # and the position its chunk ends before
    firsts: list[Request] = field(default_factory=list)  # those of `prompts` whose first token is sampled
    admits: list[SlotInit] = field(default_factory=list)
    chunks: list[Chunk] = field(default_factory=list)  # of `decodes`, then of `prompts`
    writes: list[WriteJob] = field(default_factory=list)
    ahead: list[WriteJob] = field(default_factory=list)  # of what was computed before: begun beside it, not after it
    launched_at: float = 0.0

    @property
    def kind(self) -> StepKind:
        if self.decodes:
            return StepKind.MIXED if self.prompts else StepKind.DECODE
        return StepKind.PREFILL if self.prompts else StepKind.IDLE

    def plan(self, retire: tuple[int, ...]) -> StepPlan:
        return StepPlan(self.number, self.kind, tuple(self.admits), tuple(self.chunks), tuple(self.writes), retire)


def admit(step: Step, request: Request, slot: int) -> None:
    """Give `request` a slot from this step on."""
    request.slot = slot
    request.last_step = step.number
    step.admits.append(SlotInit(slot, request.tokens, request.num_prompt, request.sampling, tuple(request.table.pages)))


def add_decodes(step: Step, running: Iterable[Request], grow: Callable[[Request], tuple[int, ...] | None]) -> int:
    """One token of each running request. `grow` gives pages for the next token, or None; how many got none."""
    number = step.number
    num_stalled = 0
    for request in running:
        start = request.num_computed
        stop = start + 1
        if stop >= request.limit or request.phase is Phase.ENDED:  # ended: preempted while we were at it
            continue
        pages: tuple[int, ...] = ()
        if start >= request.capacity:
            grown = grow(request)
            if grown is None:
                num_stalled += 1
                continue
            pages = grown
        slot = request.slot
        assert slot is not None
        step.chunks.append(Chunk(slot, start, stop, pages, True))
        step.decodes.append(request)
        request.num_computed = stop
        request.last_step = number
    return num_stalled


def add_chunk(step: Step, request: Request, budget: int) -> int:
    """The next tokens of a prompt, as many as `budget` allows; how many."""
    start = request.num_computed
    stop = min(len(request.tokens), start + budget)
    is_last = stop == len(request.tokens)
    assert request.slot is not None and start < stop
    step.chunks.append(Chunk(request.slot, start, stop, (), is_last))
    step.prompts.append((request, stop))
    if is_last:
        step.firsts.append(request)
    request.num_computed = stop
    request.last_step = step.number
    return stop - start
