"""Decode steps as captured graphs, one a bucket of batch sizes: a step of hundreds of launches becomes one.

Rules
1. A graph reads buffers that stay and leaves hidden states in one that stays: a step copies its numbers in and replays.
2. A batch smaller than its bucket is padded with rows of context 0 on page -1: they attend to nothing and write nothing
   (`pd.kernels` alone honours that; PyTorch's operators are not captured).
3. The largest bucket is captured first, and all share one memory pool: the smaller ones fit into what it took.
4. What a graph cannot take, prefill and larger batches, runs as it stands.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from pd.runtime.engine.inputs import Sampled, StepInputs

log = logging.getLogger("pd.graphs")

# B rows of a bucket, L pages of the longest request, I hidden

BUCKETS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)
"""Padding costs at most a half of the rows from 8 on, where a step still waits for weights, not for rows."""

PROGRESS_S = 2.0

Forward = Callable[[StepInputs], Tensor]


class Captured(NamedTuple):
    replay: Callable[[], None]
    hidden_BI: Tensor  # what the last replay left


class Capture(Protocol):
    """Record `work` once, so that it can be repeated on the same memory."""

    def __call__(self, work: Callable[[], Tensor]) -> Captured: ...


class DecodeGraphs:
    """The graphs of one rank, and the buffers they read."""

    def __init__(
        self,
        forward: Forward,
        capture: Capture,
        *,
        max_batch: int,
        max_pages: int,
        device: torch.device,
        report: Callable[[int, int], None] = lambda done, whole: None,
    ) -> None:
        """Captures at once. All ranks of a mesh must do so together: their sums are part of the graphs.

        `report(done, whole)` is called after each graph.
        """
        largest = next((bucket for bucket in BUCKETS if bucket >= max_batch), BUCKETS[-1])
        buckets = [bucket for bucket in BUCKETS if bucket <= largest]
        self._inputs = padding(largest, max_pages, device)
        self._captured: dict[int, Captured] = {}
        for bucket in reversed(buckets):
            inputs = _first_rows(self._inputs, bucket)
            self._captured[bucket] = capture(lambda inputs=inputs: forward(inputs))  # type: ignore[misc]
            report(len(self._captured), len(buckets))

    @property
    def buckets(self) -> Sequence[int]:
        """Ascending."""
        return sorted(self._captured)

    def run(self, step: StepInputs) -> Tensor | None:
        """hidden_BI of a step of decodes, valid until the next; None for one that no graph takes."""
        num_rows = step.num_single
        bucket = next((bucket for bucket in self.buckets if bucket >= num_rows), None)
        if bucket is None or step.extends or not num_rows:
            return None
        own, rows, rest = self._inputs, slice(0, num_rows), slice(num_rows, bucket)
        for name in ("tokens_T", "positions_T", "pages_T", "offsets_T", "lengths_B"):
            getattr(own, name)[rows].copy_(getattr(step, name))
        own.table_BL[rows, : step.table_BL.shape[1]].copy_(step.table_BL)
        own.pages_T[rest].fill_(-1)
        own.lengths_B[rest].zero_()
        own.positions_T[rest].zero_()
        captured = self._captured[bucket]
        captured.replay()
        return captured.hidden_BI[:num_rows]


def padding(num_rows: int, max_pages: int, device: torch.device) -> StepInputs:
    """A step that does nothing: `num_rows` requests of one token, of context 0, on page -1."""

    def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.zeros(shape, dtype=dtype, device=device)

    return StepInputs(
        tokens_T=zeros(num_rows),
        positions_T=zeros(num_rows),
        pages_T=zeros(num_rows) - 1,
        offsets_T=zeros(num_rows),
        num_single=num_rows,
        table_BL=zeros(num_rows, max_pages, dtype=torch.int32),
        lengths_B=zeros(num_rows, dtype=torch.int32),
        lengths=(),  # a graph has none of its own
        extends=(),
        ragged=None,
        sampled=Sampled([], [], zeros(0), (zeros(0), zeros(0))),
    )


def _first_rows(inputs: StepInputs, num_rows: int) -> StepInputs:
    """Views of the first rows."""
    return StepInputs(
        tokens_T=inputs.tokens_T[:num_rows],
        positions_T=inputs.positions_T[:num_rows],
        pages_T=inputs.pages_T[:num_rows],
        offsets_T=inputs.offsets_T[:num_rows],
        num_single=num_rows,
        table_BL=inputs.table_BL[:num_rows],
        lengths_B=inputs.lengths_B[:num_rows],
        lengths=(),
        extends=(),
        ragged=None,
        sampled=inputs.sampled,
    )


class DeviceCapture:
    """torch.cuda.CUDAGraph, which is HIP's on ROCm."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, work: Callable[[], Tensor]) -> Captured:
        # Once outside: kernels are compiled and libraries choose their algorithms, which a capture does not allow.
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            work()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        # The io thread may register memory meanwhile: that is no part of the capture and must not break it.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            hidden_BI = work()
        return Captured(graph.replay, hidden_BI)


def capture_on_device(forward: Forward, *, max_batch: int, max_pages: int, device: torch.device) -> DecodeGraphs:
    """All graphs of a GPU, with a line that says how many, how long it took and how much memory."""
    before, start = torch.cuda.mem_get_info(device)[0], time.perf_counter()
    said = start

    def report(done: int, whole: int) -> None:
        nonlocal said
        if time.perf_counter() - said > PROGRESS_S:
            said = time.perf_counter()
            log.info("capturing decode graphs: %d of %d", done, whole)

    graphs = DecodeGraphs(
        forward, DeviceCapture(), max_batch=max_batch, max_pages=max_pages, device=device, report=report
    )
    torch.cuda.synchronize(device)
    taken, seconds = before - torch.cuda.mem_get_info(device)[0], time.perf_counter() - start
    log.info("captured decode graphs of batch %s in %.1f s: %.0f MiB", graphs.buckets, seconds, taken / 2**20)
    return graphs
