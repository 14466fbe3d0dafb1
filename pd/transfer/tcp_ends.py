"""How bytes get from a region into a connection and back: straight, or, where the region is a GPU's, through pinned
host memory in portions, of which one travels while the device copies the next.

    out   region ──device──► portion k+1 │ portion k ──socket──►          three portions: one may still be unsent
    in    ──socket──► portion k+1 │ portion k ──device──► region          two

Rules
1. One connection's, and of its thread. `then` is called when the last byte is in the region, not before.
2. A portion is given to the socket when the device has filled it, and filled again when the socket has taken it: a link
   looks no further ahead than `window` pieces.
3. `close` returns when the device writes nothing of this connection's into the region any more.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from pd.transfer.device import Device, Mark, Move, Pinned, wait
from pd.transfer.region import Region
from pd.transfer.transport import TransferError

PORTION_NBYTES = 1 << 20
"""50 µs of a device's copying beside 300 µs of a fast network's; a connection pins five at the most."""

_NUM_OUT, _NUM_IN = 3, 2

Piece = tuple[int, int]
"""Offset in the region, bytes."""
Expect = Callable[[Iterable[memoryview], Callable[[], None]], None]


class Ends(Protocol):
    window: int | None
    """Pieces that a link may hold unsent; None: as many as it likes."""

    def out(self, pieces: Sequence[Piece]) -> Iterator[memoryview]:
        """What to send for these pieces, in order. Taken when there is room for it."""

    def take_in(self, pieces: Sequence[Piece], expect: Expect, then: Callable[[], None]) -> None:
        """Have a link `expect` as many bytes, and put them there."""

    def close(self) -> None: ...


class HostEnds:
    """Of a region in host memory: the socket's own copy is the only one."""

    window: int | None = None

    def __init__(self, region: Region) -> None:
        self._view = region.view

    def out(self, pieces: Sequence[Piece]) -> Iterator[memoryview]:
        for offset, nbytes in pieces:
            yield self._view[offset : offset + nbytes]

    def take_in(self, pieces: Sequence[Piece], expect: Expect, then: Callable[[], None]) -> None:
        expect([self._view[offset : offset + nbytes] for offset, nbytes in pieces], then)

    def close(self) -> None:
        self._view = memoryview(b"")


class _Part(NamedTuple):
    """Of a portion: where it lies in the region and in the portion."""

    offset: int
    at: int
    nbytes: int


@dataclass(slots=True, eq=False)
class _Portion:
    memory: Pinned
    mark: Mark | None = None  # of the last copy from or to it, while that may still go on


@dataclass(slots=True)
class _Ring:
    """Portions in turn, each pinned when it is first wanted."""

    device: Device
    size: int
    portions: list[_Portion] = field(default_factory=list)
    num_given: int = 0

    def next(self) -> _Portion:
        """Once the device has done with it. Raises TransferError."""
        if len(self.portions) < self.size and self.num_given == len(self.portions):
            self.portions.append(_Portion(self.device.pin(PORTION_NBYTES)))
        portion = self.portions[self.num_given % self.size]
        self.num_given += 1
        self.settle(portion)
        return portion

    def settle(self, portion: _Portion) -> None:
        if portion.mark is not None:
            wait(self.device, portion.mark)
            portion.mark = None

    def close(self) -> None:
        for portion in self.portions:
            with contextlib.suppress(TransferError):  # the device failed: it copies no more
                self.settle(portion)
                self.device.unpin(portion.memory)
        self.portions.clear()


class StagedEnds:
    """Of a region in a GPU's memory."""

    window: int | None = _NUM_OUT - 1

    def __init__(self, region: Region, device: Device) -> None:
        self._base = region.address
        self._device = device
        self._out, self._in = _Ring(device, _NUM_OUT), _Ring(device, _NUM_IN)

    def out(self, pieces: Sequence[Piece]) -> Iterator[memoryview]:
        ahead: tuple[_Portion, int] | None = None
        for parts in portioned(pieces):
            behind, ahead = ahead, self._fetch(parts)
            if behind is not None:
                yield self._filled(*behind)
        if ahead is not None:
            yield self._filled(*ahead)

    def take_in(self, pieces: Sequence[Piece], expect: Expect, then: Callable[[], None]) -> None:
        rest = portioned(pieces)

        def take_next() -> None:
            parts = next(rest, None)
            if parts is None:
                for portion in self._in.portions:
                    self._in.settle(portion)
                then()
                return
            portion = self._in.next()
            address = portion.memory.address

            def put() -> None:
                moves = (Move(self._base + part.offset, address + part.at, part.nbytes) for part in parts)
                portion.mark = self._device.copy(moves)
                take_next()

            expect([portion.memory.view[: _nbytes(parts)]], put)

        take_next()

    def close(self) -> None:
        self._out.close()
        self._in.close()

    def _fetch(self, parts: list[_Part]) -> tuple[_Portion, int]:
        portion = self._out.next()
        address = portion.memory.address
        portion.mark = self._device.copy(
            Move(address + part.at, self._base + part.offset, part.nbytes) for part in parts
        )
        return portion, _nbytes(parts)

    def _filled(self, portion: _Portion, nbytes: int) -> memoryview:
        self._out.settle(portion)
        return portion.memory.view[:nbytes]


def portioned(pieces: Sequence[Piece]) -> Iterator[list[_Part]]:
    """The pieces one behind the other, cut where a portion is full."""
    parts: list[_Part] = []
    at = 0
    for offset, nbytes in pieces:
        while nbytes:
            part = min(nbytes, PORTION_NBYTES - at)
            parts.append(_Part(offset, at, part))
            offset, nbytes, at = offset + part, nbytes - part, at + part
            if at == PORTION_NBYTES:
                yield parts
                parts, at = [], 0
    if parts:
        yield parts


def _nbytes(parts: Sequence[_Part]) -> int:
    return parts[-1].at + parts[-1].nbytes
