"""Which bytes go where between one rank of ours and a peer's, by which way; worked out once for two peers."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from pd.transfer.layout import KVLayout, Shard
from pd.transfer.packed import End, Move, PackedWay, choose
from pd.transfer.plan import Pair, Route

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
        return tuple((self.names[pair.dst], self._way(pair, pair.dst, is_read=False)) for pair in pairs)

    def back(self, pairs: Iterable[Pair]) -> Ways:
        return tuple((self.names[pair.src], self._way(pair, pair.src, is_read=True)) for pair in pairs)

    def _way(self, pair: Pair, rank: int, *, is_read: bool) -> Way:
        theirs = End(self.layout, self.shards[rank])
        packed = None
        if self.slot_nbytes is not None:
            packed = PackedWay(self.ours, theirs, pair, is_read, self.slot_nbytes)
        src, dst = (theirs, self.ours) if is_read else (self.ours, theirs)
        is_alike = self.ours.layout.dtype == self.layout.dtype
        return choose(Route(*src, *dst, pair) if is_alike else None, packed, self.move)


def say(ways: Ways) -> None:
    """Log those that are packed."""
    for _, way in ways:
        if isinstance(way, PackedWay):
            ours, theirs = way.ours.layout.dtype, way.theirs.layout.dtype
            why = "pieces are larger so" if ours == theirs else f"{ours} here, {theirs} there"
            log.info("KV is packed: %s; pieces of %.0f KiB", why, way.piece_nbytes() / 1024)


def cut(pairs: Iterable[Pair], groups: Iterable[range]) -> Iterator[list[Pair]]:
    """The pairs' share of each group of layers."""
    for layers in groups:
        both = [(p, range(max(p.layers.start, layers.start), min(p.layers.stop, layers.stop))) for p in pairs]
        yield [pair._replace(layers=some) for pair, some in both if some]
