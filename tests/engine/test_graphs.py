"""Decode graphs: a step is copied into its bucket, padded with rows that do nothing, and comes back as its own rows."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from pd.runtime.engine.graphs import BUCKETS, Captured, DecodeGraphs
from pd.runtime.engine.inputs import Slots, StepInputs
from pd.runtime.wire.plans import Chunk, SlotInit
from pd.runtime.wire.values import Sampling

CPU = torch.device("cpu")
PAGE, MAX_LEN = 4, 64


class Repeating:
    """A capture that computes anew when it is replayed, into the memory of the first time."""

    def __init__(self) -> None:
        self.num_replays = 0

    def __call__(self, work: Callable[[], Tensor]) -> Captured:
        hidden_BI = work()

        def replay() -> None:
            self.num_replays += 1
            hidden_BI.copy_(work())

        return Captured(replay, hidden_BI)


def forward(inputs: StepInputs) -> Tensor:
    """A row tells all that a model is told of it: token, position, place, context and the pages of it."""
    pages = [
        row[: -(-int(length) // PAGE)].sum() for row, length in zip(inputs.table_BL, inputs.lengths_B, strict=True)
    ]
    columns = (inputs.tokens_T, inputs.positions_T, inputs.pages_T, inputs.offsets_T, inputs.lengths_B)
    return torch.stack([*columns, torch.stack(pages)], dim=1).float()


def step(slots: Slots, num_rows: int, *, turn: int) -> StepInputs:
    return slots.prepare([Chunk(slot, 5 + slot + turn, 6 + slot + turn, (), True) for slot in range(num_rows)])


@pytest.fixture
def slots() -> Slots:
    slots = Slots(num_slots=8, max_model_len=MAX_LEN, page_size=PAGE, device=CPU)
    for slot in range(8):
        pages = tuple(10 * slot + i for i in range(MAX_LEN // PAGE))
        slots.admit(SlotInit(slot, tuple(range(slot, slot + 30)), 30, Sampling(max_tokens=1), pages))
    return slots


def graphs_of(capture: Repeating, max_batch: int) -> DecodeGraphs:
    return DecodeGraphs(forward, capture, max_batch=max_batch, max_pages=MAX_LEN // PAGE, device=CPU)


@pytest.mark.parametrize("num_rows", [1, 2, 3, 5, 8])
def test_a_step_comes_back_as_it_would_without_a_graph(num_rows: int, slots: Slots) -> None:
    capture = Repeating()
    graphs = graphs_of(capture, 8)
    for turn in range(2):
        larger, own = step(slots, 8, turn=turn), step(slots, num_rows, turn=turn)
        graphs.run(larger)  # leaves its numbers in the buffers
        hidden = graphs.run(own)
        assert hidden is not None and torch.equal(hidden, forward(own))
    assert capture.num_replays == 4


def test_padding_attends_to_nothing_and_is_written_nowhere(slots: Slots) -> None:
    seen: list[Tensor] = []

    def watching(inputs: StepInputs) -> Tensor:
        seen.append(torch.stack([inputs.pages_T, inputs.lengths_B]))
        return forward(inputs)

    graphs = DecodeGraphs(watching, Repeating(), max_batch=8, max_pages=MAX_LEN // PAGE, device=CPU)
    assert all((rows[0] == -1).all() and (rows[1] == 0).all() for rows in seen)  # while capturing
    graphs.run(step(slots, 8, turn=0))
    graphs.run(step(slots, 5, turn=0))
    assert seen[-1][:, 5:].tolist() == [[-1] * 3, [0] * 3]


def test_buckets_reach_the_largest_batch_and_no_further() -> None:
    assert list(graphs_of(Repeating(), 5).buckets) == [1, 2, 4, 8]
    assert list(graphs_of(Repeating(), 1).buckets) == [1]
    assert list(graphs_of(Repeating(), 10_000).buckets) == list(BUCKETS)


def test_prefill_and_larger_batches_are_no_graphs(slots: Slots) -> None:
    capture = Repeating()
    graphs = graphs_of(capture, 4)
    assert graphs.run(step(slots, 5, turn=0)) is None
    mixed = slots.prepare([Chunk(0, 5, 6, (), True), Chunk(1, 0, 3, (), False)])
    assert graphs.run(mixed) is None
    assert capture.num_replays == 0
