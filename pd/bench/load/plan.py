"""From options to traffic: every fault found before anything is sent. Reads dataset files; sends nothing."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import msgspec

from pd.bench import specs
from pd.bench.load import arrivals, datasets, goals
from pd.bench.load.asks import Conversation, Form
from pd.bench.load.drive import Traffic
from pd.bench.load.goals import Goals
from pd.bench.options import TrafficOptions
from pd.runtime.config import ConfigError

T = TypeVar("T")

DEFAULT_REQUESTS = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """Checked options. A rate is given later, so that a sweep reads its files once."""

    options: TrafficOptions
    arrival: specs.Spec
    conversations: Callable[[int], Iterable[Conversation]]
    """By seed: those there are, or without end where they are made up; the same each time."""
    goals: Goals
    extra: dict[str, object]
    is_made_up: bool
    count: datasets.Count | None
    vocab: int

    def form(self, model: str) -> Form:
        return Form(model=model, chat=self.options.chat, ignore_eos=not self.options.allow_eos, extra=self.extra)

    def open_loop(self, rate: float | None, *, seed: int) -> Traffic:
        """Arrivals at `rate`, or at a trace's own times. Raises ConfigError."""
        options = self.options
        found, own = self.conversations(seed), []
        if self.arrival.kind == "trace" and not self.is_made_up:
            found = sorted(found, key=lambda one: one.at_s or 0.0)
            own = [one.at_s for one in found]
        try:
            times = arrivals.times(self.arrival, rate, seed=seed, own=own)
        except ValueError as error:
            raise ConfigError(str(error), hint="pd bench serve --help") from error
        if options.duration is not None:
            until_s = options.duration
            times = itertools.takewhile(lambda at_s: at_s < until_s, times)
        chosen = tuple(itertools.islice(zip(times, found, strict=False), self._limit()))
        if not chosen:
            raise ConfigError(f"nothing arrives within {options.duration:g} s", hint="raise --duration or --rate")
        return Traffic(arrivals=chosen, timeout_s=options.timeout, count=self.count)

    def closed_loop(self, concurrency: int) -> Traffic:
        options = self.options
        chosen = itertools.islice(((0.0, one) for one in self.conversations(options.seed)), self._limit())
        return Traffic(
            arrivals=chosen,
            concurrency=concurrency,
            timeout_s=options.timeout,
            duration_s=options.duration,
            count=self.count,
        )

    def shortages(self) -> list[str]:
        """What was asked for and the dataset's file does not hold."""
        asked = self.options.num_requests
        if asked is None or self.is_made_up:
            return []
        num = len(list(self.conversations(self.options.seed)))
        return [f"--num-requests is {asked}, the dataset holds {num}: no line is asked twice"] if num < asked else []

    def _limit(self) -> int | None:
        """Conversations at most; None where the file or the duration ends them."""
        if self.options.num_requests is not None or self.options.duration is not None or not self.is_made_up:
            return self.options.num_requests
        return DEFAULT_REQUESTS


def check(options: TrafficOptions, *more_faults: str, command: str) -> Wanted:
    """Raises ConfigError with all faults at once, `more_faults` first."""
    faults = list(more_faults)
    faults += [
        f"--{name.replace('_', '-')} is {value:g}, must be above 0"
        for name in ("num_requests", "duration", "timeout")
        if (value := getattr(options, name)) is not None and value <= 0
    ]
    if options.warmup < 0:
        faults.append(f"--warmup is {options.warmup}, must be at least 0")
    count = _attempt(faults, lambda: _counter(options.tokenizer))
    spec = _attempt(faults, lambda: specs.spec("--dataset", options.dataset, datasets.KINDS))
    arrival = _attempt(faults, lambda: specs.spec("--arrival", options.arrival, arrivals.KINDS))
    goal = _attempt(faults, lambda: goals.parse(options.slo) if options.slo is not None else Goals())
    extra = _attempt(faults, lambda: _extra(options.extra))
    source = None
    if spec is not None:
        source = _attempt(faults, lambda: _source(spec, count or datasets.about))
    if faults or arrival is None or goal is None or extra is None or source is None or spec is None:
        raise ConfigError(*faults, hint=f"{command} --help")
    vocab = int(spec.settings.get("vocab", datasets.VOCAB))
    return Wanted(
        options=options,
        arrival=arrival,
        conversations=source,
        goals=goal,
        extra=extra,
        is_made_up=spec.kind in datasets.MADE_UP,
        count=count,
        vocab=vocab,
    )


def _source(spec: specs.Spec, count: datasets.Count) -> Callable[[int], Iterable[Conversation]]:
    """Raises ValueError for settings or lines that are wrong, and for a file that cannot be read."""
    if spec.kind in datasets.MADE_UP:
        if spec.path is not None:
            raise ValueError(f"--dataset {spec.kind} is made up, and takes no file")
        datasets.made_up(spec, 0)  # refuses settings without sense
        return lambda seed: datasets.made_up(spec, seed)
    if not spec.path:
        raise ValueError(f"--dataset {spec.kind} needs a file: {spec.kind}:FILE")
    try:
        text = Path(spec.path).read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"--dataset: cannot read {spec.path}: {getattr(error, 'strerror', None) or error}") from None
    try:
        found = datasets.from_file(spec, text, count=count, seed=0)
    except ValueError as error:
        raise ValueError(f"--dataset: {spec.path}: {error}") from None
    if not found:
        raise ValueError(f"--dataset: {spec.path} holds no conversation that can be used")
    return lambda seed: found


def _counter(directory: str | None) -> datasets.Count | None:
    """Raises ValueError where there is no tokenizer.json."""
    if directory is None:
        return None
    from tokenizers import Tokenizer

    file = Path(directory) / "tokenizer.json" if Path(directory).is_dir() else Path(directory)
    if not file.is_file():
        raise ValueError(f"--tokenizer: {file} does not exist")
    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # noqa: BLE001 - its Rust half raises nothing narrower
        raise ValueError(f"--tokenizer: {file} is no tokenizer: {error}") from None
    return lambda text: len(tokenizer.encode(text, add_special_tokens=False).ids)


def _extra(text: str | None) -> dict[str, object]:
    if text is None:
        return {}
    try:
        return msgspec.json.decode(text, type=dict[str, object])
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        raise ValueError(f"--extra is {text!r}, must be a JSON object: {error}") from None


def _attempt(faults: list[str], check: Callable[[], T]) -> T | None:
    try:
        return check()
    except ValueError as error:
        faults.append(str(error))
        return None
