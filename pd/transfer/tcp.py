"""Transfer over TCP, to anywhere: frames straight from one region into another's, many peers, one thread.

Who has not our endpoint has not the secret in it, and cannot write; with a cluster's `key` the endpoint alone is not
enough.
"""

from __future__ import annotations

import secrets
import socket
import threading
import time
from collections.abc import Sequence

import msgspec

from pd.transfer.address import numeric_address
from pd.transfer.device import Device, Gpu
from pd.transfer.outbox import Outbox
from pd.transfer.region import Region, check_spans
from pd.transfer.tcp_ends import Ends, HostEnds, StagedEnds
from pd.transfer.tcp_frames import MAX_NAME_NBYTES, SECRET_NBYTES, mixed
from pd.transfer.tcp_lane import Ours, TcpEndpoint, TcpLimits, decode
from pd.transfer.tcp_link import Mux
from pd.transfer.tcp_loop import TcpLoop
from pd.transfer.tcp_reach import Job, Peer
from pd.transfer.transport import Completion, Span, TransferError

SEVER_TIMEOUT_S = 5.0
"""For the thread to come by; one turn of it takes milliseconds, so only a stuck host takes longer."""

_BACKLOG = 256


class TcpTransport:
    """See `Transport`. `sever` ends the peer's connections on the thread that reads them, so it answers True."""

    name = "tcp"
    spare_nbytes = 0

    def __init__(
        self,
        *,
        me: str,
        host: str = "127.0.0.1",
        devices: tuple[str, ...] = (),
        key: bytes | None = None,
        limits: TcpLimits | None = None,
        outbox: Outbox | None = None,
    ) -> None:
        """`host` or the one network interface of `devices` is where peers reach us. Raises TransferError."""
        if not 0 < len(me.encode()) <= MAX_NAME_NBYTES:
            raise TransferError(f"a name has 1 to {MAX_NAME_NBYTES} bytes, not {me!r}")
        self.me = me
        self._address = numeric_address(host, devices, backend="tcp")
        self._limits = limits or TcpLimits()
        self._key = key
        self._outbox = outbox or Outbox()
        self.wake_fd = self._outbox.wake_fd
        self._owns_outbox = outbox is None
        self._device: Device | None = None
        self._secret = secrets.token_bytes(SECRET_NBYTES)
        self._loop: TcpLoop | None = None
        self._ours: Ours | None = None
        self._port = 0
        self._peers: dict[str, Peer] = {}

    def allocate(self, nbytes: int) -> memoryview:
        return self._open(Region.anonymous(nbytes)).view

    def register(self, address: int, nbytes: int, device: int | None = None) -> None:
        if device is None:
            self._open(Region.at(address, nbytes))
        else:
            self.register_on(Gpu(device), address, nbytes)

    def register_on(self, device: Device, address: int, nbytes: int) -> None:
        """Register memory of `device`, which is ours from here on."""
        self._device = device
        self._open(Region.on_device(address, nbytes))

    def endpoint(self) -> bytes:
        nbytes = self._running()[1].region.nbytes
        return msgspec.msgpack.encode(TcpEndpoint(self.me, self._address, self._port, self._secret, nbytes))

    def connect(self, peer: str, endpoint: bytes) -> None:
        there = decode(peer, endpoint)
        loop, ours = self._running()
        if {peer, there.me} & loop.severed:
            raise TransferError(f"{peer} was severed; a new life of it has a new name")
        if peer in self._peers and not self._peers[peer].is_gone:
            return
        known = self._peers[peer] = Peer(peer, there, me=self.me, ours=ours)

        def begin(now: float) -> None:
            loop.peers.append(known)
            known.connect(now)

        loop.do(begin)

    def describe(self, peer: str) -> str | None:
        return self.name if self._device is None else f"{self.name} (through pinned host memory)"

    def write(self, peer: str, spans: Sequence[Span], *, job: int) -> None:
        self._take(peer, spans, job, is_read=False)

    def read(self, peer: str, spans: Sequence[Span], *, job: int) -> None:
        self._take(peer, spans, job, is_read=True)

    def poll(self) -> list[Completion]:
        return self._outbox.drain()

    def sever(self, peer: str) -> bool:
        if self._loop is None:
            return True  # no region, so nobody writes into it
        loop, known, done = self._loop, self._peers.pop(peer, None), threading.Event()
        names = {peer, known.there.me} if known else {peer}

        def cut(now: float) -> None:
            loop.severed |= names
            loop.cut(names)
            if known is not None:
                known.lose("severed here", is_ours=True)
            done.set()

        loop.do(cut)
        return done.wait(SEVER_TIMEOUT_S)

    def close(self) -> None:
        if self._loop is not None and self._ours is not None:
            self._loop.stop()
            self._ours.region.close()
            self._loop = self._ours = None
        if self._device is not None:
            self._device.close()
            self._device = None
        self._peers.clear()
        if self._owns_outbox:
            self._outbox.close()

    def _open(self, region: Region) -> Region:
        if self._loop is not None:
            raise TransferError(f"{self.me} has a region already")
        family = socket.AF_INET6 if ":" in self._address else socket.AF_INET
        listener = socket.socket(family, socket.SOCK_STREAM)
        try:
            listener.bind((self._address, 0))
            listener.listen(_BACKLOG)
            listener.setblocking(False)
        except OSError as error:
            listener.close()
            raise TransferError(f"cannot listen on {self._address}: {error}") from error
        self._port = listener.getsockname()[1]
        device = self._device

        def ends() -> Ends:
            return HostEnds(region) if device is None else StagedEnds(region, device)

        self._ours = Ours(region, ends, self._outbox, Mux(), self._limits, self._key)
        self._loop = TcpLoop(listener, mixed(self._secret, self._key), self._ours)
        if device is not None:
            self._loop.do(lambda now: device.enter())
        return region

    def _running(self) -> tuple[TcpLoop, Ours]:
        if self._loop is None or self._ours is None:
            raise TransferError(f"{self.me} has no region: not allocated yet, or closed")
        return self._loop, self._ours

    def _take(self, peer: str, spans: Sequence[Span], job: int, *, is_read: bool) -> None:
        loop, ours = self._running()
        known = self._peers.get(peer)
        if known is None:
            raise TransferError(f"unknown peer {peer}")
        src, dst = known.there.nbytes, ours.region.nbytes
        if not is_read:
            src, dst = dst, src
        nbytes = check_spans(spans, src_nbytes=src, dst_nbytes=dst)
        if not known.give(Job(job, tuple(spans), is_read, nbytes, time.monotonic())):
            raise TransferError(f"{peer} is lost, or {self._limits.max_jobs} jobs wait for it already")
        loop.do(known.flush)
