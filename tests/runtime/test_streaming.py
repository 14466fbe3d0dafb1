"""Writes by groups of layers: each group goes when its KV is there, and a job ends once, with the last."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import msgspec
import pytest
import torch

from pd.runtime.engine.runner import Launched
from pd.runtime.roles.streaming import Arrivals, Grouped, Streamer, layer_groups
from pd.runtime.wire.plans import FromRank, StepKind, StepPlan, WriteDone, WriteJob
from pd.transfer.float8 import cast
from pd.transfer.layout import DEFAULT_ORDER, KVLayout
from pd.transfer.memory import MemoryHub
from pd.transfer.reshard import DTYPES
from tests.runtime.test_packing import LAYERS_FIRST, NUM_PAGES, Side

CPU = torch.device("cpu")


def polled(side: Side) -> list[FromRank]:
    return [answer for _ in range(200) for mover in side.movers for answer in mover.poll()]


def streamed(side: Side, job: WriteJob, group: int) -> list[FromRank]:
    return [answer for mover in side.movers for answer in mover.stream(job, group)] + polled(side)


@pytest.mark.parametrize("seed", range(30))
def test_layers_arrive_group_by_group_and_all_of_them_once_the_job_is_done(seed: int) -> None:
    rng = random.Random(seed)
    torch.manual_seed(seed)
    theirs = KVLayout(
        rng.randint(1, 5), rng.choice((2, 4)), 4, rng.choice((2, 4)), rng.choice(list(DTYPES)),
        order=rng.choice((DEFAULT_ORDER, LAYERS_FIRST)),
    )  # fmt: skip
    ours = replace(theirs, page_size=rng.choice((2, 4)), dtype=rng.choice(list(DTYPES)))
    hub, size = MemoryHub(), rng.randint(1, 6)
    move = "auto" if ours.dtype != theirs.dtype else rng.choice(("direct", "packed"))
    source = Side(hub, "p", theirs, tp=rng.randint(1, 6), move=move, stream_layers=size)
    sink = Side(hub, "d", ours, tp=rng.randint(1, 6), move=move)
    for mover in source.movers:
        assert mover.attach(sink.order()) == []
    num_tokens = rng.randint(1, NUM_PAGES * min(theirs.page_size, ours.page_size))
    src_pages = tuple(rng.sample(range(NUM_PAGES), -(-num_tokens // theirs.page_size)))
    dst_pages = tuple(rng.sample(range(NUM_PAGES), -(-num_tokens // ours.page_size)))
    truth = [torch.randn(num_tokens, theirs.num_kv_heads, theirs.num_layers, dim) for dim in theirs.head_dims]
    job = WriteJob(7, "d", 0, num_tokens, src_pages, dst_pages, is_digested=rng.random() < 0.5)
    groups = layer_groups(range(theirs.num_layers), size)
    for number, layers in enumerate(groups):
        computed = [rows.clone() for rows in truth]
        for rows in computed:
            rows[:, :, layers.stop :] = 99.0  # not computed yet: it must not be what lands in the end
        source.fill(computed, src_pages)
        answers = streamed(source, job, number)
        is_last = number == len(groups) - 1
        done = [(answer.job, answer.error) for answer in answers if isinstance(answer, WriteDone)]
        assert done == ([(7, None)] * len(source.movers) if is_last else []), f"seed {seed}: group {number}"
        for rank, shard in enumerate(sink.shards):
            for got, rows in zip(sink.tokens(rank, dst_pages, num_tokens), truth, strict=True):
                sent = cast(rows[:, shard.head_start : shard.head_stop], DTYPES[theirs.dtype])
                due = cast(sent.float(), DTYPES[ours.dtype]).float()
                assert torch.equal(got[:, :, : layers.stop], due[:, :, : layers.stop]), f"seed {seed}: {layers}"
                assert not got[:, :, layers.stop :].any(), f"seed {seed}: a layer came before its turn"


LAYOUT = KVLayout(3, 2, 4, 4, "float32")
JOB = WriteJob(7, "d", 0, 4, (0,), (0,))


def pair() -> tuple[Side, Side]:
    hub = MemoryHub()
    return Side(hub, "p", LAYOUT, tp=1, move="direct", stream_layers=1), Side(hub, "d", LAYOUT, tp=2, move="direct")


def test_a_group_that_cannot_be_given_fails_the_job_once_at_its_end() -> None:
    source, sink = pair()
    (mover,) = source.movers
    mover.attach(sink.order())
    assert streamed(source, JOB, 0) == []
    mover.transport.sever("d.e.1")
    assert streamed(source, JOB, 1) == []
    (answer,) = streamed(source, JOB, 2)
    assert isinstance(answer, WriteDone) and (answer.job, answer.error) == (7, "unknown peer d.e.1")


def test_a_job_to_nobody_is_answered_once() -> None:
    source, _ = pair()
    assert streamed(source, JOB, 0) + streamed(source, JOB, 1) == []
    assert streamed(source, JOB, 2) == [WriteDone(7, "peer d is not attached", 0, 0.0)]


def test_two_jobs_of_a_step_are_streamed_side_by_side() -> None:
    source, sink = pair()
    source.movers[0].attach(sink.order())
    other = msgspec.structs.replace(JOB, job=8, src_pages=(1,), dst_pages=(1,))
    ended = []
    for group in range(3):
        for job in (JOB, other):
            ended += [answer.job for answer in streamed(source, job, group) if isinstance(answer, WriteDone)]
    assert ended == [7, 8]


# ---- the compute thread ---------------------------------------------------------------------------------------------


@dataclass
class Engine:
    """Of five layers, or (None) one that replays what was captured."""

    num_layers: int | None
    log: list[str] = field(default_factory=list)

    def launch(self, plan: StepPlan, on_kv: Callable[[int], None] | None = None) -> Launched:
        for layer in range(self.num_layers or 0):
            self.log.append(f"layer {layer}")
            if on_kv is not None:
                on_kv(layer)
        self.log.append("end")
        return Launched(None, None)


@pytest.mark.parametrize(
    ("num_layers", "log"),
    [
        (5, "layer 0,layer 1,group 0,layer 2,layer 3,group 1,layer 4,group 2,end"),
        (None, "end,group 0,group 1,group 2"),
    ],
)
def test_each_group_is_told_once_as_soon_as_its_last_layer_is_written(num_layers: int | None, log: str) -> None:
    engine = Engine(num_layers)
    plan = StepPlan(1, StepKind.PREFILL, writes=(JOB,))

    def tell(grouped: Grouped) -> None:
        assert grouped.jobs == (JOB,) and grouped.is_there()
        engine.log.append(f"group {grouped.group}")

    Streamer(engine, layer_groups(range(5), 2), tell, CPU).launch(plan)
    assert ",".join(engine.log) == log


class Event:
    def __init__(self) -> None:
        self.has_happened = False

    def query(self) -> bool:
        return self.has_happened


def test_groups_wait_for_the_device_and_keep_their_order() -> None:
    first, second = Event(), Event()
    arrivals = Arrivals()
    for group, event in enumerate((first, second)):
        arrivals.add(Grouped((JOB,), group, event))  # type: ignore[arg-type]
    second.has_happened = True
    assert list(arrivals.take()) == [] and arrivals.is_waiting
    first.has_happened = True
    assert [grouped.group for grouped in arrivals.take()] == [0, 1] and not arrivals.is_waiting
