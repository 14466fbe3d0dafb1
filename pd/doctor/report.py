"""What people see: a heading a group, a line a check, and under what is wrong what it means and what mends it."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from pd.doctor.catalog import HEADINGS
from pd.doctor.check import Check, Examined
from pd.doctor.result import Result, Status

COLOURS = {Status.PASS: "green", Status.WARN: "yellow", Status.FAIL: "bold red", Status.SKIP: "dim"}
INDENT = 7
"""Under the status word."""
TITLE = 23
"""Columns: the longest title, "Reading a peer's memory"."""
MANY = 8
"""Details of one check; the rest is counted, unless --verbose."""


def group_report(group: str, examined: Sequence[Examined], *, verbose: bool) -> RenderableType:
    """A group's heading and lines. Checks skipped for one reason share a line, unless --verbose."""
    parts: list[RenderableType] = [Text(), Text(HEADINGS.get(group, group), style="bold")]
    for why, same in groupby(examined, key=lambda e: e.result.read if e.result.status is Status.SKIP else None):
        found = list(same)
        if why is not None and len(found) > 1 and not verbose:
            names = ", ".join(e.check.id.partition(".")[2] for e in found)
            parts.append(_line(Status.SKIP, f"{len(found)} checks", f"{why} ({names})"))
        else:
            parts += [_check_report(e, verbose=verbose) for e in found]
    return Group(*parts)


def _check_report(examined: Examined, *, verbose: bool) -> RenderableType:
    check, result = examined.check, examined.result
    parts: list[RenderableType] = [_line(result.status, check.title, result.read)]
    wrong = result.status in (Status.WARN, Status.FAIL)
    if wrong:
        parts.append(_under(_advice(check, result)))
    if result.details and (wrong or verbose):
        shown = result.details if verbose else result.details[:MANY]
        more = [] if len(shown) == len(result.details) else [f"and {len(result.details) - len(shown)} more (--verbose)"]
        parts.append(_under(Text("\n".join((*shown, *more)), style="dim")))
    if verbose:
        parts.append(_under(Text(f"{check.id}, {examined.seconds * 1e3:.0f} ms", style="dim")))
    return Group(*parts)


def _line(status: Status, title: str, read: str) -> RenderableType:
    grid = Table.grid(padding=(0, 1))
    grid.add_column(width=INDENT - 1)
    grid.add_column(width=TITLE)
    grid.add_column(overflow="fold")
    style = "dim" if status is Status.SKIP else ""
    grid.add_row(Text(f" {status.value}", style=COLOURS[status]), Text(title, style=style), Text(read, style=style))
    return grid


def _advice(check: Check, result: Result) -> RenderableType:
    grid = Table.grid(padding=(0, 1))
    grid.add_column(style="cyan")
    grid.add_column(overflow="fold")
    grid.add_row("why", Text(result.means))
    grid.add_row("fix", Text(result.fix))
    grid.add_row("", Text(f"pd doctor --explain {check.id}", style="dim"))
    return grid


def _under(what: RenderableType) -> RenderableType:
    return Padding(what, (0, 0, 0, INDENT))


def summary(examined: Sequence[Examined], seconds: float) -> Text:
    """ "Ready: 31 passed, 2 warnings, 40 skipped, in 8.1 s." """
    counts = {status: sum(e.result.status is status for e in examined) for status in Status}
    failed, warned = counts[Status.FAIL], counts[Status.WARN]
    verdict = "Not ready" if failed else "Ready, with warnings" if warned else "Ready"
    colour = COLOURS[Status.FAIL if failed else Status.WARN if warned else Status.PASS]
    parts = [
        f"{counts[Status.PASS]} passed",
        f"{warned} warning{'s' * (warned != 1)}",
        f"{failed} failed",
        f"{counts[Status.SKIP]} skipped",
    ]
    return Text.assemble((verdict, colour), f": {', '.join(parts)}, in {seconds:.1f} s")


def explain(check: Check, console: Console) -> None:
    console.print(Text.assemble((check.id, "bold"), f"  {check.title}"))
    console.print()
    console.print(Text(_paragraphs(check.explanation)))


def _paragraphs(text: str) -> str:
    """Lines of a paragraph joined, so that they fill whatever width there is."""
    return "\n\n".join(" ".join(part.split()) for part in text.split("\n\n"))
