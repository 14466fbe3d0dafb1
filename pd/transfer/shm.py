"""Transfer between processes of one host: one-sided copies straight into the peer's pool.

The region is a memfd, which no file system holds by a name, so nothing is left behind even after kill -9. A peer
opens it through /proc/<pid>/fd/<fd> once host, container, process life and inode are seen to be the endpoint's.
One more page behind the region tells writers that its owner has closed it. A region in a GPU's memory is shared by a
handle of the GPU's runtime instead, and of the memfd only that page is left.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import time
from collections.abc import Sequence

import msgspec

from pd.transfer import native
from pd.transfer.device import Device, Gpu, Shared
from pd.transfer.host import Life, is_dead, this_life, why_elsewhere
from pd.transfer.outbox import Outbox
from pd.transfer.region import Region, check_size, check_spans
from pd.transfer.shm_worker import CLOSED, DOOR_NBYTES, Peer, ShmWorker, Source, Task, door_offset, open_source
from pd.transfer.transport import CannotMeet, Completion, RegistrationFailed, Span, TransferError

MAX_JOBS = 4096
"""Waiting for one peer; more are refused. A step gives each peer a few, so this many means a stuck worker."""

SEVER_TIMEOUT_S = 5.0
"""For the worker to let go of a peer: it looks up every 32 MiB, so only a stuck host takes longer."""


class ShmEndpoint(msgspec.Struct, frozen=True, array_like=True, tag="shm"):
    me: str
    life: Life
    source: Source
    card: Shared | None = None  # where the region is a GPU's: then `source` has no bytes of its own

    @property
    def nbytes(self) -> int:
        return self.source.nbytes if self.card is None else self.card.nbytes


class ShmTransport:
    """See `Transport`. `sever` cannot unmap our region from a peer: it answers True if the peer's death is proven."""

    name = "shm"
    spare_nbytes = 0

    def __init__(self, *, me: str, outbox: Outbox | None = None) -> None:
        self.me = me
        self.device: Device | None = None  # that holds our region; None: the host does
        self._card: Shared | None = None
        self._life = this_life()
        self._outbox = outbox or Outbox()
        self.wake_fd = self._outbox.wake_fd
        self._owns_outbox = outbox is None
        self._memory: mmap.mmap | None = None
        self._region: Region | None = None
        self._fd = -1
        self._door = 0  # where it begins in the memfd
        self._worker: ShmWorker | None = None
        self._peers: dict[str, tuple[ShmEndpoint, Peer]] = {}
        self._severed: dict[str, Life | None] = {}

    def allocate(self, nbytes: int) -> memoryview:
        check_size(nbytes)
        self._region = Region(self._share(nbytes), nbytes)
        return self._region.view

    def register(self, address: int, nbytes: int, device: int | None = None) -> None:
        if device is None:
            raise TransferError(
                f"shm reaches memory that it allocates, not the {nbytes} bytes at {address:#x} made elsewhere"
            )
        self.register_on(Gpu(device), address, nbytes, number=device)

    def register_on(self, device: Device, address: int, nbytes: int, *, number: int, must_share: bool = True) -> None:
        """Register memory of `device`, which is ours from here on. Raises RegistrationFailed where other processes
        cannot open it, or, unless `must_share`, tells peers so."""
        check_size(nbytes)
        try:
            self._card = device.share(address, nbytes)
        except TransferError as error:
            if must_share:
                raise RegistrationFailed("shm", address, nbytes, device=number, reason=str(error)) from error
            self._card = Shared.sealed(b"", 0, nbytes)
        self._share(0)
        self.device = device
        self._region = Region.on_device(address, nbytes)

    def _share(self, nbytes: int) -> mmap.mmap:
        """A memfd of so many bytes and the door behind them."""
        if self._memory is not None:
            raise TransferError(f"{self.me} has a region already")
        door = self._door = door_offset(nbytes)
        fd = os.memfd_create("pd-kv", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(fd, door + DOOR_NBYTES)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
            self._memory = mmap.mmap(fd, door + DOOR_NBYTES)
        except (OSError, OverflowError) as error:
            os.close(fd)
            raise TransferError(f"cannot allocate a region of {nbytes} bytes: {error}") from error
        self._fd = fd
        return self._memory

    def endpoint(self) -> bytes:
        region = self._own_region()
        nbytes = region.nbytes if self._card is None else 0
        source = Source(self._fd, os.fstat(self._fd).st_ino, nbytes)
        return msgspec.msgpack.encode(ShmEndpoint(self.me, self._life, source, self._card))

    def connect(self, peer: str, endpoint: bytes) -> None:
        there = decode(peer, endpoint)
        region = self._own_region()
        if (reason := why_elsewhere(there.life, self._life)) is not None:
            raise CannotMeet(f"shm cannot reach {peer}: it runs {reason}; tcp can")
        if (there.card is None) != (self._card is None):
            ours, theirs = ("on a GPU" if card else "in host memory" for card in (self._card, there.card))
            raise CannotMeet(f"shm cannot reach {peer}: its KV is {theirs}, ours {ours}; tcp can")
        if peer in self._severed or there.me in self._severed:
            raise TransferError(f"{peer} was severed; a new life of it has a new name")
        if peer in self._peers and not self._peers[peer][1].is_gone:
            return
        if self._worker is None:
            self._worker = ShmWorker(region.address, self._outbox, self.device)
        known = Peer(peer, there.life, there.source, there.card)
        self._worker.add(known)
        self._peers[peer] = (there, known)

    def describe(self, peer: str) -> str | None:
        if self._card is not None:
            return f"{self.name} (GPU to GPU on one host)"
        return f"{self.name} (one host{'' if native.load() else '; its copies in C++ are not built, so it is slower'})"

    def write(self, peer: str, spans: Sequence[Span], *, job: int) -> None:
        self._take(peer, spans, job, is_read=False)

    def read(self, peer: str, spans: Sequence[Span], *, job: int) -> None:
        self._take(peer, spans, job, is_read=True)

    def poll(self) -> list[Completion]:
        return self._outbox.drain()

    def sever(self, peer: str) -> bool:
        """True once its process is dead: until then it keeps our memory mapped. Asked again, looks again."""
        if peer in self._peers and self._worker is not None:
            endpoint, known = self._peers.pop(peer)
            self._severed[peer] = self._severed[endpoint.me] = endpoint.life
            self._worker.cut(known, "severed here")
            known.has_left.wait(SEVER_TIMEOUT_S)
        life = self._severed.setdefault(peer, None)  # None: nobody told us which process that is
        return life is not None and is_dead(life, self._life)

    def close(self) -> None:
        if self._worker is not None:
            self._worker.stop("transport closed")
            self._worker = None
        self._peers.clear()
        if self._memory is not None and self._region is not None:
            self._memory[self._door] = CLOSED
            self._region.close()
            os.close(self._fd)
            self._memory = self._region = None
        if self.device is not None:
            self.device.close()
            self.device = None
        if self._owns_outbox:
            self._outbox.close()

    def _own_region(self) -> Region:
        if self._region is None:
            raise TransferError(f"{self.me} has no region: not allocated yet, or closed")
        return self._region

    def _take(self, peer: str, spans: Sequence[Span], job: int, *, is_read: bool) -> None:
        ours = self._own_region().nbytes
        endpoint, known = self._peers.get(peer, (None, None))
        if endpoint is None or known is None or self._worker is None:
            raise TransferError(f"unknown peer {peer}")
        theirs = endpoint.nbytes
        src, dst = (theirs, ours) if is_read else (ours, theirs)
        nbytes = check_spans(spans, src_nbytes=src, dst_nbytes=dst)
        task = Task(job, tuple(spans), is_read, nbytes, time.monotonic())
        if not known.give(task, limit=MAX_JOBS):
            raise TransferError(f"{peer} is lost, or {MAX_JOBS} jobs wait for it already")
        self._worker.ring()


def decode(peer: str, endpoint: bytes) -> ShmEndpoint:
    """Raises TransferError on anything but a sound endpoint of this backend."""
    try:
        there = msgspec.msgpack.decode(endpoint, type=ShmEndpoint)
    except msgspec.MsgspecError as error:
        raise TransferError(f"{peer} sent no shm endpoint: {error}") from error
    is_odd = there.card is not None and (there.source.nbytes > 0 or not there.card.is_sound)
    if there.life.pid < 1 or there.source.fd < 0 or there.nbytes < 1 or is_odd:
        raise TransferError(f"{peer} sent a broken shm endpoint: {there}")
    return there


def why_unreachable(there: ShmEndpoint, device: Device | None) -> str | None:
    """Why this process cannot map that region, for a person; None where it can. `device` holds its own."""
    reason = why_elsewhere(there.life, this_life())
    if reason is not None:
        return reason
    try:
        os.close(open_source(there.life.pid, there.source))
        if there.card is not None and device is not None:
            device.shut(device.open(there.card))
    except (OSError, TransferError) as error:
        return f"its memory cannot be opened: {error}"
    if (there.card is None) != (device is None):
        return "on this host, but its KV is on a GPU" if there.card else "on this host, but its KV is in host memory"
    return None
