"""`pd bench latency`: an engine's steps over prompt length, batch and context, beside what the machine allows.

Rules
1. Everything takes turns and the best of all turns counts, since others use the machine too; the median stands beside.
2. A floor is what cannot be beaten with this dtype: bytes that must be read over the read bandwidth, or multiply-adds
   over the matrix product's peak, whichever takes longer. Both are measured in the same run.
"""

from __future__ import annotations

import math
import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from pd.bench import specs
from pd.bench.environment import environment, in_words
from pd.bench.lines import FORMAT, Lines, written
from pd.bench.options import LatencyOptions
from pd.bench.steps import Steps
from pd.runtime.checkpoint import resolve
from pd.runtime.config import ConfigError
from pd.runtime.engine.weights import open_checkpoint

_DECODE_STEPS = 12
_MEMORY = 64 << 20  # floats to sum: more than any cache holds
_SIDE = 1024  # of the square matrices whose product gives the peak


@dataclass(frozen=True, slots=True)
class Cell:
    """One thing that is timed."""

    kind: str  # prefill | decode
    batch: int
    length: int  # tokens of the prompt; KV a request attends to
    seconds: list[float] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Machine:
    read_s: float  # a byte
    madd_s: float  # a multiply-add


def latency(options: LatencyOptions) -> int:
    """Run the command. Raises ConfigError for wrong use."""
    cells, threads = _checked(options)
    checkpoint = resolve(options.model)
    torch.set_num_threads(threads)
    longest = max(cell.length for cell in cells) + _DECODE_STEPS + 1
    batch = max(cell.batch for cell in cells)
    console = Console(highlight=False)
    with written(options.output) as lines, console.status("loading the model") as status:
        steps = Steps(
            checkpoint, dtype=options.dtype, batch=batch, length=longest, device=options.device, threads=threads
        )
        try:
            machine = _measure(steps, cells, options.rounds, status.update)
        finally:
            steps.close()
        bounds = _Bounds(steps, checkpoint, machine)
        found, engine = environment(), steps.engine.notes.start_up
        lines.put("latency", format=FORMAT, model=checkpoint.name, engine=engine, environment=found)
        for cell in cells:
            _tell(lines, cell, bounds.least_s(cell))
    console.print(f"{checkpoint.name}: {engine}\n{in_words(found)}", soft_wrap=True)
    console.print(f"memory read {1e-9 / machine.read_s:.1f} GB/s, matrix product {2e-9 / machine.madd_s:.0f} GFLOP/s")
    console.print(_table(cells, bounds))
    if note := doubt([min(cell.seconds) / bounds.least_s(cell) for cell in cells]):
        console.print(note, soft_wrap=True)
    return 0


def _checked(options: LatencyOptions) -> tuple[list[Cell], int]:
    faults: list[str] = []
    read: list[tuple[int, ...]] = []
    for name, text in (
        ("--prompts", options.prompts),
        ("--batches", options.batches),
        ("--contexts", options.contexts),
    ):
        try:
            read.append(specs.counts(name, text))
        except ValueError as error:
            faults.append(str(error))
    if options.rounds < 1:
        faults.append(f"--rounds is {options.rounds}, must be at least 1")
    if options.threads is not None and options.threads < 1:
        faults.append(f"--threads is {options.threads}, must be at least 1")
    if faults:
        raise ConfigError(*faults, hint="pd bench latency --help")
    prompts, batches, contexts = read
    cells = [Cell("prefill", 1, prompt) for prompt in prompts]
    cells += [Cell("decode", batch, context) for context in contexts for batch in batches]
    return cells, options.threads or len(os.sched_getaffinity(0))


def _measure(steps: Steps, cells: list[Cell], rounds: int, say: Callable[[str], None]) -> Machine:
    dtype, device = getattr(torch, steps.engine.layout.dtype), _device(steps)
    read_s = madd_s = math.inf
    for turn in range(rounds):
        say(f"round {turn + 1} of {rounds}: the machine")
        read_s = min(read_s, _read_s(device))
        madd_s = min(madd_s, _madd_s(dtype, device))
        for cell in cells:
            say(f"round {turn + 1} of {rounds}: {cell.kind}, batch {cell.batch}, {cell.length} tokens")
            took = steps.prefill(cell.batch, cell.length)
            cell.seconds.extend(
                took if cell.kind == "prefill" else steps.decode(cell.batch, cell.length, _DECODE_STEPS)
            )
            steps.retire(cell.batch)
    return Machine(read_s, madd_s)


class _Bounds:
    """The floors of one model on one machine."""

    def __init__(self, steps: Steps, checkpoint: Path, machine: Machine) -> None:
        layout = steps.engine.layout
        self._machine = machine
        self._itemsize = layout.itemsize
        self._kv_nbytes = layout.token_nbytes
        headers = open_checkpoint(checkpoint).headers
        weights = {name: math.prod(header.shape) for name, header in headers.items()}
        embedding = weights.pop("model.embed_tokens.weight")
        self._head = weights.pop("lm_head.weight", embedding)  # tied to the embedding where it has none of its own
        self._inner = sum(weights.values())

    def least_s(self, cell: Cell) -> float:
        """Seconds. Of the embedding only the rows used are read; attention's multiply-adds are left out."""
        tokens = cell.length if cell.kind == "prefill" else cell.batch
        kv = 0 if cell.kind == "prefill" else cell.batch * cell.length * self._kv_nbytes
        nbytes = (self._inner + self._head) * self._itemsize + kv
        madds = self._inner * tokens + self._head * cell.batch
        return max(nbytes * self._machine.read_s, madds * self._machine.madd_s)


def doubt(times_floor: Sequence[float]) -> str | None:
    """What a person should know who sees a step below its floor."""
    num_below = sum(times < 1 for times in times_floor)
    if not num_below:
        return None
    return (
        f"{num_below} of {len(times_floor)} steps lie below their floor: the machine was too busy while the floor was "
        "measured, or --rounds are too few"
    )


def _tell(lines: Lines, cell: Cell, least_s: float) -> None:
    lines.put(
        "step", step=cell.kind, batch=cell.batch, length=cell.length, seconds=cell.seconds, floor_s=round(least_s, 9)
    )


def _table(cells: list[Cell], bounds: _Bounds) -> Table:
    table = Table(box=None, pad_edge=False)
    for heading in ("step", "batch", "tokens", "best ms", "median ms", "x floor", "tok/s"):
        table.add_column(heading, justify="left" if heading == "step" else "right")
    for cell in cells:
        best = min(cell.seconds)
        table.add_row(
            cell.kind,
            str(cell.batch),
            str(cell.length),
            f"{best * 1e3:.2f}",
            f"{statistics.median(cell.seconds) * 1e3:.2f}",
            f"{best / bounds.least_s(cell):.2f}",
            f"{(cell.length if cell.kind == 'prefill' else cell.batch) / best:.0f}",
        )
    return table


def _device(steps: Steps) -> torch.device:
    return torch.device("cuda" if "cuda" in steps.engine.notes.start_up else "cpu")


def _read_s(device: torch.device) -> float:
    memory = torch.ones(_MEMORY, dtype=torch.float32, device=device)
    return _best(lambda: memory.sum(), device) / memory.nbytes


def _madd_s(dtype: torch.dtype, device: torch.device) -> float:
    """The better of `dtype` and float32: what one is free to choose is no excuse."""
    side = _SIDE if device.type == "cpu" else 8 * _SIDE
    least = math.inf
    for kind in {dtype, torch.float32}:
        a, b = (torch.randn(side, side, device=device).to(kind) for _ in range(2))
        least = min(least, _best(lambda a=a, b=b: a @ b, device) / side**3)  # type: ignore[misc]
    return least


def _best(call: Callable[[], object], device: torch.device, turns: int = 6) -> float:
    took = []
    for _ in range(turns):
        start = time.perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize()
        took.append(time.perf_counter() - start)
    return min(took)
