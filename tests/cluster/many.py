"""Many scenarios, in a process a core: what they did in all, and those that failed."""

from __future__ import annotations

import gc
import multiprocessing
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import pytest

from tests.cluster.faults import FAULTS, SHOWN_IN
from tests.cluster.run import Outcome, simulate
from tests.cluster.scenario import Profile, Size

SHARE = 40
"""Seeds given to a process at once, and garbage is collected after them: about half a second of work."""
REPORT_S = 10.0
MAX_FAILED = 20
"""More are not waited for."""


@dataclass
class Tally:
    num_seeds: int = 0
    num_events: int = 0
    simulated_s: float = 0.0
    cpu_s: float = 0.0
    wall_s: float = 0.0
    endings: Counter[str] = field(default_factory=Counter)
    happened: Counter[str] = field(default_factory=Counter)
    calm_endings: Counter[str] = field(default_factory=Counter)
    failed: list[Outcome] = field(default_factory=list)

    def add(self, outcome: Outcome) -> None:
        self.num_seeds += 1
        self.num_events += outcome.num_events
        self.simulated_s += outcome.seconds
        self.endings += outcome.endings
        self.happened += outcome.happened
        if outcome.profile is Profile.CALM:
            self.calm_endings += outcome.endings
        if outcome.violation is not None:
            self.failed.append(outcome)

    def merge(self, other: Tally) -> None:
        for name in ("num_seeds", "num_events", "simulated_s", "cpu_s"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.endings += other.endings
        self.happened += other.happened
        self.calm_endings += other.calm_endings
        self.failed += other.failed

    def told(self) -> str:
        pace = self.num_seeds / max(self.wall_s, 1e-9)
        each_ms = 1000 * self.cpu_s / max(self.num_seeds, 1)
        lines = [
            f"{self.num_seeds} seeds in {self.wall_s:.1f} s ({pace:.0f} a second, {each_ms:.1f} ms of a core each): "
            f"{self.num_events} events, {self.simulated_s:.0f} simulated seconds, {len(self.failed)} failed",
            "endings: " + ", ".join(f"{name} {count}" for name, count in self.endings.most_common()),
            "happened: " + ", ".join(f"{name} {count}" for name, count in self.happened.most_common()),
        ]
        return "\n".join(lines + [f"  seed {outcome.seed}: {outcome.violation}" for outcome in self.failed])


def run_many(
    seeds: range,
    profile: Profile | None = None,
    size: Size | None = None,
    *,
    num_processes: int | None = None,
    say: Callable[[str], None] = lambda _: None,
) -> Tally:
    """Run them all, unless too many fail. `say` hears how far it is, now and then."""
    shares = [(seeds[start : start + SHARE], profile, size) for start in range(0, len(seeds), SHARE)]
    began = reported = time.perf_counter()
    tally = Tally()
    for part in _parts(shares, num_processes or len(os.sched_getaffinity(0))):
        tally.merge(part)
        tally.wall_s = time.perf_counter() - began
        if len(tally.failed) >= MAX_FAILED:
            break
        if tally.wall_s + began - reported > REPORT_S:
            reported = tally.wall_s + began
            say(
                f"{tally.num_seeds} of {len(seeds)} seeds, {tally.num_seeds / tally.wall_s:.0f} a second, "
                f"{len(tally.failed)} failed"
            )
    tally.failed.sort(key=lambda outcome: outcome.seed)
    return tally


MAX_PLANTED = 2500
"""Seeds within which a planted fault must be seen: a quarter of what the suite runs."""


def first_failing(fault: str, num_seeds: int = MAX_PLANTED) -> Outcome | None:
    """Of the suite's small schedules, with that fault planted; those in the weather that has shown it go first."""
    weather = SHOWN_IN.get(fault)
    seeds = sorted(range(num_seeds), key=lambda seed: weather is not None and not weather.is_that_of(seed))
    with pytest.MonkeyPatch.context() as patch:
        FAULTS[fault](patch)
        outcomes = (simulate(seed, size=Size.SMALL) for seed in seeds)
        return next((outcome for outcome in outcomes if outcome.violation), None)


def all_first_failing(faults: Sequence[str]) -> Iterator[tuple[str, Outcome | None]]:
    """In a process a core, as they are found."""
    with multiprocessing.get_context("spawn").Pool(len(os.sched_getaffinity(0)), initializer=_settle) as pool:
        yield from pool.imap_unordered(_first_failing, faults)


def _first_failing(fault: str) -> tuple[str, Outcome | None]:
    return fault, first_failing(fault)


Share = tuple[range, Profile | None, Size | None]


def _parts(shares: Sequence[Share], num_processes: int) -> Iterator[Tally]:
    if num_processes == 1 or len(shares) == 1:
        yield from map(_run_share, shares)
        return
    with multiprocessing.get_context("spawn").Pool(num_processes, initializer=_settle) as pool:
        yield from pool.imap_unordered(_run_share, shares)


def _settle() -> None:
    """What is loaded stays: looking through it again and again costs a tenth of the time.

    And whoever else wants a core goes first: beside us run tests that wait for processes, and nothing here does.
    """
    gc.collect()
    gc.freeze()
    os.nice(10)


def _run_share(share: Share) -> Tally:
    seeds, profile, size = share
    gc.disable()
    began = time.process_time()
    tally = Tally()
    for seed in seeds:
        tally.add(simulate(seed, profile, size))
    gc.collect()
    gc.enable()
    tally.cpu_s = time.process_time() - began
    return tally
