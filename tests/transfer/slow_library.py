"""A library that moves bytes within this process, large writes only when it is told, and writes down what it was told
too early: one that crashes then cannot be tested by its crashes."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from pd.transfer.library import Copies, Memory
from pd.transfer.transport import TransferError

LARGE = 1024
"""Writes of as many bytes or more are held back where a library is slow; looks at a door are not."""


@dataclass(eq=False)
class Batch:
    there: str
    copies: Copies
    is_over: bool = False
    fails: bool = False


@dataclass
class SlowLibrary:
    """See `pd.transfer.library.Library`."""

    name: str = "slow"
    tend_s: float | None = 1e-3
    is_held: bool = False
    asks_owner: bool = False
    tells: bool = False
    ring: Callable[[], None] | None = None
    num_asked: int = 0
    num_tended: int = 0
    faults: list[str] = field(default_factory=list)
    open: list[Batch] = field(default_factory=list)
    known: set[str] = field(default_factory=set)
    is_closed: bool = False
    me: str = ""

    def register(self, memory: Memory, nbytes: int) -> None:
        pass

    def contact(self) -> bytes:
        return self.me.encode()

    def meet(self, contact: bytes, memory: Memory, nbytes: int) -> object:
        there = contact.decode()
        if there in self.known:
            self.faults.append(f"met {there} twice")
        self.known.add(there)
        return there

    def part(self, there: object) -> None:
        assert isinstance(there, str)
        if any(batch.there == there for batch in self.open):
            self.faults.append(f"told to forget {there} under a write to it")
        self.known.discard(there)

    def is_owner_asked(self, *, is_near: bool) -> bool:
        return self.asks_owner

    def post(self, there: object, copies: Copies) -> object:
        assert isinstance(there, str)
        batch = Batch(there, copies)
        self.open.append(batch)
        if not self.is_held or copies.spans[:, 2].sum() < LARGE:
            self.carry_out(batch)
        return batch

    def repeat(self, batch: object) -> None:
        assert isinstance(batch, Batch)
        if not batch.is_over:
            self.faults.append("told to repeat a write that is on its way")
        self.carry_out(batch)

    def carry_out(self, batch: Batch) -> None:
        for src, dst, nbytes in batch.copies.spans.tolist():
            ours, theirs = batch.copies.ours.address, batch.copies.theirs.address
            source, sink = (theirs + src, ours + dst) if batch.copies.is_read else (ours + src, theirs + dst)
            assert is_mapped(source) and is_mapped(sink), "memory was given back under a write"
            ctypes.memmove(sink, source, nbytes)
        batch.is_over = True
        if self.ring is not None:
            self.ring()

    def is_done(self, batch: object) -> bool:
        assert isinstance(batch, Batch)
        self.num_asked += 1
        if batch.fails:
            raise TransferError("it failed")
        return batch.is_over

    def release(self, batch: object) -> None:
        assert isinstance(batch, Batch)
        if not (batch.is_over or batch.fails):
            self.faults.append("told to forget a write that is on its way")
        self.open.remove(batch)

    def tell(self, ring: Callable[[], None]) -> bool:
        self.ring = ring if self.tells else None
        return self.tells

    def tend(self) -> None:
        self.num_tended += 1

    def close(self) -> None:
        if self.open:
            self.faults.append(f"closed under {len(self.open)} writes")
        self.is_closed = True


def is_mapped(address: int) -> bool:
    for line in Path("/proc/self/maps").read_text().splitlines():
        start, stop = (int(edge, 16) for edge in line.split()[0].split("-"))
        if start <= address < stop:
            return True
    return False
