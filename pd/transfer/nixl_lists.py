"""Prepared descriptor lists of NIXL: both regions are cut into pieces of one length at equal steps, once, and a batch
whose pieces lie so is told by their numbers.

       first      step
    ├────┼─────────┬─────────┬─────────┬──    piece k begins at first + k × step; where the step is the length, the
         ╰ length ╯╰ length ╯╰ length ╯       next begins where it ends: a dense side
Rules
1. What a plan has joined, neighbours on both sides, is several pieces here; NIXL joins them again.
2. A list is one row to NIXL, however many pieces that is (NIXL 1.5.1: 3 µs, half a KiB). So every peer has its own, for
   our region and for its, of the grids it used last. They end with it, since they mean nothing once NIXL has forgotten
   the peer.
3. A transfer holds copies of what it names in a list: a list may go while one is on its way.
4. What is done a batch is done with empty caches, where it counts how many lines of code are run, Python's, numpy's or
   their own, not how many pieces there are: 40 µs for each call of numpy's that was not made just before.
"""

from __future__ import annotations

import array
import contextlib
import ctypes
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pd.transfer.library import Copies, Memory, Spans
from pd.transfer.native import Native

ENOUGH = 8
"""Rows that tell what grid they lie on."""

MAX_GRIDS = 16
"""A peer. A route has one, or a few; images in staging may have one for each of the 8 slots."""

MAX_PIECES = 2048
"""Of a batch; others are described."""

_MAX_JOINED = 4
"""Pieces a row, on the average, of a batch that a grid is made for: else any batch lies on one of single bytes."""

_MAX_NUMBER = 2**31 - 1
"""NIXL's numbers have 32 bits."""

_OURS = "NIXL_INIT_AGENT"
"""In place of an agent's name."""

Numbers = NDArray[np.uint32]


class Side(NamedTuple):
    first: int
    step: int


class Grid(NamedTuple):
    src: Side
    dst: Side
    nbytes: int  # of a piece


def find_grid(spans: Spans) -> Grid | None:
    """The coarsest on which all of these lie; None: there is none that would be worth it. Pure."""
    lengths = spans[:, 2]
    nbytes = int(np.gcd.reduce(lengths))
    if lengths.sum() > _MAX_JOINED * nbytes * len(spans):
        return None
    src, dst = (_side(spans[:, column], nbytes) for column in (0, 1))
    is_dense = src.step == dst.step == nbytes
    if is_dense or (min(src.step, dst.step) >= nbytes and (lengths == nbytes).all()):
        return Grid(src, dst, nbytes)
    return None


def _side(offsets: NDArray[np.int64], nbytes: int) -> Side:
    apart = offsets - offsets[0]
    step = int(np.gcd.reduce(apart)) if (apart % nbytes).any() else nbytes
    return Side(int(offsets[0]) % step, step)


class Numbering:
    """Numbers pieces, in memory of its own that the next call writes anew."""

    def __init__(self, native: Native | None) -> None:
        """Without, numpy does it, in 60 µs more."""
        self._native = native
        self._found = np.empty((2, MAX_PIECES), np.uint32)
        self._src, self._dst = self._found
        self._at_src, self._at_dst = (side.ctypes.data for side in self._found)

    def of(self, grid: Grid, table: array.array[int], spans: Spans) -> tuple[Numbers, Numbers] | None:
        """Of every piece, on either side. None: they do not lie on this grid, or are too many. `table`: the grid's."""
        if self._native is None:
            return number(grid, spans)
        try:
            begin = ctypes.c_char.from_buffer(spans)  # type: ignore[arg-type]  # `ctypes.data` takes 60 µs more
        except TypeError:  # not one row behind the other
            return number(grid, spans)
        at = ctypes.addressof(begin)
        num_pieces = self._native.number(at, len(spans), table, self._at_src, self._at_dst, MAX_PIECES)
        return None if num_pieces < 0 else (self._src[:num_pieces], self._dst[:num_pieces])


def table_of(grid: Grid) -> array.array[int]:
    return array.array("Q", (*grid.src, *grid.dst, grid.nbytes))


def number(grid: Grid, spans: Spans) -> tuple[Numbers, Numbers] | None:
    """What `Numbering` answers, in arrays of its own. Pure."""
    (src_first, src_step), (dst_first, dst_step), nbytes = grid
    found, rest = np.divmod(spans - (src_first, dst_first, 0), (src_step, dst_step, nbytes))
    many = found[:, 2]
    num_pieces = int(many.sum())
    if rest.any() or num_pieces > MAX_PIECES:
        return None
    if num_pieces > len(spans):
        if not src_step == dst_step == nbytes:
            return None
        within = np.arange(num_pieces) - np.repeat(np.cumsum(many) - many, many)
        found = np.repeat(found, many, axis=0) + within[:, None]
    return found[:, 0].astype(np.uint32), found[:, 1].astype(np.uint32)


class _Prepared(NamedTuple):
    grid: Grid
    table: array.array[int]
    memory: Memory  # of our region
    is_read: bool
    ours: Any
    theirs: Any


@dataclass(slots=True, eq=False)
class Lists:
    """Of one peer, which `agent` knows by `name`, and whose region is `nbytes` at `memory`."""

    agent: Any
    backend: str
    numbering: Numbering
    name: str
    memory: Memory
    nbytes: int
    _prepared: list[_Prepared] = field(default_factory=list)  # the one used last, last

    def make(self, copies: Copies, nbytes: int) -> Any | None:
        """A transfer to be posted, or None: it is to be described. `nbytes`: of our region. Raises what NIXL does."""
        if copies.theirs != self.memory:
            return None
        for i in reversed(range(len(self._prepared))):
            prepared = self._prepared[i]
            if prepared.is_read == copies.is_read and prepared.memory == copies.ours:
                found = self.numbering.of(prepared.grid, prepared.table, copies.spans)
                if found is not None:
                    self._prepared.append(self._prepared.pop(i))
                    return self._made(prepared, found)
        if len(copies.spans) < ENOUGH:
            return None
        grid = find_grid(copies.spans)
        if grid is None or max(nbytes, self.nbytes) // grid.nbytes > _MAX_NUMBER:
            return None
        found = number(grid, copies.spans)
        return None if found is None else self._made(self._prepare(grid, copies, nbytes), found)

    def release(self) -> None:
        """Before the agent is told to forget the peer. Raises nothing."""
        while self._prepared:
            self._let_go(self._prepared.pop())

    def _made(self, prepared: _Prepared, found: tuple[Numbers, Numbers]) -> Any:
        src, dst = found
        operation, mine, yours = ("READ", dst, src) if prepared.is_read else ("WRITE", src, dst)
        return self.agent.make_prepped_xfer(
            operation, prepared.ours, mine, prepared.theirs, yours, backends=[self.backend]
        )

    def _prepare(self, grid: Grid, copies: Copies, nbytes: int) -> _Prepared:
        if len(self._prepared) == MAX_GRIDS:
            self._let_go(self._prepared.pop(0))
        here, there = (grid.dst, grid.src) if copies.is_read else (grid.src, grid.dst)
        ours = self._list(_OURS, copies.ours, nbytes, here, grid.nbytes)
        try:
            theirs = self._list(self.name, self.memory, self.nbytes, there, grid.nbytes)
        except BaseException:
            self._release(ours)
            raise
        prepared = _Prepared(grid, table_of(grid), copies.ours, copies.is_read, ours, theirs)
        self._prepared.append(prepared)
        return prepared

    def _list(self, owner: str, memory: Memory, nbytes: int, side: Side, piece: int) -> Any:
        num_pieces = (nbytes - side.first - piece) // side.step + 1
        kind, device = place(memory)
        row = np.array([[memory.address + side.first, piece, device, side.step, num_pieces]], np.uint64)
        return self.agent.prep_xfer_dlist(owner, row, kind, backends=[self.backend])

    def _let_go(self, prepared: _Prepared) -> None:
        self._release(prepared.ours)
        self._release(prepared.theirs)

    def _release(self, prepared_list: Any) -> None:
        with contextlib.suppress(Exception):
            self.agent.release_dlist_handle(prepared_list)


def place(memory: Memory) -> tuple[str, int]:
    """NIXL's kind of memory, and device."""
    return ("DRAM", 0) if memory.device is None else ("VRAM", memory.device)
