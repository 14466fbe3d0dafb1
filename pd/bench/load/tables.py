"""A run's figures for a person."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Sequence

from rich.console import Console, Group, RenderableType
from rich.table import Table

from pd.bench.load.metrics import Spread, Summary
from pd.bench.load.outcome import Outcome

_LATE_S = 0.005
_WIDTH = 120


def console(*, stderr: bool = False) -> Console:
    """As wide as the terminal; where there is none, wide enough for every table here."""
    found = Console(stderr=stderr, highlight=False)
    return found if found.is_terminal else Console(stderr=stderr, highlight=False, width=_WIDTH)


def figures(summary: Summary) -> RenderableType:
    """Two tables: rates, and latencies in milliseconds."""
    rates = Table(box=None, pad_edge=False, show_header=False)
    for name, value in _rates(summary):
        rates.add_row(name, value)
    latencies = Table(box=None, pad_edge=False)
    for heading in ("ms", "mean", "p50", "p90", "p95", "p99", "max"):
        latencies.add_column(heading, justify="left" if heading == "ms" else "right")
    for name, spread in (("TTFT", summary.ttft), ("ITL", summary.itl), ("TPOT", summary.tpot), ("E2E", summary.e2e)):
        latencies.add_row(name, *cells(spread))
    latencies.add_row("client late", *cells(summary.late), style="dim")
    return Group(rates, "", latencies)


def cells(spread: Spread) -> list[str]:
    """Milliseconds."""
    values = (spread.mean, spread.p50, spread.p90, spread.p95, spread.p99, spread.max)
    return [f"{value * 1e3:.2f}" if spread.num else "-" for value in values]


def notes(summary: Summary, outcomes: Sequence[Outcome] = ()) -> list[str]:
    """What a person should know before believing the figures. Of failures: how many, and what the first one said."""
    said = {outcome.error: one_line(outcome.detail) for outcome in reversed(outcomes) if outcome.error}
    found = [
        f"failed: {number} x {kind}{f', first: {said[kind]}' if said.get(kind) else ''}"
        for kind, number in sorted(summary.errors.items())
    ]
    if summary.num_interrupted:
        found.append(f"interrupted: {summary.num_interrupted} requests were still open and do not count")
    found += [f"token counts: {number} x {doubt}" for doubt, number in sorted(summary.doubts.items())]
    if summary.late.p99 > max(_LATE_S, 0.1 * summary.ttft.p50):
        found.append(
            f"the client itself was late ({summary.late.p99 * 1e3:.0f} ms at p99), and TTFT and E2E include that: "
            "give it a free core, or a lower rate"
        )
    return found


def one_line(detail: str) -> str:
    """What a server said, without its JSON, short."""
    with contextlib.suppress(ValueError, KeyError, TypeError):  # cut short, or another's form
        detail = str(json.loads(detail)["error"]["message"])
    line = " ".join(detail.split())
    return line if len(line) <= _WIDTH else f"{line[: _WIDTH - 1]}…"


def _rates(summary: Summary) -> list[tuple[str, str]]:
    rows = [
        ("requests", f"{summary.num_ok} of {summary.num_requests} answered in {summary.seconds:.2f} s"),
        ("request rate", f"{summary.requests_s:.2f} /s"),
        ("tokens in", f"{summary.prompt_tokens}, {summary.prompt_tokens_s:.1f} /s"),
        ("tokens out", f"{summary.answer_tokens}, {summary.answer_tokens_s:.1f} /s"),
    ]
    if summary.goodput_s is not None:
        attained = "-" if summary.attainment is None else f"{summary.attainment * 100:.1f} %"
        rows.append(("goodput", f"{summary.goodput_s:.2f} /s; {attained} of requests met {summary.goals}"))
    return rows
