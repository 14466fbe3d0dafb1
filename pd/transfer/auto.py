"""Transfer that picks the way for each peer; all ways move bytes of one region.

on this host                        shm
elsewhere, no library at hand       tcp
elsewhere                           whichever of the library and tcp proves itself and is faster (contest.py)

The same on GPUs, where shm copies from GPU to GPU and tcp goes through pinned host memory.
"""

from __future__ import annotations

import ctypes
import itertools
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import msgspec

from pd.transfer import shm
from pd.transfer.contest import AREA_NBYTES, PATTERN, Access, Area, Contest, DeviceAccess, HostAccess, pattern
from pd.transfer.device import Gpu, MakesDevice
from pd.transfer.host import is_dead, this_life, why_elsewhere
from pd.transfer.library_transport import LibraryTransport
from pd.transfer.outbox import Outbox
from pd.transfer.region import check_spans
from pd.transfer.shm import MAX_JOBS, ShmEndpoint, ShmTransport
from pd.transfer.tcp import TcpTransport
from pd.transfer.transport import (
    Completion,
    JobDone,
    JobFailed,
    PeerLost,
    RegistrationFailed,
    Span,
    TransferError,
    Transport,
)

log = logging.getLogger(__name__)


class _Endpoint(msgspec.Struct, frozen=True, array_like=True, tag="auto"):
    shm: bytes
    tcp: bytes
    library: bytes = b""
    library_name: str = ""
    nbytes: int = 0  # of the region without the contest's area; 0: it has none


@dataclass(slots=True)
class _Peer:
    there: _Endpoint
    known: ShmEndpoint
    way: Transport | None  # None while the contest runs
    why: str
    contest: Contest | None = None
    waiting: list[tuple[Sequence[Span], int, bool]] = field(default_factory=list)  # spans, job, is_read


class AutoTransport:
    """See `Transport`. A peer's way is chosen when it is connected, and kept."""

    name = "auto"
    gpu: ClassVar[MakesDevice] = Gpu

    def __init__(
        self,
        *,
        me: str,
        host: str = "127.0.0.1",
        devices: tuple[str, ...] = (),
        key: bytes | None = None,
        library: Callable[[Outbox], LibraryTransport] | None = None,
        without: str = "",
    ) -> None:
        """`host`, `devices` and `key` are TCP's. `library` makes what may beat it, or `without` says why there is none.

        Raises TransferError.
        """
        self.me = me
        self._devices = devices
        self._outbox = Outbox()
        self.wake_fd = self._outbox.wake_fd
        self._boxes = {name: Outbox(within=self._outbox) for name in ("shm", "tcp", "library")}
        self._shm = ShmTransport(me=me, outbox=self._boxes["shm"])
        self._tcp = TcpTransport(me=me, host=host, devices=devices, key=key, outbox=self._boxes["tcp"])
        self._library: LibraryTransport | None = None
        self._without = without
        try:
            self._library = library(self._boxes["library"]) if library is not None else None
        except TransferError as error:
            self._without = f"no library, as it does not start: {error}"
        self._tries = itertools.count(-1, -1)  # jobs of contests; callers' are not negative
        self._memory: Access = HostAccess(memoryview(b""))
        self._nbytes = 0
        self.spare_nbytes = AREA_NBYTES if self._library is not None else 0
        self._peers: dict[str, _Peer] = {}
        self._known: dict[str, tuple[_Endpoint, ShmEndpoint]] = {}

    def allocate(self, nbytes: int) -> memoryview:
        area = self.spare_nbytes if nbytes > 0 else 0
        view = self._shm.allocate(nbytes + area)
        self._memory, self._nbytes = HostAccess(view), nbytes
        address = ctypes.addressof(ctypes.c_char.from_buffer(view))
        self._tcp.register(address, nbytes + area)
        if self._library is not None:
            self._library.register(address, nbytes + area)
            self._memory.put(nbytes + PATTERN, pattern(self.me))
        return view[:nbytes]

    def register(self, address: int, nbytes: int, device: int | None = None) -> None:
        """GPU memory, through whatever can reach it: pinned host memory always can. Its end is for contests."""
        if device is None:
            raise TransferError(
                f"auto allocates the memory that it moves; for the {nbytes} bytes at {address:#x} choose tcp"
            )
        try:
            self._shm.register_on(self.gpu(device), address, nbytes, number=device)
        except RegistrationFailed as error:
            log.warning("KV goes to peers of this host through host memory: %s", error)
            self._shm.register_on(self.gpu(device), address, nbytes, number=device, must_share=False)
        self._tcp.register_on(self.gpu(device), address, nbytes)
        if self._library is None:
            return
        self._memory = DeviceAccess(address, lambda: self.gpu(device))
        self._nbytes = nbytes - self.spare_nbytes
        self._memory.put(self._nbytes + PATTERN, pattern(self.me))
        try:
            self._library.register(address, nbytes, device)
        except TransferError as error:
            log.warning("KV goes to other hosts through host memory: %s", error)
            self._library.close()
            self._library, self._without = None, f"no library, as it cannot reach the GPU: {error}"

    def endpoint(self) -> bytes:
        library, name, nbytes = b"", "", 0
        if self._library is not None:
            library, name, nbytes = self._library.endpoint(), self._library.name, self._nbytes
        return msgspec.msgpack.encode(_Endpoint(self._shm.endpoint(), self._tcp.endpoint(), library, name, nbytes))

    def connect(self, peer: str, endpoint: bytes) -> None:
        try:
            there = msgspec.msgpack.decode(endpoint, type=_Endpoint)
        except msgspec.MsgspecError as error:
            raise TransferError(f"{peer} sent no auto endpoint: {error}") from error
        known = shm.decode(peer, there.shm)
        device = self._shm.device
        reason = shm.why_unreachable(known, device)
        if reason is None:
            self._shm.connect(peer, there.shm)
            unused = f", so not over {', '.join(self._devices)}" if self._devices else ""
            chosen = _Peer(there, known, self._shm, f"one host{unused}")
        else:
            self._tcp.connect(peer, there.tcp)
            chosen = self._contend(peer, there, known, reason)
        self._peers[peer] = chosen
        self._known[peer] = (there, known)

    def describe(self, peer: str) -> str | None:
        known = self._peer(peer)
        if known.way is None:
            return None
        staged = ", through pinned host memory" if known.way is self._tcp and self._shm.device is not None else ""
        return f"{known.way.name} ({known.why}{staged})"

    def write(self, peer: str, spans: Sequence[Span], *, job: int) -> None:
        self._take(peer, spans, job, is_read=False)

    def read(self, peer: str, spans: Sequence[Span], *, job: int) -> None:
        self._take(peer, spans, job, is_read=True)

    def poll(self) -> list[Completion]:
        ended = self._outbox.drain()
        now = time.monotonic()
        for name, box in self._boxes.items():
            for end in box.drain():
                ended += self._hear(name, end, now)
        for peer, known in list(self._peers.items()):
            if known.contest is not None:
                known.contest.tick(now)
                ended += self._settle(peer, known)
        return ended

    def sever(self, peer: str) -> bool:
        """True if no way is left to it: its connections are ended, and it is elsewhere or dead; dead where it has
        our library's contact. Asked again, looks again.
        """
        lost = self._peers.pop(peer, None)
        if lost is not None and lost.contest is not None:
            self._outbox.put(*(JobFailed(job, peer, "severed here") for _, job, _ in lost.waiting))
        there, known = self._known.get(peer, (None, None))
        self._shm.sever(peer)
        is_cut = self._tcp.sever(peer)
        if known is None or there is None:
            return False  # nobody told us which process that is
        if known.me != peer:
            is_cut = self._tcp.sever(known.me) and is_cut
        if self._library is not None and there.library_name == self._library.name:
            is_cut = self._library.sever(peer) and is_cut
        ours = this_life()
        return is_cut and (why_elsewhere(known.life, ours) is not None or is_dead(known.life, ours))

    def close(self) -> None:
        if self._library is not None:
            self._library.close()
        self._tcp.close()  # before shm: it stands on the other's memory
        self._memory = HostAccess(memoryview(b""))
        self._shm.close()
        for peer, known in self._peers.items():
            self._outbox.put(*(JobFailed(job, peer, "transport closed") for _, job, _ in known.waiting))
            known.waiting.clear()
        self._outbox.close()

    def _contend(self, peer: str, there: _Endpoint, known: ShmEndpoint, reason: str) -> _Peer:
        """Over tcp at once, or over what the contest finds."""
        if self._library is None or there.library_name != self._library.name:
            lacks = self._without if self._library is None else f"its library is {there.library_name or 'none'}"
            return _Peer(there, known, self._tcp, f"{reason}; {lacks}" if lacks else reason)
        if (contending := self._peers.get(peer)) is not None and contending.contest is not None:
            return contending
        self._library.connect(peer, there.library)
        ways: dict[str, Transport] = {self._library.name: self._library, "tcp": self._tcp}
        ours, theirs = Area(self._nbytes, self.me), Area(there.nbytes, known.me)
        contest = Contest(peer, ways, self._memory, ours, theirs, self._tries)
        contest.start(time.monotonic())
        return _Peer(there, known, None, reason, contest)

    def _hear(self, box: str, end: Completion, now: float) -> list[Completion]:
        """What the caller is to hear of what ended on one way."""
        peer = self._peers.get(end.peer) if not isinstance(end, JobDone) else None
        name = self._library.name if box == "library" and self._library is not None else box
        if isinstance(end, PeerLost | JobFailed) and peer is not None and peer.contest is not None:
            peer.contest.hear(name, end, now)
            return []
        if isinstance(end, JobDone | JobFailed) and end.job < 0:
            for known in self._peers.values():
                if known.contest is not None:
                    known.contest.hear(name, end, now)
            return []
        if isinstance(end, PeerLost) and peer is not None and peer.way is not None and peer.way.name != name:
            return []  # a way that is not used
        return [end]

    def _settle(self, peer: str, known: _Peer) -> list[Completion]:
        """Once its contest is over: give what waited to the winner, or lose the peer."""
        assert known.contest is not None
        if not known.contest.is_over:
            return []
        told, winner = known.contest.told(), known.contest.winner
        waiting, known.waiting = known.waiting, []
        ways, known.contest = known.contest.ways, None
        if winner is None:
            del self._peers[peer]
            reason = f"no way to {peer} works: {told}"
            return [*(JobFailed(job, peer, reason) for _, job, _ in waiting), PeerLost(peer, reason)]
        known.way, known.why = ways[winner], f"{known.why}; measured {told}"
        failed: list[Completion] = []
        for spans, job, is_read in waiting:
            try:
                (known.way.read if is_read else known.way.write)(peer, spans, job=job)
            except TransferError as error:
                failed.append(JobFailed(job, peer, str(error)))
        return failed

    def _take(self, peer: str, spans: Sequence[Span], job: int, *, is_read: bool) -> None:
        known = self._peer(peer)
        if known.there.nbytes and self._library is not None:  # without the areas behind the regions
            src, dst = (known.there.nbytes, self._nbytes) if is_read else (self._nbytes, known.there.nbytes)
            check_spans(spans, src_nbytes=src, dst_nbytes=dst)
        if known.way is not None:
            (known.way.read if is_read else known.way.write)(peer, spans, job=job)
        elif len(known.waiting) < MAX_JOBS:
            known.waiting.append((tuple(spans), job, is_read))
        else:
            raise TransferError(f"{MAX_JOBS} jobs wait for {peer} already")

    def _peer(self, peer: str) -> _Peer:
        if peer not in self._peers:
            raise TransferError(f"unknown peer {peer}")
        return self._peers[peer]
