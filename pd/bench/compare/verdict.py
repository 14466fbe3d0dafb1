"""What a comparison comes to: a table by rate, each server's capacity, and their ratio. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from rich.table import Table

from pd.bench.compare.curve import Curve, sentences
from pd.bench.load.goals import Goals
from pd.bench.load.metrics import Spread
from pd.bench.load.outcome import INTERRUPTED
from pd.bench.load.session import Ran

Runs = Mapping[float, Sequence[Ran]]
"""By rate, one a repeat."""


def verdict(found: Mapping[str, Runs], goals: Goals, target: float) -> Iterator[Table | str]:
    """The first of `found` is what the others are compared with."""
    yield ""
    yield _table(found, goals)
    yield ""
    curves = {name: curve(runs, goals) for name, runs in found.items() if runs}
    if curves:
        yield from sentences(curves, str(goals), target)


def curve(runs: Runs, goals: Goals) -> Curve:
    """A rate that was left out, since a lower one was hopeless, is not there: it lies beyond the fall."""
    return {
        rate: [[goals.are_met(one) for one in ran.outcomes if one.error != INTERRUPTED] for ran in repeats]
        for rate, repeats in runs.items()
    }


def _table(found: Mapping[str, Runs], goals: Goals) -> Table:
    table = Table(box=None, pad_edge=False)
    headings = (
        "server",
        "rate",
        "runs",
        "met %",
        "goodput/s",
        "tok/s",
        "TTFT p50",
        "p99",
        "TPOT p50",
        "ITL p99",
        "max",
    )
    for heading in headings:
        table.add_column(heading, justify="left" if heading == "server" else "right")
    for name, runs in found.items():
        for rate in sorted(runs):
            table.add_row(name, f"{rate:g}", *_cells(runs[rate], goals))
    return table


def _cells(repeats: Sequence[Ran], goals: Goals) -> list[str]:
    """Latencies over all requests of all repeats, in milliseconds; rates are means."""
    outcomes = [one for ran in repeats for one in ran.outcomes]
    good = [one for one in outcomes if one.error is None]
    ttft = Spread.of(one.ttft_s for one in good if one.ttft_s is not None)
    tpot = Spread.of(one.tpot_s for one in good if one.tpot_s is not None)
    itl = Spread.of(gap for one in good for gap in one.gaps_s)
    met = sum(goals.are_met(one) for one in outcomes)
    goodput = sum(ran.summary.goodput_s or 0.0 for ran in repeats) / len(repeats)
    tokens = sum(ran.summary.answer_tokens_s for ran in repeats) / len(repeats)
    return [
        str(len(repeats)),
        f"{100 * met / max(1, len(outcomes)):.0f}",
        f"{goodput:.2f}",
        f"{tokens:.0f}",
        *(f"{value * 1e3:.1f}" for value in (ttft.p50, ttft.p99, tpot.p50, itl.p99, itl.max)),
    ]
