"""The contract of every transfer backend: one region of memory, one-sided writes into a peer's, and severing.

Rules
1. A transport knows peers, regions, offsets and jobs. It never hears of requests, pages or heads.
2. No call blocks: connecting, writing and reading go on elsewhere; `poll` tells what ended. `wake_fd` becomes
   readable whenever `poll` has something to say.
3. A job ends exactly once: `JobDone` after its last byte is visible at its destination, or `JobFailed` after no
   byte of it can move any more. A lost peer fails each of its jobs before `PeerLost` is reported; of those, bytes
   already with the network may still land until the peer ends or severs us, so pages wait for its fate, not ours.
   A lost peer may be connected again.
4. Writes to one peer take effect in the order given.
5. A peer's bytes land inside its destination's registered region or nowhere: offsets are checked by the side that
   owns the memory wherever the backend lets it, else by the side that writes.
6. `sever(peer)` answers True only when, from its return on, nothing of that peer can write into our region.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol


class TransferError(Exception):
    """Ours to retry: the transfer failed, the request need not. Before the start `hint` says what mends it."""

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.hint = hint


class RegistrationFailed(TransferError):
    """The region cannot be made known to the wire. Ends the start."""

    def __init__(self, backend: str, address: int, nbytes: int, *, device: int | None, reason: str) -> None:
        where = "host memory" if device is None else f"GPU {device}"
        super().__init__(
            f"{backend} cannot register the KV pool, {nbytes} bytes of {where} at {address:#x}: {reason}",
            hint=_LIKELY_HOST if device is None else _LIKELY_SHARED if backend == "shm" else _LIKELY_GPU,
        )


_LIKELY_HOST = "most often the limit of locked memory: pd doctor --only machine.memlock,rdma"
_LIKELY_SHARED = "--transfer tcp goes through host memory; PyTorch's expandable segments cannot be shared"
_LIKELY_GPU = "most often GPUDirect is missing (nvidia-peermem, or dma-buf): pd doctor --only gpudirect,rdma"


class CannotMeet(TransferError):
    """Two peers between whom nothing can be moved, however often it is tried. The message prints both values."""


class LayoutMismatch(CannotMeet):
    """Of their KV."""


class Span(NamedTuple):
    """One contiguous copy; offsets in bytes from the start of each side's region."""

    src: int
    dst: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class JobDone:
    job: int
    nbytes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class JobFailed:
    job: int
    peer: str
    reason: str
    may_land: bool = False  # rule 3: of a lost or severed peer, what the network has already


@dataclass(frozen=True, slots=True)
class PeerLost:
    peer: str
    reason: str


Completion = JobDone | JobFailed | PeerLost


class Transport(Protocol):
    """One rank's end. Made as `Backend(me=...)`, where `me` is a name unique to this process's life."""

    name: str
    wake_fd: int
    spare_nbytes: int
    """At the end of what is given to `register`: the caller leaves them to the transport."""

    def allocate(self, nbytes: int) -> memoryview:
        """Make and register the region: zeroed host memory that peers can reach. Called once. Freed by `close`."""

    def register(self, address: int, nbytes: int, device: int | None = None) -> None:
        """Register memory the caller made instead, on that GPU or on the host. Called once.

        Raises TransferError naming buffer and size where it cannot be reached or registered.
        """

    def endpoint(self) -> bytes:
        """What a peer needs to reach the region: opaque, at most 16 KiB, sent to peers in `Hello`."""

    def connect(self, peer: str, endpoint: bytes) -> None:
        """Begin to reach `peer`. Jobs may be given at once; they wait. Raises TransferError on a malformed endpoint,
        CannotMeet where such a peer is out of this backend's reach."""

    def describe(self, peer: str) -> str | None:
        """The way to a connected peer and why, for a person: `shm (one host)`. None while that is not decided yet.

        Raises TransferError for an unknown peer.
        """

    def write(self, peer: str, spans: Sequence[Span], *, job: int) -> None:
        """Copy spans of our region (`src`) into the peer's (`dst`).

        Raises TransferError, and the job never begins, if a span leaves a region, the queue is full, or the peer is
        unknown or lost.
        """

    def read(self, peer: str, spans: Sequence[Span], *, job: int) -> None:
        """Copy spans of the peer's region (`src`) into ours (`dst`)."""

    def poll(self) -> list[Completion]:
        """Everything that ended since the last call, in order."""

    def sever(self, peer: str) -> bool:
        """Cut `peer` off for good, both ways. True: nothing of it can write here any more. False: it may; quarantine.

        `peer` is the name given to `connect`, or the peer's own `me`; a peer that writes to us without our having
        connected is known by that one only. Its jobs fail; no `PeerLost` follows, as we wanted it. Waits shortly
        for the thread that moves bytes to let go.
        """

    def close(self) -> None:
        """Fail what is in flight, free the region, leave nothing behind. Idempotent."""
