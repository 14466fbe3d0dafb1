"""Transfer through a library that moves bytes (NIXL, Mooncake): the contract is ours, the wire is theirs.

None of them can take back what a peer was once allowed to write, so a peer is severed when its death is proven, and
not before. Beside the region a page is registered that says whose it is and whether it is open: the door.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import time
from collections.abc import Callable, Sequence

import numpy as np

from pd.transfer.device import Device, Gpu
from pd.transfer.host import is_dead, rdma_devices, this_life, why_elsewhere
from pd.transfer.library import (
    NONCE_NBYTES,
    Library,
    LibraryEndpoint,
    LibraryLimits,
    Memory,
    Spans,
    decode,
    encode,
)
from pd.transfer.library_peer import DOOR_NBYTES, Peer, Task, write_door
from pd.transfer.library_worker import MAX_PEERS, LibraryWorker
from pd.transfer.outbox import Outbox
from pd.transfer.region import Region, check_spans
from pd.transfer.rows import Rows
from pd.transfer.transport import Completion, Span, TransferError

SEVER_TIMEOUT_S = 5.0
"""For the thread to come by: a call into a library takes as long as 64 MiB take, so only a stuck host takes longer."""

_LINGER = 1.2  # of the time in which every idle peer looks once

_SLATE_OFFSET = 4096  # in the page behind our door


class LibraryTransport:
    """See `Transport`. `sever` answers True if the peer's death is proven, which is so on one host only."""

    spare_nbytes = 0

    def __init__(
        self,
        *,
        me: str,
        start: Callable[[str], Library],
        limits: LibraryLimits | None = None,
        outbox: Outbox | None = None,
        gpu: Callable[[int], Device] = Gpu,
    ) -> None:
        """`start` makes the library's end under a name that no other life has. Raises TransferError, as it does."""
        self.me = me
        self._life = this_life()
        self._nonce = os.urandom(NONCE_NBYTES)
        self._library = start(f"{me}.{self._nonce.hex()}")
        self.name = self._library.name
        self._limits = limits or LibraryLimits()
        self._outbox = outbox or Outbox()
        self.wake_fd = self._outbox.wake_fd
        self._owns_outbox = outbox is None
        self._region: Region | None = None
        self._memory = Memory(0)
        self._nbytes = 0
        self._door = mmap.mmap(-1, _SLATE_OFFSET + MAX_PEERS * DOOR_NBYTES)  # behind our door the slate, for others'
        self._contact = b""
        self._worker: LibraryWorker | None = None
        self._peers: dict[str, Peer] = {}
        self._severed: dict[str, LibraryEndpoint | None] = {}
        self._gpu = gpu
        self._is_closed = False

    def allocate(self, nbytes: int) -> memoryview:
        self._refuse_second()
        region = Region.anonymous(nbytes)
        self._open(region, Memory(region.address), nbytes)
        return region.view

    def register(self, address: int, nbytes: int, device: int | None = None) -> None:
        self._refuse_second()
        self._open(None, Memory(address, device), nbytes)

    def endpoint(self) -> bytes:
        self._running()
        door = self._door_address()
        return encode(
            LibraryEndpoint(
                self.name, self.me, self._life, self._nonce, self._nbytes, self._memory, door, self._contact
            )
        )

    def connect(self, peer: str, endpoint: bytes) -> None:
        worker = self._running()
        there = decode(peer, endpoint, self.name)
        if peer in self._severed or there.me in self._severed:
            raise TransferError(f"{peer} was severed; a new life of it has a new name")
        if peer in self._peers and not self._peers[peer].is_gone:
            return
        known = Peer(peer, there, self._memory, self._library, self._limits, self._outbox)
        known.is_near = why_elsewhere(there.life, self._life) is None
        known.is_asked = self._library.is_owner_asked(is_near=known.is_near)
        worker.add(known)
        self._peers[peer] = known

    def describe(self, peer: str) -> str | None:
        known = self._peers.get(peer)
        if known is None:
            raise TransferError(f"unknown peer {peer}")
        if known.is_near:
            return f"{self.name} (one host)"
        means = "RDMA" if rdma_devices() else "no RDMA device here: tcp is faster, and a peer's death harms none but it"
        return f"{self.name} (another host; {means})"

    def write(self, peer: str, spans: Sequence[Span], *, job: int) -> None:
        self._take(peer, spans, job, is_read=False)

    def read(self, peer: str, spans: Sequence[Span], *, job: int) -> None:
        self._take(peer, spans, job, is_read=True)

    def poll(self) -> list[Completion]:
        return self._outbox.drain()

    def sever(self, peer: str) -> bool:
        """True once its process is dead, and what it had sent is taken in. Asked again, looks again."""
        if peer in self._peers and self._worker is not None:
            known = self._peers.pop(peer)
            self._severed[peer] = self._severed[known.there.me] = known.there
            self._worker.cut(known, "severed here")
            known.has_left.wait(SEVER_TIMEOUT_S)
        there = self._severed.setdefault(peer, None)  # None: nobody told us which process that is
        if there is None or not is_dead(there.life, self._life):
            return False
        return self._worker is None or self._worker.settle(SEVER_TIMEOUT_S)

    def close(self) -> None:
        if self._worker is not None:
            write_door(memoryview(self._door), self._nonce, is_open=False)
            if self._peers and self._library.tend_s is not None:
                time.sleep(self._limits.look_s * _LINGER)  # still served: idle peers see the door, and leave first
            self._worker.stop("transport closed")
            self._worker = None
        elif not self._is_closed:
            self._library.close()  # nobody ever used it
        self._is_closed = True
        self._peers.clear()
        if self._region is not None:
            self._region.close()
            self._region = None
        if self._owns_outbox:
            self._outbox.close()

    def _open(self, region: Region | None, memory: Memory, nbytes: int) -> None:
        door = self._door_address()
        self._library.register(memory, nbytes)
        self._library.register(Memory(door), len(self._door))
        self._region, self._memory, self._nbytes = region, memory, nbytes
        write_door(memoryview(self._door), self._nonce, is_open=True)
        self._contact = self._library.contact()
        slate = memoryview(self._door)[_SLATE_OFFSET:]
        keeps = (self._door, region.view if region is not None else None)
        enter = None if memory.device is None else self._gpu(memory.device).enter
        self._worker = LibraryWorker(self._library, slate, door + _SLATE_OFFSET, keeps=keeps, enter=enter)

    def _door_address(self) -> int:
        return ctypes.addressof(ctypes.c_char.from_buffer(self._door))

    def _refuse_second(self) -> None:
        if self._worker is not None:
            raise TransferError(f"{self.me} has a region already")

    def _running(self) -> LibraryWorker:
        if self._worker is None:
            raise TransferError(f"{self.me} has no region: not allocated yet, or closed")
        return self._worker

    def _take(self, peer: str, spans: Sequence[Span], job: int, *, is_read: bool) -> None:
        worker = self._running()
        known = self._peers.get(peer)
        if known is None:
            raise TransferError(f"unknown peer {peer}")
        src, dst = known.there.nbytes, self._nbytes
        if not is_read:
            src, dst = dst, src
        nbytes = check_spans(spans, src_nbytes=src, dst_nbytes=dst)
        if not known.give(Task(job, _rows(spans), is_read, nbytes, time.monotonic())):
            raise TransferError(f"{peer} is lost, or {self._limits.max_jobs} jobs wait for it already")
        worker.ring()


def _rows(spans: Sequence[Span]) -> Spans:
    return np.frombuffer(Rows.of(spans).numbers, np.int64).reshape(-1, 3)
