"""Transfer that picks the way for each peer: shared memory on one host, else TCP; both over one region."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import msgspec

from pd.transfer import shm
from pd.transfer.host import is_dead, this_life, why_elsewhere
from pd.transfer.outbox import Outbox
from pd.transfer.region import refuse_device
from pd.transfer.shm import ShmEndpoint, ShmTransport
from pd.transfer.tcp import TcpTransport
from pd.transfer.transport import Completion, Span, TransferError


class _Endpoint(msgspec.Struct, frozen=True, array_like=True, tag="auto"):
    shm: bytes
    tcp: bytes


class AutoTransport:
    """See `Transport`. A peer's way is chosen when it is connected, and kept."""

    name = "auto"

    def __init__(
        self, *, me: str, host: str = "127.0.0.1", devices: tuple[str, ...] = (), key: bytes | None = None
    ) -> None:
        """`host`, `devices` and `key` are TCP's. Raises TransferError."""
        self.me = me
        self._outbox = Outbox()
        self.wake_fd = self._outbox.wake_fd
        self._shm = ShmTransport(me=me, outbox=self._outbox)
        self._tcp = TcpTransport(me=me, host=host, devices=devices, key=key, outbox=self._outbox)
        self._ways: dict[str, tuple[ShmTransport | TcpTransport, str]] = {}
        self._known: dict[str, ShmEndpoint] = {}

    def allocate(self, nbytes: int) -> memoryview:
        view = self._shm.allocate(nbytes)
        self._tcp.register(ctypes.addressof(ctypes.c_char.from_buffer(view)), nbytes)
        return view

    def register(self, address: int, nbytes: int, device: int | None = None) -> None:
        refuse_device("auto", address, nbytes, device)
        raise TransferError(
            f"auto allocates the memory that it moves; for the {nbytes} bytes at {address:#x} choose tcp"
        )

    def endpoint(self) -> bytes:
        return msgspec.msgpack.encode(_Endpoint(self._shm.endpoint(), self._tcp.endpoint()))

    def connect(self, peer: str, endpoint: bytes) -> None:
        try:
            there = msgspec.msgpack.decode(endpoint, type=_Endpoint)
        except msgspec.MsgspecError as error:
            raise TransferError(f"{peer} sent no auto endpoint: {error}") from error
        known = shm.decode(peer, there.shm)
        reason = shm.why_unreachable(known)
        if reason is None:
            self._shm.connect(peer, there.shm)
            self._ways[peer] = (self._shm, "one host")
        else:
            self._tcp.connect(peer, there.tcp)
            self._ways[peer] = (self._tcp, reason)
        self._known[peer] = known

    def describe(self, peer: str) -> str | None:
        """The way to a connected peer and why, for a person: `shm (one host)`."""
        way, why = self._way(peer)
        return f"{way.name} ({why})"

    def write(self, peer: str, spans: Sequence[Span], *, job: int) -> None:
        self._way(peer)[0].write(peer, spans, job=job)

    def read(self, peer: str, spans: Sequence[Span], *, job: int) -> None:
        self._way(peer)[0].read(peer, spans, job=job)

    def poll(self) -> list[Completion]:
        return self._outbox.drain()

    def sever(self, peer: str) -> bool:
        """True if neither way is left to it: its connections are ended, and it is elsewhere or dead.

        Asked again, looks again.
        """
        self._ways.pop(peer, None)
        known = self._known.get(peer)
        self._shm.sever(peer)
        is_cut = self._tcp.sever(peer)
        if known is None:
            return False  # nobody told us which process that is
        if known.me != peer:
            is_cut = self._tcp.sever(known.me) and is_cut
        ours = this_life()
        return is_cut and (why_elsewhere(known.life, ours) is not None or is_dead(known.life, ours))

    def close(self) -> None:
        self._tcp.close()  # first: it stands on the other's memory
        self._shm.close()
        self._outbox.close()

    def _way(self, peer: str) -> tuple[ShmTransport | TcpTransport, str]:
        if peer not in self._ways:
            raise TransferError(f"unknown peer {peer}")
        return self._ways[peer]
