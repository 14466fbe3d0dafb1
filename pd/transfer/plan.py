"""Which bytes of one rank's pool go where in another's. Pure.

Rules
1. `pair_up` and `Route` are computed once for two peers; a request costs pages × pieces.
2. The unit is gcd(page sizes) tokens, which lie within one page on either side. Equal page sizes
   make it a whole page, so the unused tail of a last page is copied too and a page's heads stay contiguous.
3. Spans come in the order of their source, merged wherever neighbours touch on both sides, also across pages.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from pd.transfer.layout import KVLayout, Shard, Strides, strides
from pd.transfer.transport import LayoutMismatch, Span


class Pair(NamedTuple):
    """Rank `src` owes rank `dst` these layers and heads of every page; ranges count in the whole model."""

    src: int
    dst: int
    layers: range
    heads: range


def pair_up(src: Sequence[Shard], dst: Sequence[Shard]) -> tuple[Pair, ...]:
    """Give each destination layer and head exactly one source rank; pairs ordered by (src, dst).

    Where several source ranks hold the same part, those who want it are dealt out in blocks (the i-th of W
    goes to holder i·R // W, the usual formula), unless the least loaded holders leave the busiest less to do. In the
    end no source has a part that a holder with two parts less could send.
    Raises LayoutMismatch naming a part that no source holds.
    """
    cuts_layer = sorted({edge for s in (*src, *dst) for edge in (s.layer_start, s.layer_stop)})
    segments = [range(a, b) for a, b in itertools.pairwise(cuts_layer)]
    heads = sorted({head for d in dst for head in d.heads})
    atoms = [_Atom.of(segment, head, src, dst) for segment in segments for head in heads]
    load = [0] * len(src)  # layers × heads given to each source so far
    dealt: list[tuple[_Atom, list[int]]] = []
    for atom in sorted((a for a in atoms if a.wanted_by), key=lambda a: len(a.held_by)):  # least choice first
        sources = atom.deal(load)
        dealt.append((atom, sources))
        for s in sources:
            load[s] += len(atom.layers)
    while any(atom.level(sources, load) for atom, sources in dealt):
        pass
    given: dict[tuple[int, int], list[tuple[range, int]]] = {}
    for atom, sources in dealt:
        for s, d in zip(sources, atom.wanted_by, strict=True):
            given.setdefault((s, d), []).append((atom.layers, atom.head))
    return tuple(Pair(s, d, *box) for (s, d), parts in sorted(given.items()) for box in _boxes(parts))


class _Atom(NamedTuple):
    """One head of a run of layers that no shard cuts through."""

    layers: range
    head: int
    held_by: list[int]
    wanted_by: list[int]

    @classmethod
    def of(cls, layers: range, head: int, src: Sequence[Shard], dst: Sequence[Shard]) -> _Atom:
        def having(shards: Sequence[Shard]) -> list[int]:
            return [i for i, s in enumerate(shards) if layers.start in s.layers and head in s.heads]

        atom = cls(layers, head, having(src), having(dst))
        if atom.wanted_by and not atom.held_by:
            raise LayoutMismatch(
                f"rank {atom.wanted_by[0]} needs layers {layers.start}..{layers.stop - 1} of KV head {head}, "
                f"which none of the {len(src)} source ranks holds"
            )
        return atom

    def deal(self, load: Sequence[int]) -> list[int]:
        """A source for each of `wanted_by`, in its order."""
        num_holders, num_wanting = len(self.held_by), len(self.wanted_by)
        blocks = [self.held_by[i * num_holders // num_wanting] for i in range(num_wanting)]
        filled: list[int] = []
        for _ in self.wanted_by:
            filled.append(min(self.held_by, key=lambda s: load[s] + filled.count(s) * len(self.layers)))

        def busiest(choice: list[int]) -> int:
            return max(load[s] + choice.count(s) * len(self.layers) for s in self.held_by)

        return blocks if busiest(blocks) <= busiest(filled) else sorted(filled)

    def level(self, sources: list[int], load: list[int]) -> bool:
        """Hand parts of busy sources to holders that have two parts less, in place. Whether any was."""
        size, has_moved = len(self.layers), False
        for i, busy in enumerate(sources):
            least = min(self.held_by, key=load.__getitem__)
            if load[busy] - load[least] >= 2 * size:
                load[busy] -= size
                load[least] += size
                sources[i], has_moved = least, True
        return has_moved


def _boxes(parts: list[tuple[range, int]]) -> Iterator[tuple[range, range]]:
    """Join atoms to boxes: neighbouring heads of a segment, then neighbouring segments alike in heads."""
    runs: list[tuple[range, range]] = []
    for layers, head in sorted(parts, key=lambda part: (part[0].start, part[1])):
        if runs and runs[-1][0] == layers and runs[-1][1].stop == head:
            runs[-1] = (layers, range(runs[-1][1].start, head + 1))
        else:
            runs.append((layers, range(head, head + 1)))
    boxes: list[tuple[range, range]] = []
    for layers, heads in sorted(runs, key=lambda run: (run[1].start, run[1].stop, run[0].start)):
        if boxes and boxes[-1][1] == heads and boxes[-1][0].stop == layers.start:
            boxes[-1] = (range(boxes[-1][0].start, layers.stop), heads)
        else:
            boxes.append((layers, heads))
    yield from boxes


class _Lane(NamedTuple):
    """Pieces that share their strides: K and V together, or each its own where their heads differ in size."""

    src: Strides
    dst: Strides
    pieces: tuple[Span, ...]  # of one unit, relative to page 0, token 0; by src; no two neighbours touch


@dataclass(frozen=True, slots=True)
class Route:
    """The way of one pair between two peers: made once, asked for each write."""

    layout_src: KVLayout
    shard_src: Shard
    layout_dst: KVLayout
    shard_dst: Shard
    pair: Pair
    unit: int = field(init=False)
    """Tokens copied together: the greatest common divisor of both page sizes."""
    _lanes: tuple[_Lane, ...] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        unit = math.gcd(self.layout_src.page_size, self.layout_dst.page_size)
        object.__setattr__(self, "unit", unit)
        object.__setattr__(self, "_lanes", _lanes(self))

    def spans(self, src_pages: Sequence[int], dst_pages: Sequence[int], start: int, stop: int) -> list[Span]:
        """Copies that move tokens [start, stop). Pages are each side's numbers, the first holding `start`.

        `start` is a multiple of both page sizes. Tokens beyond `stop` up to the next multiple of `unit` are
        copied too, within the same pages. Raises ValueError where start, pages or page numbers do not fit.
        """
        self._check(src_pages, dst_pages, start, stop)
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
        for a, b, parts in self._lanes:
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

    def _check(self, src_pages: Sequence[int], dst_pages: Sequence[int], start: int, stop: int) -> None:
        sides = (
            ("source", src_pages, self.layout_src.page_size, self.shard_src.num_pages),
            ("destination", dst_pages, self.layout_dst.page_size, self.shard_dst.num_pages),
        )
        for side, pages, page_size, num_pages in sides:
            if start % page_size or stop < start:
                raise ValueError(f"tokens [{start}, {stop}) begin at no {side} page of {page_size} tokens")
            if len(pages) != -(-(stop - start) // page_size):
                raise ValueError(f"{len(pages)} {side} pages of {page_size} for tokens [{start}, {stop})")
            if pages and not 0 <= min(pages) <= max(pages) < num_pages:
                raise ValueError(f"{side} pages {min(pages)}..{max(pages)} are not within 0..{num_pages - 1}")


def _lanes(route: Route) -> tuple[_Lane, ...]:
    lanes: dict[tuple[int, ...], _Lane] = {}
    src = strides(route.layout_src, route.shard_src)
    dst = strides(route.layout_dst, route.shard_dst)
    for a, b in zip(src, dst, strict=True):
        key = (a.page, b.page, a.token, b.token)
        known = lanes[key].pieces if key in lanes else ()
        lanes[key] = _Lane(a, b, (*known, *_pieces(route, a, b)))
    return tuple(lane._replace(pieces=tuple(_merged(list(lane.pieces)))) for lane in lanes.values())


def _pieces(route: Route, a: Strides, b: Strides) -> Iterator[Span]:
    """One unit of K (or V) of page 0, cut into pieces contiguous on both sides."""
    pair = route.pair

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
