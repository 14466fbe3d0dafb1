"""Which bytes of one rank's pool go where in another's. Pure.

Rules
1. A `Route` is computed once for two peers; a request costs pages × pieces.
2. The unit is gcd(page sizes) tokens, which lie within one page on either side. Equal page sizes
   make it a whole page, so the unused tail of a last page is copied too and a page's heads stay contiguous.
3. Spans come in the order of their source, merged wherever neighbours touch on both sides, also across pages.
"""

from __future__ import annotations

import array
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from pd.transfer.layout import KVLayout, Shard, Strides, strides
from pd.transfer.pairs import Pair, pair_up
from pd.transfer.transport import Span


class Lane(NamedTuple):
    """Pieces that share their strides: K and V together, or each its own where their heads differ in size."""

    src: Strides
    dst: Strides
    pieces: tuple[Span, ...]  # of one unit, relative to page 0, token 0; by src; no two neighbours touch


@dataclass(frozen=True, slots=True)
class Route:
    """The way of all pairs of two ranks, or some: made once for two peers, asked for each write."""

    layout_src: KVLayout
    shard_src: Shard
    layout_dst: KVLayout
    shard_dst: Shard
    pairs: tuple[Pair, ...]
    unit: int = field(init=False)
    """Tokens copied together: the greatest common divisor of both page sizes."""
    lanes: tuple[Lane, ...] = field(init=False, repr=False)
    table: array.array[int] = field(init=False, repr=False, compare=False)
    """All of it that C++ has to know (kernels/cpu/bytes/bytes.h)."""

    @property
    def src(self) -> int:
        """The rank that has it."""
        return self.pairs[0].src

    @property
    def dst(self) -> int:
        return self.pairs[0].dst

    def __post_init__(self) -> None:
        unit = math.gcd(self.layout_src.page_size, self.layout_dst.page_size)
        object.__setattr__(self, "unit", unit)
        object.__setattr__(self, "lanes", _lanes(self))
        object.__setattr__(self, "table", _table(self))

    def spans(self, src_pages: Sequence[int], dst_pages: Sequence[int], start: int, stop: int) -> list[Span]:
        """Copies that move tokens [start, stop). Pages are each side's numbers, the first holding `start`.

        `start` is a multiple of both page sizes. Tokens beyond `stop` up to the next multiple of `unit` are
        copied too, within the same pages. Raises ValueError where start, pages or page numbers do not fit.
        """
        self.check(src_pages, dst_pages, start, stop)
        if start == stop:
            return []
        size_src, size_dst = self.layout_src.page_size, self.layout_dst.page_size
        if size_src == size_dst:
            places = [(p, 0, q, 0) for p, q in zip(src_pages, dst_pages, strict=True)]
        else:
            places = [
                (src_pages[t // size_src], t % size_src, dst_pages[t // size_dst], t % size_dst)
                for t in range(0, stop - start, self.unit)
            ]
        pieces: list[Span] = []
        for a, b, parts in self.lanes:
            a_page, a_token, b_page, b_token = a.page, a.token, b.page, b.token
            if len(parts) == 1:
                ((src, dst, nbytes),) = parts
                pieces += [
                    Span(p * a_page + t * a_token + src, q * b_page + u * b_token + dst, nbytes)
                    for p, t, q, u in places
                ]
                continue
            for p, t, q, u in places:
                at_src, at_dst = p * a_page + t * a_token, q * b_page + u * b_token
                pieces += [Span(at_src + src, at_dst + dst, nbytes) for src, dst, nbytes in parts]
        return _merged(pieces)

    def check(self, src_pages: Sequence[int], dst_pages: Sequence[int], start: int, stop: int) -> None:
        """Raises ValueError as `spans` does."""
        self.check_counts(len(src_pages), len(dst_pages), start, stop)
        for side, pages, shard in (
            ("source", src_pages, self.shard_src),
            ("destination", dst_pages, self.shard_dst),
        ):
            if pages and not 0 <= min(pages) <= max(pages) < shard.num_pages:
                raise ValueError(f"{side} pages {min(pages)}..{max(pages)} are not within 0..{shard.num_pages - 1}")

    def check_counts(self, num_src: int, num_dst: int, start: int, stop: int) -> None:
        """All of `check` but the pages' numbers."""
        for side, num_pages, layout in (
            ("source", num_src, self.layout_src),
            ("destination", num_dst, self.layout_dst),
        ):
            page_size = layout.page_size
            if start % page_size or stop < start:
                raise ValueError(f"tokens [{start}, {stop}) begin at no {side} page of {page_size} tokens")
            if num_pages != -(-(stop - start) // page_size):
                raise ValueError(f"{num_pages} {side} pages of {page_size} for tokens [{start}, {stop})")


def routes_between(
    layout_src: KVLayout, src: Sequence[Shard], layout_dst: KVLayout, dst: Sequence[Shard]
) -> list[Route]:
    """One for each two ranks that have something to move. Raises LayoutMismatch as `pair_up` does."""
    by_ranks = itertools.groupby(pair_up(src, dst), key=lambda pair: (pair.src, pair.dst))
    return [Route(layout_src, src[s], layout_dst, dst[d], tuple(pairs)) for (s, d), pairs in by_ranks]


def _lanes(route: Route) -> tuple[Lane, ...]:
    lanes: dict[tuple[int, ...], Lane] = {}
    src = strides(route.layout_src, route.shard_src)
    dst = strides(route.layout_dst, route.shard_dst)
    for a, b in zip(src, dst, strict=True):
        key = (a.page, b.page, a.token, b.token)
        known = lanes[key].pieces if key in lanes else ()
        lanes[key] = Lane(a, b, (*known, *_pieces(route, a, b)))
    return tuple(lane._replace(pieces=tuple(_merged(list(lane.pieces)))) for lane in lanes.values())


def _table(route: Route) -> array.array[int]:
    sizes = (route.layout_src.page_size, route.layout_dst.page_size)
    pools = (route.shard_src.num_pages, route.shard_dst.num_pages)
    table = array.array("q", (route.unit, *sizes, *pools, len(route.lanes)))
    for a, b, pieces in route.lanes:
        table.extend((a.page, a.token, b.page, b.token, len(pieces), *itertools.chain.from_iterable(pieces)))
    return table


def _pieces(route: Route, a: Strides, b: Strides) -> Iterator[Span]:
    """One unit of K (or V) of page 0, cut into pieces contiguous on both sides."""
    for pair in route.pairs:
        yield from _pieces_of(route, pair, a, b)


def _pieces_of(route: Route, pair: Pair, a: Strides, b: Strides) -> Iterator[Span]:
    def first(s: Strides, shard: Shard) -> int:
        head, layer = pair.heads.start - shard.head_start, pair.layers.start - shard.layer_start
        return s.offset(page=0, head=head, layer=layer, token=0)

    base_src, base_dst = first(a, route.shard_src), first(b, route.shard_dst)
    axes = [
        (len(pair.heads), a.head, b.head),
        (len(pair.layers), a.layer, b.layer),
        (route.unit, a.token, b.token),
        (a.num_dims, a.dim, b.dim),
    ]
    nbytes = route.layout_src.itemsize
    rest: list[tuple[int, int, int]] = []
    for extent, step_src, step_dst in sorted(axes, key=lambda axis: axis[1]):  # innermost of src first
        if extent == 1:
            continue
        if not rest and step_src == step_dst == nbytes:
            nbytes *= extent
        else:
            rest.append((extent, step_src, step_dst))
    steps = [[(i * by_src, i * by_dst) for i in range(extent)] for extent, by_src, by_dst in reversed(rest)]
    for moves in itertools.product(*steps):
        yield Span(base_src + sum(m[0] for m in moves), base_dst + sum(m[1] for m in moves), nbytes)


def _merged(pieces: list[Span]) -> list[Span]:
    """Sorts `pieces` by src. No two overlap there, so those that touch stand next to each other."""
    pieces.sort()
    if not any(b[0] == a[0] + a[2] and b[1] == a[1] + a[2] for a, b in itertools.pairwise(pieces)):
        return pieces  # scattered pages: half the time of making each anew
    merged: list[Span] = []
    src, dst, nbytes = pieces[0]
    for piece in pieces[1:]:
        if piece.src == src + nbytes and piece.dst == dst + nbytes:
            nbytes += piece.nbytes
        else:
            merged.append(Span(src, dst, nbytes))
            src, dst, nbytes = piece
    merged.append(Span(src, dst, nbytes))
    return merged
