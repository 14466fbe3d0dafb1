"""What a report draws: curves over the rate, distributions, a run's timeline, its requests one by one. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from pd.bench.load.metrics import percentile
from pd.bench.load.outcome import Outcome
from pd.bench.report.runs import Instance, Run, Series
from pd.bench.report.svg import COLOURS, Axis, Chart, Line, number, rect, svg, x_axis

Figure = tuple[str, str]
"""A caption and its SVG."""

_MAX_ROWS = 60
_ROW = 9
_BINS = 60
PHASES = (
    ("queued", "#bbbbbb"),
    ("prefill", "#0072b2"),
    ("handoff", "#e69f00"),
    ("decode", "#009e73"),
    ("until the first token", "#88a9c9"),
)
"""The last where the server does not say more."""
_PHASE = dict(PHASES)


def colour(place: int) -> str:
    return COLOURS[place % len(COLOURS)]


def over_rate(series: Sequence[Series]) -> list[Figure]:
    """Empty where nothing ran at two rates or more."""
    if all(len(one.rates) < 2 for one in series):
        return []
    target = next((run.head.options.target for one in series for run in one.runs), 0.9)
    top = max(rate for one in series for rate in one.rates)
    offered = Line("offered", [(0.0, 0.0), (top, top)], "#999999", is_dashed=True)
    found = []
    if all(run.goals for one in series for run in one.runs):
        goodput = [_by_rate(one, place, _goodput) for place, one in enumerate(series)]
        chart = Chart(x_label="arrivals, requests/s", y_label="goodput, requests/s")
        found.append(
            ("Goodput: requests a second that met every goal; dashed: all that arrive", chart.draw([*goodput, offered]))
        )
        shares = [_by_rate(one, place, _attainment) for place, one in enumerate(series)]
        level = (100 * target, f"target {100 * target:.0f} %")
        chart = Chart(x_label="arrivals, requests/s", y_label="requests that met the goals, %", y_high=105, level=level)
        found.append(("Attainment: the part of all requests that met every goal", chart.draw(shares)))
    for name, values in (("TTFT", _ttfts), ("ITL", _gaps)):
        lines = [_by_rate(one, place, _at(values, 99)) for place, one in enumerate(series)]
        chart = Chart(x_label="arrivals, requests/s", y_label=f"{name} p99, ms")
        found.append((f"{name} at p99", chart.draw(lines)))
    return found


def distributions(series: Sequence[Series], rate: float | None) -> list[Figure]:
    """Of all repeats at one rate together."""
    found = []
    for name, values in (("TTFT", _ttfts), ("ITL", _gaps), ("TPOT", _tpots), ("E2E", _e2es)):
        lines = []
        for place, one in enumerate(series):
            ordered = sorted(value * 1e3 for run in one.at(rate) for value in values(run.good))
            lines.append(Line(one.name, _cumulated(ordered), colour(place), is_step=True))
        chart = Chart(x_label=f"{name}, ms", y_label="share, %", is_log_x=True, y_high=100)
        found.append((name, chart.draw(lines)))
    return found


def timeline(run: Run) -> list[Figure]:
    """Queues and batches as the instances said, and tokens as they came."""
    stop = run.seconds or max((one.chunks_s[-1] for one in run.outcomes if one.chunks_s), default=1.0)
    names = list(dict.fromkeys(instance.name for sample in run.samples for instance in sample.instances))
    found = []
    for label, pick in (
        ("waiting", lambda one: one.num_waiting),
        ("running", lambda one: one.num_running),
        ("pages in use, %", _used),
    ):
        lines = [
            Line(name, _said(run, name, pick), colour(place + 2), is_step=True) for place, name in enumerate(names)
        ]
        if any(line.points for line in lines):
            found.append(_wide(f"{label.capitalize()}, as the instances say", label, lines, stop))
    rates = Line("tokens/s", _token_rates(run, stop), colour(0), is_step=True)
    found.append(_wide("Tokens as they came", "tokens/s", [rates], stop))
    lines = [Line("open", _open(run.outcomes, stop), colour(1), is_step=True)]
    caption = "Requests open"
    if handed := _handoffs(run.outcomes):
        lines.append(Line("in handoff", handed, _PHASE["handoff"], is_step=True))
        caption += ", and of them in handoff: from the first token to decode's first"
    found.append(_wide(caption, "requests", lines, stop))
    return found


def _wide(caption: str, y_label: str, lines: Sequence[Line], stop: float) -> Figure:
    chart = Chart(x_label="s", y_label=y_label, x_high=stop, width=940, height=150)
    return caption, legend_of([(line.name, line.colour) for line in lines]) + chart.draw(lines)


def _said(run: Run, name: str, pick: Callable[[Instance], float | None]) -> list[tuple[float, float]]:
    found = [(sample.at_s, pick(one)) for sample in run.samples for one in sample.instances if one.name == name]
    return [(at_s, float(value)) for at_s, value in found if value is not None]


def waterfall(run: Run) -> str:
    """A row a request, in the order they were due: its phases as bars, each chunk as a tick."""
    rows = [one for one in sorted(run.outcomes, key=lambda one: one.due_s) if one.chunks_s or one.error][:_MAX_ROWS]
    stop = max((one.chunks_s[-1] for one in rows if one.chunks_s), default=1.0)
    start = min((one.due_s for one in rows), default=0.0)
    axis = Axis(start, max(stop, start + 1e-3), 58, 926)
    body = ""
    for place, one in enumerate(rows):
        y = 6 + place * _ROW
        for phase, begin, end in phases(one):
            style = f'fill="{_PHASE[phase]}"'
            told = f"request {one.index}: {phase} {number((end - begin) * 1e3)} ms"
            body += rect(axis.at(begin), y, axis.at(end) - axis.at(begin), _ROW - 3, style=style, title=told)
        ticks = "".join(f"M{axis.at(moment):.1f} {y:g}v{_ROW - 3}" for moment in one.chunks_s[1:])
        body += f'<path d="{ticks}" class="chunk"/>' if ticks else ""
        if one.error is not None:
            body += rect(axis.at(one.due_s), y, 6, _ROW - 3, style='fill="#d55e00"', title=f"{one.index}: {one.error}")
    bottom = 10 + len(rows) * _ROW
    return svg(940, bottom + 40, body + x_axis(axis, bottom, "s"))


def phases(one: Outcome) -> list[tuple[str, float, float]]:
    """(phase, from, to). By the router's durations where it said them, laid against the first token's arrival."""
    if not one.chunks_s:
        return []
    first, last = one.chunks_s[0], one.chunks_s[-1]
    second = one.chunks_s[1] if len(one.chunks_s) > 1 else first
    said = one.timings or {}
    if "prefill_s" not in said:
        return [("until the first token", one.due_s, first), ("decode", first, last)]
    begun = max(one.due_s, first - said["prefill_s"])
    handed = min(second, first + said.get("handoff_s", 0.0))
    return [
        ("queued", one.due_s, begun),
        ("prefill", begun, first),
        ("handoff", first, handed),
        ("decode", handed, last),
    ]


def legend_of(entries: Sequence[tuple[str, str]]) -> str:
    shown = "".join(f'<span><i style="background:{tint}"></i>{name}</span>' for name, tint in entries)
    return f'<p class="legend">{shown}</p>'


# ---- values --------------------------------------------------------------------------------------------------


def _ttfts(good: Sequence[Outcome]) -> list[float]:
    return [one.ttft_s for one in good if one.ttft_s is not None]


def _gaps(good: Sequence[Outcome]) -> list[float]:
    return [gap for one in good for gap in one.gaps_s]


def _tpots(good: Sequence[Outcome]) -> list[float]:
    return [one.tpot_s for one in good if one.tpot_s is not None]


def _e2es(good: Sequence[Outcome]) -> list[float]:
    return [one.e2e_s for one in good if one.e2e_s is not None]


def _goodput(runs: Sequence[Run]) -> float:
    met = sum(run.goals.are_met(one) for run in runs for one in run.counted)
    return met / max(1e-9, sum(run.seconds for run in runs))


def _attainment(runs: Sequence[Run]) -> float:
    met = sum(run.goals.are_met(one) for run in runs for one in run.counted)
    return 100 * met / max(1, sum(len(run.counted) for run in runs))


def _at(values: Callable[[Sequence[Outcome]], list[float]], percent: float) -> Callable[[Sequence[Run]], float]:
    def found(runs: Sequence[Run]) -> float:
        ordered = sorted(value for run in runs for value in values(run.good))
        return percentile(ordered, percent) * 1e3 if ordered else 0.0

    return found


def _by_rate(series: Series, place: int, value: Callable[[Sequence[Run]], float]) -> Line:
    points = [(rate, value(series.at(rate))) for rate in series.rates]
    return Line(series.name, points, colour(place), has_marks=True)


def _cumulated(ordered: Sequence[float], most: int = 400) -> list[tuple[float, float]]:
    """At most so many points: a page holds thousands of gaps otherwise."""
    num = len(ordered)
    places = sorted({round(index * (num - 1) / most) for index in range(most + 1)}) if num > most else range(num)
    return [(ordered[place], 100 * (place + 1) / num) for place in places]


def _used(one: Instance) -> float | None:
    free, whole = one.num_free_pages, one.num_pages
    return None if free is None or not whole else 100 * (whole - free) / whole


def _token_rates(run: Run, stop: float) -> list[tuple[float, float]]:
    width = max(stop / _BINS, 1e-3)
    counts = [0.0] * (_BINS + 1)
    for one in run.outcomes:
        share = one.num_tokens / len(one.chunks_s) if one.chunks_s else 0.0
        for moment in one.chunks_s:
            counts[min(_BINS, max(0, int(moment / width)))] += share
    return [(index * width, count / width) for index, count in enumerate(counts[:_BINS])]


def _open(outcomes: Sequence[Outcome], stop: float) -> list[tuple[float, float]]:
    spans = [(one.due_s, one.chunks_s[-1] if one.chunks_s else stop) for one in outcomes if one.error is None]
    return _depth(spans)


def _handoffs(outcomes: Sequence[Outcome]) -> list[tuple[float, float]]:
    found = [span for one in outcomes for span in phases(one) if span[0] == "handoff" and span[2] > span[1]]
    return _depth([(begin, end) for _, begin, end in found])


def _depth(spans: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """How many hold at each moment."""
    moments = sorted([(begin, 1) for begin, _ in spans] + [(end, -1) for _, end in spans])
    points, depth = ([(0.0, 0.0)] if moments else []), 0
    for at_s, change in moments:
        depth += change
        points.append((at_s, float(depth)))
    return points
