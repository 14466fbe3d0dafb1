"""KV that is not moved as it lies: whoever moves it makes, or unmakes, an image of the peer's arrangement. Pure.

    write   our pool ──reshard──► image in our staging ──spans──► the peer's pool
    read    the peer's pool ──spans──► image in our staging ──reshard──► our pool

The image is a small pool of the peer's layout that holds just the heads and layers of one pair: so it has the peer's
dtype, page size and axis order, and travels in as few pieces as that order allows. The peer does nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from pd.transfer.layout import KVLayout, Shard, page_nbytes
from pd.transfer.pairs import Pair
from pd.transfer.plan import Route
from pd.transfer.transport import LayoutMismatch, Span

PIECE_NBYTES = 16 << 10
"""What a piece costs, in bytes that would be moved meanwhile: over shared memory half as much (16 KiB pieces reach two
thirds of what one large copy does), by a library more."""

Move = Literal["auto", "direct", "packed"]
Place = tuple[int, int, int, int]


class End(NamedTuple):
    """One rank's pool."""

    layout: KVLayout
    shard: Shard


@dataclass(frozen=True, slots=True)
class PackedWay:
    """Of one pair, from `ours` to `theirs`, or (`is_read`) back. Made once for two peers."""

    ours: End
    theirs: End
    pair: Pair
    is_read: bool
    slot_nbytes: int
    num_pages: int = field(init=False)
    """Of an image that fills a slot."""
    image: End = field(init=False)
    _route: Route = field(init=False, repr=False)

    def __post_init__(self) -> None:
        """Raises LayoutMismatch where not one page of the peer's fits a slot."""
        layout, pair = self.theirs.layout, self.pair
        box = (pair.layers.start, pair.layers.stop, pair.heads.start, pair.heads.stop)
        nbytes = page_nbytes(layout, Shard(*box, 1))
        num_pages = self.slot_nbytes // nbytes
        if not num_pages:
            raise LayoutMismatch(f"a page of theirs is {nbytes} bytes, and staging has slots of {self.slot_nbytes}")
        image = End(layout, Shard(*box, num_pages))
        src, dst = (self.theirs, image) if self.is_read else (image, self.theirs)
        object.__setattr__(self, "num_pages", num_pages)
        object.__setattr__(self, "image", image)
        object.__setattr__(self, "_route", Route(*src, *dst, (pair,)))

    @property
    def unit(self) -> int:
        """Tokens that lie within one page on either side."""
        return math.gcd(self.ours.layout.page_size, self.theirs.layout.page_size)

    def parts(self, num_tokens: int) -> Iterator[range]:
        """Cut the tokens of a job into what fits a slot each."""
        size = self.num_pages * self.theirs.layout.page_size
        for start in range(0, num_tokens, size):
            yield range(start, min(start + size, num_tokens))

    def spans(self, pages: Sequence[int], part: range, *, base: int) -> list[Span]:
        """Between their `pages` of the job and the image, which stands at `base` of our region."""
        size = self.theirs.layout.page_size
        there = pages[part.start // size : -(-part.stop // size)]
        here = range(len(there))
        if self.is_read:
            spans = self._route.spans(there, here, 0, len(part))
            return [Span(src, dst + base, nbytes) for src, dst, nbytes in spans]
        spans = self._route.spans(here, there, 0, len(part))
        return [Span(src + base, dst, nbytes) for src, dst, nbytes in spans]

    def places(self, pages: Sequence[int], part: range) -> list[Place]:
        """(our page, our token, the image's page, its token) of each unit of the part; `pages` are ours."""
        ours, image = self.ours.layout.page_size, self.image.layout.page_size
        return [
            (pages[t // ours], t % ours, (t - part.start) // image, (t - part.start) % image)
            for t in range(part.start, part.stop, self.unit)
        ]

    def pieces(self) -> Pieces:
        """Between the image and the peer's pool."""
        return pieces_of(self._route)


class Pieces(NamedTuple):
    """Of a token, on average, when whole pages of both sides are moved and none are neighbours."""

    nbytes: float
    num: float  # 0: so small a pool has none to tell of

    @property
    def mean(self) -> float:
        """Bytes of one."""
        return self.nbytes / self.num if self.num else math.inf


def pieces_of(route: Route) -> Pieces:
    src, dst = route.layout_src.page_size, route.layout_dst.page_size
    num_tokens = math.lcm(src, dst)
    num_src, num_dst = num_tokens // src, num_tokens // dst
    if route.shard_src.num_pages < 2 * num_src - 1 or route.shard_dst.num_pages < 2 * num_dst - 1:
        return Pieces(0.0, 0.0)
    spans = route.spans(range(0, 2 * num_src, 2), range(0, 2 * num_dst, 2), 0, num_tokens)
    return Pieces(sum(span.nbytes for span in spans) / num_tokens, len(spans) / num_tokens)


def cost(ways: Iterable[Route | PackedWay]) -> float:
    """Of a token by all of these: bytes that are moved, once more where they are packed or unpacked, and what their
    pieces cost."""
    total = 0.0
    for way in ways:
        times, pieces = (2, way.pieces()) if isinstance(way, PackedWay) else (1, pieces_of(way))
        total += times * pieces.nbytes + pieces.num * PIECE_NBYTES
    return total


def choose(direct: Route | None, packed: Sequence[PackedWay], move: Move) -> Sequence[Route | PackedWay]:
    """How two ranks' pairs go: all by one route, or each packed, whichever costs less. `direct` is None where bytes
    cannot be taken as they are, being of another dtype; `packed` is empty where there is no staging.

    Raises LayoutMismatch where `move` asks for what is not there.
    """
    if direct is None or move == "packed":
        if not packed or move == "direct":
            raise LayoutMismatch("KV of another dtype is converted on its way, which takes --move packed or auto")
        return packed
    if move == "direct" or not packed:
        return [direct]
    return packed if cost(packed) < cost([direct]) else [direct]
