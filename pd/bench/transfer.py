"""`pd bench transfer`: a request's KV from prefill ranks to decode ranks, a process each, beside what no copy beats.

Rules
1. A line and its limit take turns, and the best of each counts, since others use the machine too; percentiles of all
   turns stand beside.
2. Pages are scattered on both sides, so that none merge: the worst that equal page sizes can be.
3. `x p → p` is a line's time a byte over that of equal TP with as many prefill ranks, at as many tokens; `x d → d` with
   as many decode ranks: of two TP sizes that differ, the side with fewer ranks may be what limits.
"""

from __future__ import annotations

import itertools
import math
import time
from dataclasses import dataclass, field, replace

from rich.console import Console
from rich.table import Table

from pd.bench import specs
from pd.bench.environment import environment, in_words
from pd.bench.lines import FORMAT, Lines, written
from pd.bench.shapes import ModelShape, read_shape
from pd.bench.transfer_ends import Meeting
from pd.bench.transfer_options import TransferOptions
from pd.runtime.config import ConfigError, read_transfer_params
from pd.transfer.choose import make_transport
from pd.transfer.transport import TransferError

_MIN_ROUNDS = 5
_TABLE_WIDTH = 132  # a narrower terminal folds whole lines, which reads better than folded cells
_DEFAULT = ("shm", "tcp", "nixl", "mooncake")
_FAKE = "fake"
"""Moves nothing: what is left is what planning, handing over and being told cost."""


@dataclass(frozen=True, slots=True)
class Line:
    backend: str
    tps: tuple[int, int]  # prefill, decode
    num_tokens: int
    limit_name: str  # "": nothing is moved, so nothing limits it
    num_spans: int
    nbytes: int
    seconds: list[float] = field(default_factory=list)
    limits: list[float] = field(default_factory=list)

    @property
    def rate(self) -> float:
        """Bytes a second, of the best turn."""
        return self.nbytes / min(self.seconds)

    @property
    def share(self) -> float | None:
        return min(self.limits) / min(self.seconds) if self.limits else None

    def percentile(self, percent: int) -> float:
        ordered = sorted(self.seconds)
        return ordered[min(len(ordered) - 1, len(ordered) * percent // 100)]


@dataclass(frozen=True, slots=True)
class _Work:
    shape: ModelShape
    tps: tuple[tuple[int, int], ...]
    tokens: tuple[int, ...]
    backends: tuple[str, ...]
    params: dict[str, str]
    seconds: float


def transfer(options: TransferOptions) -> int:
    """Run the command. Raises ConfigError for wrong use."""
    work = _checked(options)
    console = Console(highlight=False)
    lines: list[Line] = []
    found = environment()
    with written(options.output) as file:
        file.put("transfer", format=FORMAT, model=work.shape.name, page_size=options.page_size, environment=found)
        with console.status("") as status:
            for backend, tps in itertools.product(work.backends, work.tps):
                status.update(f"{backend}, {tps[0]} → {tps[1]} ranks")
                try:
                    lines += _measure(work, backend, tps, file)
                except TransferError as error:
                    raise ConfigError(f"{backend}: {error}", hint=error.hint or "pd doctor --only transfer") from error
    console.print(f"KV of {work.shape.name}, pages of {options.page_size} tokens\n{in_words(found)}", soft_wrap=True)
    console.width = max(console.width, _TABLE_WIDTH)
    console.print(_table(lines))
    return 0


def _checked(options: TransferOptions) -> _Work:
    faults: list[str] = []
    read: list[tuple[int, ...]] = []
    for name in ("prefill_tp", "decode_tp", "tokens"):
        try:
            given = specs.counts(f"--{name.replace('_', '-')}", getattr(options, name))
            read.append(tuple(dict.fromkeys(given)))  # twice the same is one line
        except ValueError as error:
            faults.append(str(error))
    shape = None
    if options.page_size < 1:
        faults.append(f"--page-size is {options.page_size}, must be at least 1")
    try:
        shape = read_shape(options.model_shape)
    except ValueError as error:
        faults.append(f"--model-shape: {error}")
    params, wrong = read_transfer_params(options.transfer_param or ())
    faults += wrong
    names = _backends(options.backend)
    if unknown := [name for name in names if name not in (*_DEFAULT, _FAKE)]:
        told = ", ".join(name or "nothing" for name in unknown)
        faults.append(f"--backend names {told}, must be of {', '.join(_DEFAULT)}, {_FAKE}")
    if params and len(names) > 1:
        faults.append(f"--transfer-param is for one backend, not for {', '.join(names)}")
    if not 0 < options.seconds < math.inf:
        faults.append(f"--seconds is {options.seconds}, must be above 0 and finite")
    if shape is not None and not faults and max(*read[0], *read[1]) > shape.num_query_heads:
        faults.append(f"{max(*read[0], *read[1])} ranks are more than the {shape.num_query_heads} query heads")
    if faults or shape is None:
        raise ConfigError(*faults, hint="pd bench transfer --help")
    tps = tuple(itertools.product(read[0], read[1]))
    shape = replace(shape, layout=replace(shape.layout, page_size=options.page_size))
    return _Work(shape, tps, tuple(sorted(read[2])), names, params, options.seconds)


def _backends(asked: str | None) -> tuple[str, ...]:
    """Those asked for; else those whose library is here."""
    if asked is not None:
        return tuple(dict.fromkeys(name.strip() for name in asked.split(",")))
    here = []
    for name in _DEFAULT:
        try:
            make_transport(name, me="probe", host="127.0.0.1").close()
            here.append(name)
        except TransferError:
            continue
    return tuple(here)


def _measure(work: _Work, backend: str, tps: tuple[int, int], file: Lines) -> list[Line]:
    lines = []
    with Meeting(backend, work.shape, tps=tps, num_tokens=max(work.tokens), params=work.params) as meeting:
        for num_tokens in work.tokens:
            first = meeting.move(num_tokens)
            limit = meeting.limit
            line = Line(backend, tps, num_tokens, limit.name if limit else "", first.num_spans, first.nbytes)
            until = time.monotonic() + work.seconds
            while time.monotonic() < until or len(line.seconds) < _MIN_ROUNDS:
                moved = meeting.move(num_tokens)
                line.seconds.append(moved.seconds)
                if limit is not None:
                    line.limits.append(limit.seconds(moved.nbytes))
            file.put(
                "move",
                backend=backend,
                prefill_tp=tps[0],
                decode_tp=tps[1],
                tokens=num_tokens,
                descriptors=line.num_spans,
                nbytes=line.nbytes,
                seconds=line.seconds,
                limit=line.limit_name,
                limit_seconds=line.limits,
            )
            lines.append(line)
    return lines


def _table(lines: list[Line]) -> Table:
    table = Table(box=None, pad_edge=False)
    for heading in ("backend", "tp", "tokens", "pieces", "MB", "best ms", "p50", "p90", "p99", "GB/s", "of limit"):
        table.add_column(heading, justify="left" if heading == "backend" else "right")
    for heading in ("limit", "x p → p", "x d → d", "of largest"):
        table.add_column(heading, justify="left" if heading == "limit" else "right")
    best = {(line.backend, line.tps, line.num_tokens): line for line in lines}
    largest = max((line.num_tokens for line in lines), default=0)
    for line in lines:
        equal = (best.get((line.backend, (tp, tp), line.num_tokens)) for tp in line.tps)
        table.add_row(
            line.backend,
            f"{line.tps[0]} → {line.tps[1]}",
            str(line.num_tokens),
            str(line.num_spans),
            f"{line.nbytes / 1e6:.1f}",
            f"{min(line.seconds) * 1e3:.2f}",
            *(f"{line.percentile(percent) * 1e3:.2f}" for percent in (50, 90, 99)),
            f"{line.rate / 1e9:.2f}" if line.limits else "",
            f"{line.share:.2f}" if line.share is not None else "",
            line.limit_name,
            *(f"{other.rate / line.rate:.2f}" if other else "" for other in equal),
            f"{line.rate / best[line.backend, line.tps, largest].rate:.2f}",
        )
    return table
