"""From sweeps to a statement: attainment over the rate, the rate at which goals break, their ratio. Pure.

Rules
1. A server's capacity is the rate at which the share of requests that met every goal falls below a target, by linear
   interpolation between the two rates around it. Where it never falls, or is below from the first rate on, the capacity
   is only bounded, and that is said.
2. The interval is from resampling requests in runs of neighbours (moving blocks of the cube root of their number):
   requests that wait in one queue are not independent of each other, and single ones would make it too narrow.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

Curve = Mapping[float, Sequence[Sequence[bool]]]
"""By rate: of each repeated run, whether each request met the goals, in order of arrival."""


@dataclass(frozen=True, slots=True)
class Capacity:
    rate: float
    is_least: bool = False  # it held at every rate tried: the capacity is at least this
    is_most: bool = False  # it held at none: at most this

    def __str__(self) -> str:
        sign = "at least " if self.is_least else "less than " if self.is_most else ""
        return f"{sign}{self.rate:.2f}"


@dataclass(frozen=True, slots=True)
class Ratio:
    value: float
    low: float
    high: float
    is_bound: bool  # one of the two capacities is only a bound

    def __str__(self) -> str:
        return f"{self.value:.2f} ({self.low:.2f} to {self.high:.2f})"


def sentences(curves: Mapping[str, Curve], goals: str, target: float) -> Iterator[str]:
    """Each one's capacity, and the ratio of all others to the first."""
    for name, one in curves.items():
        yield f"{name}: {target * 100:.0f} % of requests met {goals} up to {capacity(one, target)} requests/s"
    base, *others = curves
    for name in others:
        found = ratio(curves[name], curves[base], target, seed=0)
        if found is None:
            yield f"{name} / {base}: no ratio, since one of them broke its goals at the lowest rate: try lower --rates"
            continue
        bound = "; a capacity is only a bound, so try higher --rates" if found.is_bound else ""
        yield f"{name} / {base}: {found}, the 95 % interval from resampling requests{bound}"


def attainment(runs: Sequence[Sequence[bool]]) -> float:
    """Of all requests of all runs; 0 where there were none."""
    num = sum(map(len, runs))
    return sum(map(sum, runs)) / num if num else 0.0


def capacity(curve: Curve, target: float) -> Capacity:
    """`target`: the share of requests that must meet the goals."""
    return _crossing([(rate, attainment(curve[rate])) for rate in sorted(curve)], target)


def ratio(one: Curve, other: Curve, target: float, *, seed: int, draws: int = 1000) -> Ratio | None:
    """one's capacity over other's, with a 95 % interval. None where either held no goal at the lowest rate."""
    mine, theirs = capacity(one, target), capacity(other, target)
    if mine.is_most or theirs.is_most:
        return None
    dice = random.Random(seed)
    found = []
    for _ in range(draws):
        a, b = (_crossing(_resampled(curve, dice), target) for curve in (one, other))
        if b.rate > 0:
            found.append(a.rate / b.rate)
    found.sort()
    low, high = found[int(0.025 * len(found))], found[min(len(found) - 1, int(0.975 * len(found)))]
    return Ratio(mine.rate / theirs.rate, low, high, mine.is_least or theirs.is_least)


def _crossing(points: Sequence[tuple[float, float]], target: float) -> Capacity:
    """The first fall below `target`, rates ascending."""
    before: tuple[float, float] | None = None
    for rate, share in points:
        if share < target:
            if before is None:
                return Capacity(rate, is_most=True)
            last_rate, last_share = before
            return Capacity(last_rate + (rate - last_rate) * (last_share - target) / (last_share - share))
        before = rate, share
    return Capacity(points[-1][0] if points else 0.0, is_least=True)


def _resampled(curve: Curve, dice: random.Random) -> list[tuple[float, float]]:
    return [(rate, attainment([_neighbours(run, dice) for run in curve[rate]])) for rate in sorted(curve)]


def _neighbours(run: Sequence[bool], dice: random.Random) -> list[bool]:
    """As many requests, in runs of neighbours from anywhere; the end joins the beginning."""
    num = len(run)
    size = max(1, round(num ** (1 / 3)))
    drawn: list[bool] = []
    while len(drawn) < num:
        start = dice.randrange(num)
        drawn += [run[(start + offset) % num] for offset in range(size)]
    return drawn[:num]
