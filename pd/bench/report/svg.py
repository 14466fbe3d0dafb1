"""Charts as SVG text: axes with round numbers, lines, steps, bars. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#999999")
"""Okabe and Ito's, which most people can tell apart."""
LEFT, RIGHT, TOP, BOTTOM = 58, 14, 12, 40
Point = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Line:
    name: str
    points: Sequence[Point]
    colour: str
    is_dashed: bool = False
    has_marks: bool = False
    is_step: bool = False  # holds each value until the next


@dataclass(frozen=True, slots=True)
class Axis:
    """From data to pixels. `is_log`: decades."""

    low: float
    high: float
    start: float  # pixels
    stop: float
    is_log: bool = False

    def at(self, value: float) -> float:
        low, high, place = self.low, self.high, value
        if self.is_log:
            low, high, place = math.log10(low), math.log10(high), math.log10(max(value, self.low))
        share = (place - low) / (high - low) if high > low else 0.0
        return self.start + min(max(share, 0.0), 1.0) * (self.stop - self.start)

    def ticks(self) -> list[float]:
        return _decades(self.low, self.high) if self.is_log else _round_steps(self.low, self.high)


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    x_label: str
    y_label: str
    width: int = 460
    height: int = 260
    is_log_x: bool = False
    y_high: float | None = None
    x_high: float | None = None
    level: tuple[float, str] | None = None  # a dashed line at this height, and what it means

    def draw(self, lines: Sequence[Line]) -> str:
        """One SVG element; says so where there is nothing to draw."""
        points = [point for line in lines for point in line.points if not self.is_log_x or point[0] > 0]
        if not points:
            return f'<p class="none">nothing to draw for {escape(self.y_label)}</p>'
        x, y = self._axes(points)
        body = _frame(x, y, self)
        if self.level is not None:
            height, means = self.level
            body += _dashes(x.start, x.stop, y.at(height)) + _text(x.stop - 4, y.at(height) - 4, means, "end")
        body += "".join(_line(line, x, y) for line in lines)
        return svg(self.width, self.height, body)

    def _axes(self, points: Sequence[Point]) -> tuple[Axis, Axis]:
        xs, ys = [point[0] for point in points], [point[1] for point in points]
        low, high = (min(xs), max(xs)) if self.is_log_x else (0.0, max(xs))
        high = self.x_high or high
        if self.is_log_x:
            low, high = _around(low, max(high, low * 1.01))
        top = self.y_high or (max(ys) * 1.06 or 1.0)
        return (
            Axis(low, high or 1.0, LEFT, self.width - RIGHT, self.is_log_x),
            Axis(0.0, top, self.height - BOTTOM, TOP),
        )


def svg(width: float, height: float, body: str) -> str:
    return f'<svg viewBox="0 0 {width:g} {height:g}" width="{width:g}" height="{height:g}" role="img">{body}</svg>'


def rect(x: float, y: float, width: float, height: float, *, style: str, title: str = "") -> str:
    """`style`: further attributes; `title` is shown under the pointer."""
    told = f"<title>{escape(title)}</title>" if title else ""
    size = f'width="{max(width, 0.5):.2f}" height="{height:.2f}"'
    return f'<rect x="{x:.2f}" y="{y:.2f}" {size} {style}>{told}</rect>'


def x_axis(axis: Axis, y: float, label: str) -> str:
    """Along the bottom at pixel `y`."""
    found = f'<path d="M{axis.start:g} {y:g}H{axis.stop:g}" class="axis"/>'
    for tick in axis.ticks():
        found += f'<path d="M{axis.at(tick):.1f} {y:g}v4" class="axis"/>' + _text(axis.at(tick), y + 16, number(tick))
    return found + _text((axis.start + axis.stop) / 2, y + 32, label, extra='class="label"')


def number(value: float) -> str:
    """Short: 0.002, 1.5, 20, 3k."""
    if value >= 10_000:
        return f"{value / 1000:g}k"
    return f"{value:.3g}" if value < 1000 else f"{value:g}"


def _frame(x: Axis, y: Axis, chart: Chart) -> str:
    found = x_axis(x, y.start, chart.x_label)
    for tick in y.ticks():
        height = y.at(tick)
        found += f'<path d="M{x.start:g} {height:.1f}H{x.stop:g}" class="grid"/>'
        found += _text(x.start - 6, height + 4, number(tick), "end")
    middle = (y.start + y.stop) / 2
    return found + _text(14, middle, chart.y_label, extra=f'class="label" transform="rotate(-90 14 {middle:g})"')


def _line(line: Line, x: Axis, y: Axis) -> str:
    placed = [(x.at(a), y.at(b)) for a, b in line.points]
    if not placed:
        return ""
    path = f"M{placed[0][0]:.1f} {placed[0][1]:.1f}"
    for across, up in placed[1:]:
        path += f"H{across:.1f}V{up:.1f}" if line.is_step else f"L{across:.1f} {up:.1f}"
    dash = ' stroke-dasharray="5 4"' if line.is_dashed else ""
    found = f'<path d="{path}" fill="none" stroke="{line.colour}" stroke-width="1.8"{dash}/>'
    if line.has_marks:
        for (across, up), (a, b) in zip(placed, line.points, strict=True):
            told = f"<title>{escape(line.name)}: {number(a)}, {number(b)}</title>"
            found += f'<circle cx="{across:.1f}" cy="{up:.1f}" r="3.2" fill="{line.colour}">{told}</circle>'
    return found


def _dashes(start: float, stop: float, y: float) -> str:
    return f'<path d="M{start:g} {y:.1f}H{stop:g}" class="level"/>'


def _text(x: float, y: float, text: str, anchor: str = "middle", extra: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" {extra}>{escape(text)}</text>'


def _round_steps(low: float, high: float, wanted: int = 6) -> list[float]:
    """Multiples of 1, 2 or 5 times a power of ten."""
    rough = (high - low) / wanted
    if rough <= 0:
        return [low]
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough)
    first = math.ceil(low / step)
    return [round(index * step, 12) for index in range(first, math.floor(high / step + 1e-9) + 1)]


def _decades(low: float, high: float) -> list[float]:
    """1, 2 and 5 of each; only 1 where there are many."""
    span = math.log10(high / low)
    factors = (1,) if span > 3 else (1, 2, 5)
    exponents = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    marks = [factor * 10.0**exponent for exponent in exponents for factor in factors]
    return [mark for mark in marks if low * 0.999 <= mark <= high * 1.001]


def _around(low: float, high: float) -> tuple[float, float]:
    """The nearest of 1, 2, 5 times a power of ten, outside."""
    marks = [factor * 10.0**exponent for exponent in range(-9, 9) for factor in (1, 2, 5)]
    below = max((mark for mark in marks if mark <= low), default=low)
    above = min((mark for mark in marks if mark >= high), default=high)
    return below, above
