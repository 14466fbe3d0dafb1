"""A rank's compute thread: the next step is queued on the device while one runs, one ahead and no more."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from typing import cast

import torch

from pd.runtime.engine.build import Engine
from pd.runtime.roles.rank import Outbox, compute
from pd.runtime.wire.plans import StepDone, StepKind, StepPlan
from pd.runtime.wire.values import Token
from pd.transfer.layout import Shard


class Step:
    """On a device that ends it when told."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.end = threading.Event()

    def is_done(self) -> bool:
        return self.end.is_set()

    def finish(self) -> tuple[Token, ...]:
        assert self.end.wait(10)
        return (Token(self.number),)


class Slow:
    """Stands for an engine on a GPU."""

    shard = Shard(0, 1, 0, 1, 1)
    region = torch.empty(0)

    def __init__(self) -> None:
        self.launched: list[Step] = []

    def launch(self, plan: StepPlan) -> Step:
        self.launched.append(Step(plan.step))
        return self.launched[-1]


def until(claim: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not claim():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_the_next_step_is_queued_as_soon_as_its_plan_comes_and_ends_are_told_in_order() -> None:
    engine, outbox = Slow(), Outbox()
    told: list[object] = []
    plans: queue.SimpleQueue[StepPlan | None] = queue.SimpleQueue()
    thread = threading.Thread(
        target=compute, args=(cast(Engine, engine), plans, outbox), kwargs={"stream_layers": None}
    )
    thread.start()
    plans.put(StepPlan(0, StepKind.DECODE))
    until(lambda: len(engine.launched) == 1)
    time.sleep(0.01)  # it waits for the end by now
    plans.put(StepPlan(1, StepKind.DECODE))
    until(lambda: len(engine.launched) == 2)
    assert not engine.launched[0].is_done() and outbox.drain() == []
    plans.put(StepPlan(2, StepKind.DECODE))
    time.sleep(0.01)
    assert len(engine.launched) == 2, "no more than one behind the one that runs"
    for number in range(3):
        until(lambda number=number: len(engine.launched) > number)
        engine.launched[number].end.set()
        until(lambda: (told.extend(outbox.drain()) or len(told)) > number)  # noqa: B023
    plans.put(None)
    thread.join(10)
    assert [(done.step, done.tokens[0].id) for done in told if isinstance(done, StepDone)] == [(0, 0), (1, 1), (2, 2)]
