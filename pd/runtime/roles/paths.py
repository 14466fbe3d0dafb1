"""Which bytes go where between one rank of ours and a peer's, by which way; worked out once for two peers."""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from pd.transfer.layout import KVLayout, Shard, page_nbytes, split
from pd.transfer.packed import End, Move, PackedWay, choose, pieces_of
from pd.transfer.pairs import Pair
from pd.transfer.plan import Route
from pd.transfer.transport import LayoutMismatch

log = logging.getLogger("pd.rank")

Way = Route | PackedWay
Ways = tuple[tuple[str, Way], ...]
"""The peer rank's transport name, and which bytes go where."""


@dataclass(frozen=True, slots=True)
class Paths:
    """From `ours`, and back. `slot_nbytes`: of our staging; None: there is none. Raises LayoutMismatch where no
    way is."""

    ours: End
    layout: KVLayout  # the peer's, with the shards and names of its ranks
    shards: tuple[Shard, ...]
    names: tuple[str, ...]
    slot_nbytes: int | None
    move: Move

    def out(self, pairs: Iterable[Pair]) -> Ways:
        """`pairs` come from `pair_up`, in its order."""
        return self._by_rank(itertools.groupby(pairs, key=lambda pair: pair.dst), is_read=False)

    def back(self, pairs: Iterable[Pair]) -> Ways:
        return self._by_rank(itertools.groupby(pairs, key=lambda pair: pair.src), is_read=True)

    def _by_rank(self, grouped: Iterable[tuple[int, Iterator[Pair]]], *, is_read: bool) -> Ways:
        return tuple(
            (self.names[rank], way) for rank, pairs in grouped for way in self._ways(tuple(pairs), rank, is_read)
        )

    def _ways(self, pairs: tuple[Pair, ...], rank: int, is_read: bool) -> Sequence[Way]:
        theirs = End(self.layout, self.shards[rank])
        src, dst = (theirs, self.ours) if is_read else (self.ours, theirs)
        is_alike = self.ours.layout.dtype == self.layout.dtype
        if not is_alike and self.move == "direct":
            raise LayoutMismatch(
                f"dtype: KV is {self.layout.dtype} there and {self.ours.layout.dtype} here, "
                "and it is converted on its way with --move packed or auto only"
            )
        direct = Route(*src, *dst, pairs) if is_alike else None
        return choose(direct, self._packed(pairs, theirs, is_read), self.move)

    def _packed(self, pairs: tuple[Pair, ...], theirs: End, is_read: bool) -> list[PackedWay]:
        """None where there is no staging; nor where a page is too large for it and KV can go as it lies."""
        slot_nbytes, layout = self.slot_nbytes, self.layout
        if slot_nbytes is None:
            return []
        least = page_nbytes(layout, Shard(0, 1, 0, 1, 1))
        if least <= slot_nbytes:
            boxes = (box for pair in pairs for box in fitting(pair, layout, slot_nbytes))
            return [PackedWay(self.ours, theirs, box, is_read, slot_nbytes) for box in boxes]
        is_alike, most = self.ours.layout.dtype == layout.dtype, layout.page_size * slot_nbytes // least
        if is_alike and self.move != "packed":
            return []
        raise LayoutMismatch(
            f"a page there is {layout.page_size} tokens, of one head and layer {least} bytes, and KV is packed in "
            f"slots of {slot_nbytes}: it takes --page-size {most} or less there"
            + (", or --move auto here" if is_alike else "")
        )


def fitting(pair: Pair, layout: KVLayout, nbytes: int) -> Iterator[Pair]:
    """Cut into parts, of which one page each is `nbytes` at most (of one head and layer it must be): by heads, which
    stand outermost; then by layers."""
    heads, layers = pair.heads, pair.layers
    if page_nbytes(layout, Shard(layers.start, layers.stop, heads.start, heads.stop, 1)) <= nbytes:
        yield pair
    elif len(heads) > 1:
        for half in split(len(heads), 2):
            yield from fitting(pair._replace(heads=heads[half.start : half.stop]), layout, nbytes)
    else:
        assert len(layers) > 1, f"of one head and layer a page of {layout.page_size} tokens is more than {nbytes} bytes"
        for half in split(len(layers), 2):
            yield from fitting(pair._replace(layers=layers[half.start : half.stop]), layout, nbytes)


def say(peer: str, ways: Ways, move: Move) -> None:
    """Log how KV is moved between this rank and the peer's, and why so: a line for each of the two."""
    packed = [way for _, way in ways if isinstance(way, PackedWay)]
    direct = [way for _, way in ways if isinstance(way, Route)]
    if packed:
        ours, theirs = packed[0].ours.layout.dtype, packed[0].theirs.layout.dtype
        asked = "as --move says" if move == "packed" else "pieces are larger so"
        why = asked if ours == theirs else f"{ours} here, {theirs} there"
        log.info("KV is packed: %s; to or from %s, %s", why, peer, _sizes(way.pieces().mean for way in packed))
    if direct:
        log.info("KV goes as it lies, to or from %s, %s", peer, _sizes(pieces_of(way).mean for way in direct))


def _sizes(pieces: Iterable[float]) -> str:
    """Of pieces on average. A pool of a few pages has none to tell of."""
    sizes = sorted(f for f in pieces if f < math.inf)
    if not sizes:
        return "in a few pieces"
    least, most = (f"{f:.0f} bytes" if f < 1024 else f"{f / 1024:.0f} KiB" for f in (sizes[0], sizes[-1]))
    return f"in pieces of {least}" if least == most else f"in pieces of {least} to {most}"


def cut(pairs: Iterable[Pair], groups: Iterable[range]) -> Iterator[list[Pair]]:
    """The pairs' share of each group of layers."""
    for layers in groups:
        both = [(p, range(max(p.layers.start, layers.start), min(p.layers.stop, layers.stop))) for p in pairs]
        yield [pair._replace(layers=some) for pair, some in both if some]
