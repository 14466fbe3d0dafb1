"""The one thread that copies for `ShmTransport`, and notices when a peer's process ends.

Rules
1. Only this thread maps and unmaps peers' regions and closes their pidfds.
2. A peer's jobs run in the order given; peers take turns, one job each.
3. A peer is looked at before and after each copy: a job is done only if the region still had its owner.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import mmap
import os
import select
import threading
import time
from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec

from pd.transfer.copying import Copies, host_copier, populate
from pd.transfer.device import Device, DeviceCopier, Opened, Shared
from pd.transfer.host import Life, has_ended, watch
from pd.transfer.outbox import Outbox
from pd.transfer.transport import Completion, JobDone, JobFailed, PeerLost, Span, TransferError

DOOR_NBYTES = 4096
CLOSED = 1

_IDLE_S = 0.05
_POPULATE_NBYTES = 4 << 20
"""Mapped ahead each idle 50 ms, a tenth of a core. Measured: a copy into untouched memory runs at 0.8 GB/s, into
a fresh mapping of touched memory at 1.4, into a populated one at 5; populating takes 1.1 or 0.2 ms a MiB."""


class Source(msgspec.Struct, frozen=True, array_like=True):
    """A region as its owner's process sees it."""

    fd: int
    inode: int
    nbytes: int


class Task(NamedTuple):
    job: int
    spans: tuple[Span, ...]
    is_read: bool
    nbytes: int
    began: float


class _Mapping(NamedTuple):
    memory: mmap.mmap
    address: int  # of the region
    pidfd: int
    opened: Opened | None  # on a GPU


@dataclass(slots=True, eq=False)
class Peer:
    """One peer. The transport's thread gives tasks until it is gone; all else is the worker's."""

    name: str
    life: Life
    source: Source
    card: Shared | None = None
    tasks: deque[Task] = field(default_factory=deque)
    lock: threading.Lock = field(default_factory=threading.Lock)
    cut_reason: str | None = None
    is_gone: bool = False
    has_left: threading.Event = field(default_factory=threading.Event)
    mapping: _Mapping | None = None
    num_populated: int = 0  # bytes

    def give(self, task: Task, *, limit: int) -> bool:
        with self.lock:
            if self.is_gone or len(self.tasks) >= limit:
                return False
            self.tasks.append(task)
        return True

    def leave(self) -> list[Task]:
        """From now on nothing is taken; what still waited."""
        with self.lock:
            self.is_gone = True
            left = list(self.tasks)
            self.tasks.clear()
        return left

    def loss(self) -> str | None:
        """Why nothing can be copied any more, if so."""
        if self.mapping is None:
            return "not mapped"
        if has_ended(self.mapping.pidfd):
            return f"process {self.life.pid} of {self.name} ended"
        if self.mapping.memory[door_offset(self.source.nbytes)] == CLOSED:
            return f"{self.name} closed its region"
        return None


class ShmWorker:
    def __init__(self, address: int, outbox: Outbox, device: Device | None = None) -> None:
        """`address` is our region's, on `device` if there is one."""
        self._address = address
        self._outbox = outbox
        self._device = device
        self._copier: Copies = host_copier() if device is None else DeviceCopier(device)
        self._arrivals: deque[Peer] = deque()
        self._peers: list[Peer] = []
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._epoll = select.epoll()
        self._epoll.register(self._wake, select.EPOLLIN)
        self._stop_reason: str | None = None
        self._thread = threading.Thread(target=self._run, name="pd-transfer-shm", daemon=True)
        self._thread.start()

    def add(self, peer: Peer) -> None:
        """Raises TransferError if the thread failed."""
        if not self._thread.is_alive():
            raise TransferError("the copying thread failed")
        self._arrivals.append(peer)
        self.ring()

    def cut(self, peer: Peer, reason: str) -> None:
        """Begin to let go of `peer`; its `has_left` is set once nothing of ours touches its region."""
        peer.cut_reason = reason
        self.ring()

    def ring(self) -> None:
        os.eventfd_write(self._wake, 1)

    def stop(self, reason: str) -> None:
        """Fail everything and end the thread; nobody may call anything after."""
        self._stop_reason = reason
        self.ring()
        self._thread.join()
        self._epoll.close()
        os.close(self._wake)

    def _run(self) -> None:
        try:
            if self._device is not None:
                self._device.enter()
            while self._stop_reason is None:
                self._turn()
        finally:  # an error ends the thread, but nobody waits for it in vain
            reason = self._stop_reason or "the copying thread failed"
            for peer in (*self._peers, *self._arrivals):
                self._lose(peer, reason, is_ours=self._stop_reason is not None)

    def _turn(self) -> None:
        is_busy = any(peer.tasks for peer in self._peers)
        is_whole = all(peer.num_populated >= peer.source.nbytes for peer in self._peers)
        self._epoll.poll(0 if is_busy else None if is_whole else _IDLE_S)
        with contextlib.suppress(BlockingIOError):  # it was a pidfd, or the time
            os.eventfd_read(self._wake)
        while self._arrivals:
            self._admit(self._arrivals.popleft())
        for peer in list(self._peers):
            self._look_after(peer)
        if not is_busy and not is_whole:
            self._populate_some()

    def _admit(self, peer: Peer) -> None:
        self._peers.append(peer)
        pidfd = opened = None
        try:
            pidfd = watch(peer.life)
            if pidfd is None:
                self._lose(peer, f"process {peer.life.pid} of {peer.name} ended")
                return
            if self._device is not None and peer.card is not None:
                opened = self._device.open(peer.card)
            memory = _map(peer.life.pid, peer.source)
        except (OSError, TransferError) as error:
            if pidfd is not None:
                os.close(pidfd)
            self._shut(opened)
            self._lose(peer, f"cannot map the region of {peer.name}: {error}")
            return
        address = ctypes.addressof(ctypes.c_char.from_buffer(memory)) if opened is None else opened.address
        peer.mapping = _Mapping(memory, address, pidfd, opened)
        self._epoll.register(pidfd, select.EPOLLIN)

    def _look_after(self, peer: Peer) -> None:
        """Let it go if it is to be, or lost; else carry out one of its jobs."""
        if peer.cut_reason is not None:
            self._lose(peer, peer.cut_reason, is_ours=True)
        elif not peer.is_gone and (reason := peer.loss()) is not None:
            self._lose(peer, reason)
        elif peer.tasks:
            self._perform(peer, peer.tasks[0])

    def _perform(self, peer: Peer, task: Task) -> None:
        assert peer.mapping is not None
        ours, theirs = self._address, peer.mapping.address
        src, dst = (theirs, ours) if task.is_read else (ours, theirs)
        try:
            for _ in self._copier.steps(src, dst, task.spans):
                if peer.cut_reason is not None or self._stop_reason is not None:
                    return  # it is failed with the rest of what waits
            self._copier.finish()
        except TransferError as error:  # the GPU's
            self._lose(peer, str(error))
            return
        if (reason := peer.loss()) is not None:
            self._lose(peer, reason)
            return
        peer.tasks.popleft()
        self._outbox.put(JobDone(task.job, task.nbytes, time.monotonic() - task.began))

    def _lose(self, peer: Peer, reason: str, *, is_ours: bool = False) -> None:
        """Fail what waits, tell of the loss unless we wanted it, and let go of the region."""
        said: list[Completion] = [JobFailed(task.job, peer.name, reason) for task in peer.leave()]
        if not is_ours:
            said.append(PeerLost(peer.name, reason))
        if peer.mapping is not None:
            self._epoll.unregister(peer.mapping.pidfd)
            os.close(peer.mapping.pidfd)
            peer.mapping.memory.close()
            self._shut(peer.mapping.opened)
            peer.mapping = None
        if peer in self._peers:
            self._peers.remove(peer)
        self._outbox.put(*said)
        peer.has_left.set()

    def _shut(self, opened: Opened | None) -> None:
        if self._device is not None and opened is not None:
            with contextlib.suppress(TransferError):  # its owner is gone
                self._copier.finish()
                self._device.shut(opened)

    def _populate_some(self) -> None:
        for peer in self._peers:
            nbytes = min(_POPULATE_NBYTES, peer.source.nbytes - peer.num_populated)
            if peer.mapping is not None and nbytes > 0:  # never of a GPU's, whose source has none
                populate(peer.mapping.address + peer.num_populated, nbytes)
                peer.num_populated += nbytes
                return


def door_offset(nbytes: int) -> int:
    """Of the page that says whether the owner closed a region of `nbytes`."""
    return -(-nbytes // DOOR_NBYTES) * DOOR_NBYTES


def open_source(pid: int, source: Source) -> int:
    """A descriptor for the caller to close. Raises OSError where the region is not there, not the one meant, or could
    shrink under us."""
    fd = os.open(f"/proc/{pid}/fd/{source.fd}", os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK)
    found, length = os.fstat(fd), _length(source)
    if found.st_ino != source.inode or found.st_size != length:
        os.close(fd)
        raise OSError(
            f"file {source.fd} of process {pid} is inode {found.st_ino} of {found.st_size} bytes, "
            f"not inode {source.inode} of {length}"
        )
    try:
        is_sealed = bool(fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK)
    except OSError:
        is_sealed = False  # no memfd at all
    if not is_sealed:
        os.close(fd)
        raise OSError(f"file {source.fd} of process {pid} may shrink while we write to it")
    return fd


def _map(pid: int, source: Source) -> mmap.mmap:
    fd = open_source(pid, source)
    try:
        return mmap.mmap(fd, _length(source))
    finally:
        os.close(fd)


def _length(source: Source) -> int:
    return door_offset(source.nbytes) + DOOR_NBYTES
