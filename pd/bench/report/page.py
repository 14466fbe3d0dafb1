"""One HTML page of runs: no network, no script, the figures inside. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from pd.bench.environment import in_words
from pd.bench.load.metrics import Spread, Summary, summarize
from pd.bench.report.charts import (
    PHASES,
    colour,
    distributions,
    legend_of,
    over_rate,
    phases,
    timeline,
    waterfall,
)
from pd.bench.report.runs import Run, Series, rate_to_show
from pd.bench.report.svg import number

_STYLE = """
body{font:15px/1.45 system-ui,sans-serif;max-width:980px;margin:2em auto;padding:0 1em;color:#222;background:#fff}
h1{font-size:1.5em}h2{font-size:1.2em;margin-top:2em;border-bottom:1px solid #ddd}h3{font-size:1em;margin:1.4em 0 .2em}
figure{display:inline-block;margin:.4em .6em .4em 0;vertical-align:top}figcaption{font-size:.85em;color:#555}
table{border-collapse:collapse;font-size:.88em;font-variant-numeric:tabular-nums}
th,td{padding:.2em .6em;text-align:right;border-bottom:1px solid #eee}
th:first-child,td:first-child{text-align:left}td:nth-child(-n+2){white-space:nowrap}
.scroll{overflow-x:auto}
svg{display:block;max-width:100%;height:auto}svg text{font:11px system-ui,sans-serif;fill:#444}
svg .label{font-size:12px}
.axis{stroke:#444;stroke-width:1;fill:none}.grid{stroke:#e6e6e6;stroke-width:1;fill:none}
.level{stroke:#999;stroke-width:1;stroke-dasharray:3 3;fill:none}.chunk{stroke:#fff;stroke-width:.6;opacity:.8}
.legend{margin:.3em 0;font-size:.88em}.legend span{margin-right:1.2em}
.legend i{display:inline-block;width:.8em;height:.8em;margin-right:.35em}
.note{color:#555;font-size:.88em}
"""


def page(title: str, series: Sequence[Series]) -> str:
    """The whole of it."""
    rate = rate_to_show(series)
    where = "" if rate is None else f" at {number(rate)} requests/s"
    names = legend_of([(escape(one.name), colour(place)) for place, one in enumerate(series)])
    parts = [f"<h1>{escape(title)}</h1>", _about(series), _table(series)]
    if curves := over_rate(series):
        parts += ["<h2>Over the rate</h2>", names, *map(_figure, curves)]
    parts += [f"<h2>Latencies{where}</h2>", names, *map(_figure, distributions(series, rate))]
    parts.append(f"<h2>What went on{where}</h2>")
    for one in series:
        if shown := one.at(rate)[:1]:
            parts += _run(one.name, shown[0])
    head = f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{escape(title)}</title><style>{_STYLE}</style>'
    return head + "\n".join(parts) + "</html>\n"


def rows(series: Sequence[Series]) -> list[tuple[str, Summary]]:
    """A name and the figures of each run, for a table here or on a terminal."""
    found = []
    for one in series:
        for run in one.runs:
            rate = "" if run.head.rate is None else f" {number(run.head.rate)}/s #{run.head.repeat + 1}"
            found.append((one.name + rate, summarize(run.outcomes, run.goals, seconds=run.seconds)))
    return found


def _run(name: str, run: Run) -> list[str]:
    used = [phase for phase in PHASES if any(phase[0] == said for one in run.outcomes for said, _, _ in phases(one))]
    return [
        f"<h3>{escape(name)}</h3>",
        *map(_figure, timeline(run)),
        '<p class="note">The first sixty requests in the order they were due; a white tick is a chunk of tokens</p>',
        legend_of(used),
        waterfall(run),
    ]


def _about(series: Sequence[Series]) -> str:
    found = []
    for one in series:
        run = one.runs[0]
        where = f"{run.head.model}; {in_words(run.head.environment)}" if run.head.environment else run.head.model
        asked = f"{run.head.options.dataset}, {run.head.options.arrival}"
        if text := str(run.goals):
            asked += f", goals {text}"
        found.append(f"<li><b>{escape(one.name)}</b>: {escape(where)}; {escape(asked)}</li>")
    return f'<ul class="note">{"".join(found)}</ul>'


def _table(series: Sequence[Series]) -> str:
    headings = ("run", "ok", "errors", "req/s", "tok/s", "goodput/s", "met %")
    latencies = [f"{name} {mark}" for name in ("TTFT", "ITL", "TPOT", "E2E") for mark in ("p50", "p99")]
    head = "".join(f"<th>{heading}</th>" for heading in (*headings, *latencies, "late p99"))
    body = "".join(f"<tr>{_cells(name, found)}</tr>" for name, found in rows(series))
    table = f'<div class="scroll"><table><tr>{head}</tr>{body}</table></div>'
    return f'<h2>Figures</h2><p class="note">Latencies in ms</p>{table}'


def _cells(name: str, found: Summary) -> str:
    cells = [
        escape(name),
        f"{found.num_ok} of {found.num_requests}",
        escape(", ".join(f"{kind}: {number}" for kind, number in found.errors.items()) or "-"),
        f"{found.requests_s:.2f}",
        f"{found.answer_tokens_s:.1f}",
        "-" if found.goodput_s is None else f"{found.goodput_s:.2f}",
        "-" if found.attainment is None else f"{100 * found.attainment:.0f}",
    ]
    cells += [text for spread in (found.ttft, found.itl, found.tpot, found.e2e) for text in _marks(spread)]
    cells.append(f"{found.late.p99 * 1e3:.1f}")
    return "".join(f"<td>{cell}</td>" for cell in cells)


def _marks(spread: Spread) -> tuple[str, str]:
    return (f"{spread.p50 * 1e3:.1f}", f"{spread.p99 * 1e3:.1f}") if spread.num else ("-", "-")


def _figure(found: tuple[str, str]) -> str:
    caption, drawn = found
    return f"<figure><figcaption>{escape(caption)}</figcaption>{drawn}</figure>"
