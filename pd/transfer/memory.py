"""Transfer within one process: for tests of whatever stands on a transport, with real bytes and no thread.

Bytes move inside `poll`, so a test decides when. Transports of one hub may live in different threads.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from pd.transfer.outbox import Outbox
from pd.transfer.region import Region, check_spans
from pd.transfer.transport import Completion, JobDone, JobFailed, PeerLost, Span, TransferError

MAX_JOBS = 4096
"""Waiting for one peer; more are refused. A step gives each peer a few, so this many means nobody polls."""


class MemoryHub:
    """Who can reach whom: the network of one test. Passed to each transport; its lock guards them all."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.members: dict[str, MemoryTransport] = {}


class Task(msgspec.Struct, frozen=True):
    """A job on its way."""

    peer: str
    job: int
    spans: tuple[Span, ...]
    is_read: bool
    nbytes: int
    began: float


class _Endpoint(msgspec.Struct, frozen=True, array_like=True, tag="memory"):
    me: str
    nbytes: int


@dataclass(slots=True)
class _Peer:
    endpoint: _Endpoint
    tasks: deque[Task] = field(default_factory=deque)


class MemoryTransport:
    """See `Transport`. `me` must be new to the hub: a restarted peer has another name."""

    name = "memory"
    spare_nbytes = 0

    def __init__(self, *, me: str, hub: MemoryHub) -> None:
        self.me = me
        self._hub = hub
        self._outbox = Outbox()
        self.wake_fd = self._outbox.wake_fd
        self._region: Region | None = None
        self._peers: dict[str, _Peer] = {}
        self._severed: set[str] = set()

    def allocate(self, nbytes: int) -> memoryview:
        return self._join(Region.anonymous(nbytes)).view

    def register(self, address: int, nbytes: int, device: int | None = None) -> None:
        if device is not None:
            raise TransferError(f"memory cannot reach the {nbytes} bytes of GPU {device} at {address:#x}")
        self._join(Region.at(address, nbytes))

    def endpoint(self) -> bytes:
        return msgspec.msgpack.encode(_Endpoint(self.me, _region_of(self).nbytes))

    def connect(self, peer: str, endpoint: bytes) -> None:
        try:
            there = msgspec.msgpack.decode(endpoint, type=_Endpoint)
        except msgspec.MsgspecError as error:
            raise TransferError(f"{peer} sent no memory endpoint: {error}") from error
        with self._hub.lock:
            _region_of(self)
            if peer in self._severed or there.me in self._severed:
                raise TransferError(f"{peer} was severed; a new life of it has a new name")
            self._peers.setdefault(peer, _Peer(there))
            self._outbox.ring()

    def describe(self, peer: str) -> str | None:
        return self.name

    def write(self, peer: str, spans: Sequence[Span], *, job: int) -> None:
        self._take(peer, spans, job, is_read=False)

    def read(self, peer: str, spans: Sequence[Span], *, job: int) -> None:
        self._take(peer, spans, job, is_read=True)

    def poll(self) -> list[Completion]:
        with self._hub.lock:
            if self._region is not None:
                for peer in list(self._peers):
                    self._move(peer)
        return self._outbox.drain()

    def sever(self, peer: str) -> bool:
        with self._hub.lock:
            known = self._peers.get(peer)
            me = known.endpoint.me if known else peer
            self._severed |= {peer, me}
            self._lose(peer, "severed here", is_ours=True)
            if me in self._hub.members:
                self._hub.members[me]._outbox.ring()
        return True

    def close(self) -> None:
        with self._hub.lock:
            for peer in list(self._peers):
                self._lose(peer, "transport closed", is_ours=True)
            if self._region is not None:
                del self._hub.members[self.me]
                self._region.close()
                self._region = None
            for member in self._hub.members.values():
                member._outbox.ring()
            self._outbox.close()

    def _is_due(self, task: Task) -> bool:
        """A test's subclass may hold a task back; then it also rings when the task is due."""
        return True

    def _join(self, region: Region) -> Region:
        with self._hub.lock:
            if self._region is not None or self.me in self._hub.members:
                raise TransferError(f"{self.me} has a region already")
            self._region = region
            self._hub.members[self.me] = self
        return region

    def _take(self, peer: str, spans: Sequence[Span], job: int, *, is_read: bool) -> None:
        with self._hub.lock:
            ours = _region_of(self).nbytes
            known = self._peers.get(peer)
            if known is None:
                raise TransferError(f"unknown peer {peer}")
            if len(known.tasks) >= MAX_JOBS:
                raise TransferError(f"{MAX_JOBS} jobs wait for {peer} already")
            theirs = known.endpoint.nbytes
            src, dst = (theirs, ours) if is_read else (ours, theirs)
            nbytes = check_spans(spans, src_nbytes=src, dst_nbytes=dst)
            known.tasks.append(Task(peer, job, tuple(spans), is_read, nbytes, time.monotonic()))
            self._outbox.ring()

    def _move(self, peer: str) -> None:
        known = self._peers[peer]
        target = self._hub.members.get(known.endpoint.me)
        if target is None or self.me in target._severed:
            self._lose(peer, f"{peer} is gone" if target is None else f"{peer} severed us")
            return
        ours, theirs = _region_of(self).view, _region_of(target).view
        while known.tasks and self._is_due(known.tasks[0]):
            task = known.tasks.popleft()
            source, sink = (theirs, ours) if task.is_read else (ours, theirs)
            for src, dst, nbytes in task.spans:
                sink[dst : dst + nbytes] = source[src : src + nbytes]
            self._outbox.put(JobDone(task.job, task.nbytes, time.monotonic() - task.began))

    def _lose(self, peer: str, reason: str, *, is_ours: bool = False) -> None:
        """Fail what waits; then tell of the loss, unless we cut it off ourselves."""
        known = self._peers.pop(peer, None)
        if known is None:
            return
        self._outbox.put(*(JobFailed(task.job, peer, reason) for task in known.tasks))
        if not is_ours:
            self._outbox.put(PeerLost(peer, reason))


def _region_of(transport: MemoryTransport) -> Region:
    if transport._region is None:
        raise TransferError(f"{transport.me} has no region: not allocated yet, or closed")
    return transport._region
