"""What `Route.spans` plans, as one array where there are many: the interpreter touches none of them. Pure."""

from __future__ import annotations

import array
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from pd.transfer.native import load
from pd.transfer.plan import Route
from pd.transfer.rows import Rows
from pd.transfer.transport import Span

_MANY, _MANY_FOR_NUMPY = 8, 64
"""Pieces, or more, are planned as an array. 128 take C++ 20 µs, numpy 70, and 110 one by one; where a copy has just
emptied the processor's caches 160, 390 and 420. 8 take C++ 6 (130), numpy 70 (440), one by one 16 (150)."""


def plan(route: Route, src_pages: Sequence[int], dst_pages: Sequence[int], start: int, stop: int) -> Sequence[Span]:
    """What `Route.spans` answers, in whichever form is made sooner. Raises ValueError as it does."""
    native = load()
    num_units = -(-(stop - start) // route.unit)
    num_pieces = num_units * sum(len(lane.pieces) for lane in route.lanes)
    if num_pieces < (_MANY_FOR_NUMPY if native is None else _MANY):
        return route.spans(src_pages, dst_pages, start, stop)
    if native is None:
        route.check(src_pages, dst_pages, start, stop)
        return Rows(_planned(route, src_pages, dst_pages, num_units))
    route.check_counts(len(src_pages), len(dst_pages), start, stop)
    spans = array.array("q", bytes(3 * 8 * num_pieces))
    try:
        num_spans = native.plan(route.table, array.array("q", (num_units, *src_pages, *dst_pages)), spans)
    except OverflowError:  # a page that not even 64 bits hold
        num_spans = -1
    if num_spans < 0:
        route.check(src_pages, dst_pages, start, stop)  # says which page
    del spans[3 * num_spans :]
    return Rows(spans)


def _planned(route: Route, src_pages: Sequence[int], dst_pages: Sequence[int], num_units: int) -> array.array[int]:
    tokens = np.arange(num_units) * route.unit
    src_index, t = np.divmod(tokens, route.layout_src.page_size)
    dst_index, u = np.divmod(tokens, route.layout_dst.page_size)
    p, q = np.array(src_pages, np.int64)[src_index], np.array(dst_pages, np.int64)[dst_index]
    rows = []
    for a, b, parts in route.lanes:
        units = np.zeros((num_units, 3), np.int64)
        units[:, 0], units[:, 1] = p * a.page + t * a.token, q * b.page + u * b.token
        rows.append((units[:, None] + np.array(parts)).reshape(-1, 3))
    return array.array("q", _merged(np.concatenate(rows)).tobytes())


def _merged(rows: NDArray[np.int64]) -> NDArray[np.int64]:
    """Sorted by src, and joined where neighbours touch on both sides."""
    rows = rows[np.argsort(rows[:, 0])]
    is_first = np.ones(len(rows), bool)
    is_first[1:] = (rows[:-1, :2] + rows[:-1, 2:] != rows[1:, :2]).any(axis=1)
    if is_first.all():
        return rows
    (starts,) = np.nonzero(is_first)
    merged = rows[starts]
    merged[:, 2] = np.add.reduceat(rows[:, 2], starts)
    return merged
