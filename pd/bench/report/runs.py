"""From the lines of results to runs that can be drawn. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from pd.bench.load import goals
from pd.bench.load.goals import Goals
from pd.bench.load.outcome import INTERRUPTED, Outcome

Line = dict[str, object]


class _Request(msgspec.Struct):
    index: int
    due_s: float
    sent_s: float | None
    chunks_s: list[float]
    num_asked: int
    conversation: int = 0
    turn: int = 0
    num_prompt: int | None = None
    num_answer: int | None = None
    num_text: int | None = None
    finish: str | None = None
    error: str | None = None
    detail: str = ""
    timings: dict[str, float] | None = None

    def outcome(self) -> Outcome:
        return Outcome(**msgspec.structs.asdict(self))


class Instance(msgspec.Struct):
    name: str
    role: str
    num_running: int | None = None
    num_waiting: int | None = None
    num_free_pages: int | None = None
    num_pages: int | None = None


class Sample(msgspec.Struct):
    at_s: float
    instances: list[Instance]


class _Options(msgspec.Struct):
    slo: str | None = None
    target: float = 0.9
    dataset: str = ""
    arrival: str = ""


class _Head(msgspec.Struct):
    """Of a run, or of the whole comparison it belongs to."""

    name: str = ""
    model: str = ""
    rate: float | None = None
    repeat: int = 0
    options: _Options = msgspec.field(default_factory=_Options)
    environment: dict[str, object] = {}


@dataclass(slots=True)
class Run:
    """One load on one server."""

    source: str  # the file's name
    head: _Head
    outcomes: list[Outcome] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def goals(self) -> Goals:
        return goals.parse(self.head.options.slo) if self.head.options.slo else Goals()

    @property
    def counted(self) -> list[Outcome]:
        return [one for one in self.outcomes if one.error != INTERRUPTED]

    @property
    def good(self) -> list[Outcome]:
        return [one for one in self.outcomes if one.error is None]


@dataclass(slots=True)
class Series:
    """The runs of one server, which one colour stands for."""

    name: str
    runs: list[Run]

    def at(self, rate: float | None) -> list[Run]:
        return [run for run in self.runs if run.head.rate == rate]

    @property
    def rates(self) -> list[float]:
        return sorted({run.head.rate for run in self.runs if run.head.rate is not None})


def runs_of(source: str, lines: Sequence[Line]) -> list[Run]:
    """Raises ValueError for lines of another kind of result, and for those that are damaged."""
    found: list[Run] = []
    for number, line in enumerate(lines, 1):
        try:
            _take(source, line, found)
        except msgspec.ValidationError as error:
            raise ValueError(f"{source}: result {number} ({line['kind']}): {error}") from None
    if not found:
        kinds = ", ".join(sorted({str(line["kind"]) for line in lines}))
        raise ValueError(f"{source} holds no run of pd bench serve or compare, but: {kinds}")
    return found


def _take(source: str, line: Line, found: list[Run]) -> None:
    kind = line["kind"]
    if kind == "run":
        found.append(Run(source, msgspec.convert(line, _Head)))
    elif not found:
        return  # the head of a comparison; a run repeats what it says
    elif kind == "request":
        found[-1].outcomes.append(msgspec.convert(line, _Request).outcome())
    elif kind == "sample":
        found[-1].samples.append(msgspec.convert(line, Sample))
    elif kind == "summary":
        found[-1].seconds = msgspec.convert(line["seconds"], float)


def series_of(runs: Sequence[Run], *, num_sources: int) -> list[Series]:
    """By server; of several files a name says which, unless their runs were named apart."""
    by_name: dict[str, list[Run]] = {}
    for run in runs:
        name = run.head.name if num_sources == 1 else f"{run.head.name} ({run.source})"
        by_name.setdefault(name, []).append(run)
    return [Series(name, members) for name, members in by_name.items()]


def curve_of(series: Series) -> dict[float, list[list[bool]]]:
    """By rate, of each repeat: whether each request met the goals."""
    return {rate: [[run.goals.are_met(one) for one in run.counted] for run in series.at(rate)] for rate in series.rates}


def rate_to_show(series: Sequence[Series]) -> float | None:
    """The highest that all of them ran; None where they ran without one, or have none in common."""
    common = set.intersection(*(set(one.rates) for one in series)) if series else set()
    return max(common, default=None)
