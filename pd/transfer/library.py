"""What a library that moves bytes must do for us, so that one transport serves them all; and who its peers are.

A library knows memory and contacts. Order, deadlines, severing and the promise of `JobDone` are `LibraryTransport`'s.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import msgspec

from pd.transfer.host import Life
from pd.transfer.transport import Span, TransferError

NONCE_NBYTES = 16


class Memory(NamedTuple):
    """Where a region begins. `device` is the GPU's number, None for host memory."""

    address: int
    device: int | None = None


class Copies(NamedTuple):
    """One batch: `spans` counted from `ours` and `theirs`."""

    ours: Memory
    theirs: Memory
    spans: Sequence[Span]
    is_read: bool


class Library(Protocol):
    """All calls after the first `contact` come from one thread. Those that fail raise TransferError."""

    name: str
    tend_s: float | None
    """How often `tend` must be called so that peers get on with their writes; None: never."""

    def register(self, memory: Memory, nbytes: int) -> None: ...

    def contact(self) -> bytes:
        """What a peer's library needs to meet us; asked once everything is registered."""

    def meet(self, contact: bytes) -> object:
        """Begin to know a peer; what `post` and `part` want to be given."""

    def part(self, there: object) -> None:
        """Know it no longer. Batches that are still on their way may be broken off. Raises nothing."""

    def post(self, there: object, copies: Copies) -> object:
        """Begin a batch, or carry it out at once; what `is_done` and `release` want to be given."""

    def is_done(self, batch: object) -> bool:
        """Every byte is in place. False: not yet."""

    def release(self, batch: object) -> None:
        """Forget a batch; one that is still on its way may still land. Raises nothing."""

    def tend(self) -> None: ...

    def close(self) -> None:
        """No thread or connection of it is left. Raises nothing."""


@dataclass(frozen=True, slots=True)
class LibraryLimits:
    connect_s: float = 10.0
    """From the first call to a peer's door being read; the first connection of a process may take a second."""
    stall_s: float = 10.0
    """Without a batch of 32 MiB ending while jobs wait. The libraries themselves wait for ever, or 30 s."""
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
    if there.life.pid < 1 or there.nbytes < 1 or len(there.nonce) != NONCE_NBYTES:
        raise TransferError(f"{peer} sent a broken {library} endpoint: {there}")
    return there


_DIGEST_NBYTES = 8


def _digest(body: bytes) -> bytes:
    return hashlib.blake2b(body, digest_size=_DIGEST_NBYTES).digest()
