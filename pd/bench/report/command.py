"""`pd bench report`: results -> one page, and their figures side by side."""

from __future__ import annotations

from pathlib import Path

from rich.table import Table

from pd.bench.lines import read
from pd.bench.load.tables import console
from pd.bench.options import ReportOptions
from pd.bench.report.page import page, rows
from pd.bench.report.runs import Run, Series, runs_of, series_of
from pd.runtime.config import ConfigError


def report(options: ReportOptions) -> int:
    """Run the command. Raises ConfigError for files that are no results, and for a page that cannot be written."""
    series = _series(options.results)
    out = console()
    out.print(_table(series))
    try:
        Path(options.html).write_text(page(options.title or "pd bench", series))
    except OSError as error:
        reason = error.strerror or str(error)
        raise ConfigError(f"cannot write {options.html}: {reason}", hint="--html takes a file") from error
    out.print(f"\nwritten: {options.html}; it opens in any browser, without a network", soft_wrap=True)
    return 0


def _series(results: list[str]) -> list[Series]:
    faults: list[str] = []
    runs: list[Run] = []
    for path in results:
        try:
            runs += runs_of(Path(path).name, read(Path(path)))
        except OSError as error:
            faults.append(f"cannot read {path}: {error.strerror or error}")
        except ValueError as error:
            faults.append(str(error))
    if faults:
        raise ConfigError(*faults, hint="give files that pd bench serve or compare wrote with --output")
    return series_of(runs, num_sources=len(set(results)))


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
