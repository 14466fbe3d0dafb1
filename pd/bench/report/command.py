"""`pd bench report`: results -> one page, and their figures side by side."""

from __future__ import annotations

from pathlib import Path

from rich.table import Table

from pd.bench.compare.curve import sentences
from pd.bench.lines import read
from pd.bench.load import goals
from pd.bench.load.tables import console
from pd.bench.options import ReportOptions
from pd.bench.report.page import page, rows
from pd.bench.report.runs import Run, Series, curve_of, runs_of, series_of
from pd.runtime.config import ConfigError


def report(options: ReportOptions) -> int:
    """Run the command. Raises ConfigError for files that are no results, and for a page that cannot be written."""
    series = _series(options)
    out = console()
    out.print(_table(series))
    for line in _sentences(series):
        out.print(line, soft_wrap=True)
    try:
        Path(options.html).write_text(page(options.title or "pd bench", series))
    except OSError as error:
        reason = error.strerror or str(error)
        raise ConfigError(f"cannot write {options.html}: {reason}", hint="--html takes a file") from error
    out.print(f"\nwritten: {options.html}; it opens in any browser, without a network", soft_wrap=True)
    return 0


def _series(options: ReportOptions) -> list[Series]:
    faults: list[str] = []
    if options.slo is not None:
        try:
            goals.parse(options.slo)
        except ValueError as error:
            faults.append(str(error))
    runs: list[Run] = []
    for path in options.results:
        try:
            runs += runs_of(Path(path).name, read(Path(path)))
        except OSError as error:
            faults.append(f"cannot read {path}: {error.strerror or error}")
        except ValueError as error:
            faults.append(str(error))
    if faults:
        raise ConfigError(*faults, hint="give files that pd bench serve or compare wrote with --output")
    for run in runs:
        run.head.options.slo = options.slo or run.head.options.slo
    return series_of(runs, num_sources=len(set(options.results)))


def _sentences(series: list[Series]) -> list[str]:
    """What a comparison comes to; nothing for runs at one rate, or without goals."""
    if any(len(one.rates) < 2 or not run.goals for one in series for run in one.runs):
        return []
    curves = {one.name: curve_of(one) for one in series}
    head = series[0].runs[0].head
    return ["", *sentences(curves, str(series[0].runs[0].goals), head.options.target)]


def _table(series: list[Series]) -> Table:
    """Latencies in milliseconds."""
    table = Table(box=None, pad_edge=False)
    for heading in ("run", "ok", "req/s", "tok/s", "met %", "TTFT p50", "p99", "TPOT p50", "ITL p50", "p99"):
        table.add_column(heading, justify="left" if heading == "run" else "right")
    for name, found in rows(series):
        marks = (found.ttft.p50, found.ttft.p99, found.tpot.p50, found.itl.p50, found.itl.p99)
        table.add_row(
            name,
            f"{found.num_ok} of {found.num_requests}",
            f"{found.requests_s:.2f}",
            f"{found.answer_tokens_s:.1f}",
            "-" if found.attainment is None else f"{found.attainment * 100:.0f}",
            *(f"{mark * 1e3:.1f}" for mark in marks),
        )
    return table
