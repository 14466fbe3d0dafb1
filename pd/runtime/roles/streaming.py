"""A step's writes by groups of layers: a group's KV is on its way while the layers after it still compute.

    compute thread   layers 0-7 │ layers 8-15 │ layers 16-23 │ … sample
    I/O thread                  └ group 0 ──►  └ group 1 ──►  └ group 2 ──►       a job ends with its last group

A job stays what it was for the leader: open from the launch of its plan until every rank has ended all of it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import torch

from pd.runtime.engine.runner import Launched
from pd.runtime.wire.plans import StepPlan, WriteJob


def layer_groups(layers: range, size: int | None) -> tuple[range, ...]:
    """Cut into groups of `size` layers; the last may be smaller. None: no groups are made."""
    if size is None:
        return ()
    return tuple(layers[start : start + size] for start in range(0, len(layers), size))


class Grouped(NamedTuple):
    """From the compute thread: this group of the jobs' KV is in the pool, or will be at the event."""

    jobs: tuple[WriteJob, ...]
    group: int
    event: torch.cuda.Event | None

    def is_there(self) -> bool:
        return self.event is None or bool(self.event.query())  # type: ignore[no-untyped-call]


class Launches(Protocol):
    """An engine."""

    def launch(self, plan: StepPlan, on_kv: Callable[[int], None] | None = None) -> Launched: ...


@dataclass(frozen=True, slots=True)
class Streamer:
    """Of the compute thread. `tell` takes groups to the I/O thread, in order."""

    engine: Launches
    groups: tuple[range, ...]  # of the rank's layers, counted from its first
    tell: Callable[[Grouped], None]
    device: torch.device

    def launch(self, plan: StepPlan) -> Launched:
        """Launch it, and tell of each group of layers whose KV is written, or queued to be."""
        left = deque(enumerate(self.groups))

        def on_kv(layer: int) -> None:
            if left and layer + 1 >= left[0][1].stop:
                self.tell(Grouped(plan.writes, left.popleft()[0], self._event()))

        launched = self.engine.launch(plan, on_kv)
        while left:  # a captured step calls nobody between its layers
            self.tell(Grouped(plan.writes, left.popleft()[0], self._event()))
        return launched

    def _event(self) -> torch.cuda.Event | None:
        if self.device.type != "cuda":
            return None
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        return event


@dataclass(slots=True)
class Arrivals:
    """Of the I/O thread: groups in their order, given out when their KV is there."""

    _waiting: deque[Grouped] = field(default_factory=deque)

    @property
    def is_waiting(self) -> bool:
        """For a device. Nothing wakes the thread then: it has to look."""
        return bool(self._waiting)

    def add(self, grouped: Grouped) -> None:
        self._waiting.append(grouped)

    def take(self) -> Iterator[Grouped]:
        """What is there by now."""
        while self._waiting and self._waiting[0].is_there():
            yield self._waiting.popleft()
