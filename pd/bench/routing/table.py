"""What sides did, side by side."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rich.table import Table

from pd.bench.load.metrics import Summary
from pd.bench.routing.measure import CONCURRENCY, IDLE, REQUESTS, STREAMS, Side, Tally

_UNITS = {IDLE: "num_ok", REQUESTS: "num_ok", STREAMS: "answer_tokens"}
"""What CPU time is divided by: a request, a streamed token."""


def table(direct: Side, routers: Sequence[Side]) -> Table:
    """A column a side; "-" for what was not measured."""
    found = Table(box=None, pad_edge=False)
    found.add_column("")
    for name in ("direct", "our router", *(side.name for side in routers[1:])):
        found.add_column(name, justify="right")
    sides = (direct, *routers)

    def row(name: str, what: str, cell: Callable[[Tally, Summary], str]) -> None:
        tallies = [side.found.get(what) for side in sides]
        found.add_row(name, *("-" if tally is None else cell(tally, tally.summary()) for tally in tallies))

    row(f"requests/s, {CONCURRENCY} at once", REQUESTS, lambda _, seen: f"{seen.requests_s:.0f}")
    row("CPU µs a request", REQUESTS, lambda tally, _: f"{cpu_us(REQUESTS, tally):.0f}")
    row("streamed tokens/s", STREAMS, lambda _, seen: f"{seen.answer_tokens_s:.0f}")
    row("CPU µs a streamed token", STREAMS, lambda tally, _: f"{cpu_us(STREAMS, tally):.0f}")
    row("ITL p50 / p99 of the streams, ms", STREAMS, lambda _, seen: _pair(seen))
    row("TTFT p50, idle, ms", IDLE, lambda _, seen: f"{seen.ttft.p50 * 1e3:.2f}")
    if IDLE in direct.found:
        least = direct.found[IDLE].summary().ttft.p50
        row("  of that added by the router", IDLE, lambda _, seen: f"{(seen.ttft.p50 - least) * 1e3:.2f}")
    return found


def cpu_us(what: str, tally: Tally) -> float:
    """Microseconds of CPU time a request or a streamed token."""
    num: int = getattr(tally.summary(), _UNITS[what])
    return tally.cpu_s / max(1, num) * 1e6


def _pair(found: Summary) -> str:
    return f"{found.itl.p50 * 1e3:.1f} / {found.itl.p99 * 1e3:.1f}"
