"""The steps in flight, the slots they name, and the pages that wait for them. Pure.

plan n   launched ─────────────── done on all ranks
plan n+1      launched ─────────────────────────── done on all ranks
                   ▲ n's tokens are known here: a slot that ended is named by n+1 all the same, so
                     its pages are free after n+1 and its slot is given up in n+2
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from pd.runtime.core.events import Launch
from pd.runtime.core.pages import PageTable
from pd.runtime.core.prefix import PrefixCache
from pd.runtime.core.request import Phase, Request
from pd.runtime.core.step import Step
from pd.runtime.wire.plans import StepDone

MAX_STEPS = 2
"""One computes while the next is already with the ranks; more would only delay newcomers."""


class Flight:
    def __init__(self, pages: PrefixCache, *, num_slots: int) -> None:
        self._pages = pages
        self._num_slots = num_slots
        self._free_slots = list(range(num_slots - 1, -1, -1))
        self._retiring: list[int] = []  # free for the next plan, which begins by giving them up
        self._steps: deque[Step] = deque()
        self._done: dict[int, StepDone] = {}  # ahead of an earlier step
        self._held: list[tuple[int, PageTable]] = []  # free once that step is done
        self._last_number = 0
        self._num_done = 0

    @property
    def has_room(self) -> bool:
        return len(self._steps) < MAX_STEPS

    @property
    def is_retiring(self) -> bool:
        """Slots wait to be given up."""
        return bool(self._retiring)

    @property
    def num_free_slots(self) -> int:
        return len(self._free_slots)

    @property
    def holds_pages(self) -> bool:
        """Pages will come back without anyone's doing."""
        return bool(self._held)

    def oldest_launch(self) -> float | None:
        """When the step began that is waited for."""
        return self._steps[0].launched_at if self._steps else None

    def take_slot(self) -> int:
        return self._free_slots.pop()

    def draft(self) -> Step:
        """The next step, empty."""
        return Step(self._last_number + 1)

    def launch(self, step: Step, now: float) -> Launch | None:
        """Send `step` off. None if it says nothing: no chunk, and nothing to give up that cannot wait."""
        if not step.chunks and (self._steps or not self._retiring):
            return None
        retire = tuple(self._retiring)
        self._retiring.clear()
        self._last_number = step.number
        step.launched_at = now
        self._steps.append(step)
        return Launch(step.plan(retire))

    def is_waiting_for(self, number: int) -> bool:
        return self._num_done < number <= self._last_number and number not in self._done

    def finish(self, done: StepDone) -> Iterator[tuple[Step, StepDone]]:
        """Steps that are now done, in their order, with their answers."""
        self._done[done.step] = done
        while self._steps and self._steps[0].number in self._done:
            step = self._steps.popleft()
            self._num_done = step.number
            for number, table in self._held:
                if number <= self._num_done:
                    self._pages.release(table)
            self._held = [(number, table) for number, table in self._held if number > self._num_done]
            yield step, self._done.pop(step.number)

    def close(self, request: Request) -> None:
        """`request` ends: its slot is given up. Its pages are `release`d apart, by whoever still uses them."""
        request.move(Phase.ENDED)
        if request.slot is not None:
            self._retiring.append(request.slot)
            self._free_slots.append(request.slot)
            request.slot = None

    def release(self, table: PageTable, last_step: int) -> None:
        """Give pages back as soon as no launched step touches them."""
        if not table.pages:
            return
        if last_step <= self._num_done:
            self._pages.release(table)
        else:
            self._held.append((last_step, table))

    def tables(self) -> Iterator[PageTable]:
        """The tables held here."""
        return (table for _, table in self._held)

    def check(self, running: list[Request]) -> None:
        """Raise AssertionError if a slot is shared or lost, or a step in flight names pages that somebody gave back."""
        slots = [request.slot for request in running]
        free = self._free_slots
        assert None not in slots, "a running request has no slot"
        assert len(set(slots)) == len(slots) and not set(slots) & set(free), f"slots shared: {slots}, free {free}"
        assert len(slots) + len(free) == self._num_slots, f"slots lost: {slots} and {free} of {self._num_slots}"
        for step in self._steps:
            for request in [*step.decodes, *(request for request, _ in step.prompts)]:
                pages = request.table.pages
                assert pages, f"step {step.number} writes {request.handle}, whose pages were given back"
                assert self._pages.pool.are_referenced(pages), f"step {step.number} writes free pages"
