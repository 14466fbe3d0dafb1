"""What a library that moves bytes must do for us, so that one transport serves them all; and who its peers are.

A library knows memory and contacts. Order, deadlines, severing and the promise of `JobDone` are `LibraryTransport`'s.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from pd.transfer.host import Life
from pd.transfer.transport import TransferError

NONCE_NBYTES = 16

BATCH_NBYTES = 64 << 20
"""In one call, which within one host lasts as long as the copy, 16 ms: nobody is looked after meanwhile. Between two
calls 0.5 ms go by, as a copy leaves the processor's caches empty."""

MAX_PIECES = 1024
"""In one call."""

Spans = NDArray[np.int64]
"""Rows of (src, dst, nbytes), as `Span` has them: made once a job, since no row is touched by the interpreter again."""


class Memory(NamedTuple):
    """Where a region begins. `device` is the GPU's number, None for host memory."""

    address: int
    device: int | None = None


class Copies(NamedTuple):
    """One batch: `spans` counted from `ours` and `theirs`."""

    ours: Memory
    theirs: Memory
    spans: Spans
    is_read: bool


def batches(spans: Spans, nbytes: int, *, max_pieces: int) -> Iterator[Spans]:
    """Cut into at most so many rows and BATCH_NBYTES each, a larger row into several. `nbytes`: of all."""
    if 0 < len(spans) <= max_pieces and nbytes <= BATCH_NBYTES:
        yield spans
        return
    parts = -(-spans[:, 2] // BATCH_NBYTES)
    if parts.max(initial=1) > 1:
        spans = np.repeat(spans, parts, axis=0)
        done = (np.arange(len(spans)) - np.repeat(np.cumsum(parts) - parts, parts)) * BATCH_NBYTES
        spans[:, :2] += done[:, None]
        spans[:, 2] = np.minimum(spans[:, 2] - done, BATCH_NBYTES)
    ends = np.cumsum(spans[:, 2])
    start, sent = 0, 0
    while start < len(spans):
        stop = min(int(np.searchsorted(ends, sent + BATCH_NBYTES, side="right")), start + max_pieces)
        yield spans[start:stop]
        start, sent = stop, int(ends[stop - 1])


class Library(Protocol):
    """All calls after the first `contact` come from one thread. Those that fail raise TransferError."""

    name: str
    tend_s: float | None
    """How often `tend` must be called so that peers get on with their writes; None: never."""

    def register(self, memory: Memory, nbytes: int) -> None: ...

    def contact(self) -> bytes:
        """What a peer's library needs to meet us; asked once everything is registered."""

    def meet(self, contact: bytes, memory: Memory, nbytes: int) -> object:
        """Begin to know a peer, and its region of `nbytes`; what `post` and `part` want to be given."""

    def part(self, there: object) -> None:
        """Know it no longer. Batches that are still on their way may be broken off. Raises nothing."""

    def is_owner_asked(self, *, is_near: bool) -> bool:
        """Whether the peer's process sends what we read of it, and may not outlive us if we ask for two things at once.
        `is_near`: it is of this host."""

    def post(self, there: object, copies: Copies) -> object:
        """Begin a batch, or carry it out at once; what the next three want to be given."""

    def repeat(self, batch: object) -> None:
        """Begin a batch that is done once more."""

    def is_done(self, batch: object) -> bool:
        """Every byte is in place. False: not yet."""

    def release(self, batch: object) -> None:
        """Forget a batch; one that is still on its way may still land. Raises nothing."""

    def tell(self, ring: Callable[[], None]) -> bool:
        """Call `ring`, from any thread, whenever a batch has ended. False: it cannot, and is to be asked."""

    def tend(self) -> None: ...

    def close(self) -> None:
        """No thread or connection of it is left. Raises nothing."""


@dataclass(frozen=True, slots=True)
class LibraryLimits:
    connect_s: float = 10.0
    """From the first call to a peer's door being read; the first connection of a process may take a second."""
    stall_s: float = 10.0
    """Without a batch of 64 MiB ending while jobs wait. The libraries themselves wait for ever, or 30 s."""
    look_s: float = 0.5
    """An idle peer's door is read this often, so that its end is known before it is needed."""
    max_jobs: int = 4096
    """Waiting for one peer; more are refused."""


class LibraryEndpoint(msgspec.Struct, frozen=True, array_like=True, tag="library"):
    library: str
    me: str
    life: Life
    nonce: bytes  # of this region; stands in its door
    nbytes: int  # of the region
    memory: Memory
    door: int  # address
    contact: bytes


def encode(endpoint: LibraryEndpoint) -> bytes:
    """With a digest in front: what a broken endpoint would do inside a library is nobody's to find out."""
    body = msgspec.msgpack.encode(endpoint)
    return _digest(body) + body


def decode(peer: str, endpoint: bytes, library: str) -> LibraryEndpoint:
    """Raises TransferError on anything but a sound endpoint of this library."""
    seal, body = endpoint[:_DIGEST_NBYTES], endpoint[_DIGEST_NBYTES:]
    if seal != _digest(body):
        raise TransferError(f"{peer} sent no {library} endpoint: its {len(endpoint)} bytes do not fit their digest")
    try:
        there = msgspec.msgpack.decode(body, type=LibraryEndpoint)
    except msgspec.MsgspecError as error:
        raise TransferError(f"{peer} sent no {library} endpoint: {error}") from error
    if there.library != library:
        raise TransferError(f"{peer} sent no {library} endpoint: it is one of {there.library!r}")
    begins = (there.memory.address, there.memory.device or 0, there.door)
    is_odd = min(begins) < 0 or max(begins) + there.nbytes > _ADDRESSES
    if there.life.pid < 1 or there.nbytes < 1 or len(there.nonce) != NONCE_NBYTES or is_odd:
        raise TransferError(f"{peer} sent a broken {library} endpoint: {there}")
    return there


_DIGEST_NBYTES = 8
_ADDRESSES = 1 << 63
"""No processor has more, and `Spans` counts no further."""


def _digest(body: bytes) -> bytes:
    return hashlib.blake2b(body, digest_size=_DIGEST_NBYTES).digest()
