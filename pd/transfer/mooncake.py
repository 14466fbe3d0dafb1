"""Mooncake's transfer engine as the library of a `LibraryTransport`; peers find each other without a metadata server.

What is done because it was measured or met (0.3.13):
1. Over tcp it makes a connection for each piece unless it is told to keep some (4 a peer): of 1,024 at once some waited
   a second for the kernel to try again, and 4,096 failed.
2. Its call for a batch asks all the time whether it is done, which takes a core from those that move the bytes: two
   ranks' 128 pieces each into one rank took 235 ms on two cores. Without 1 and 2 it is 34 ms.
3. So over tcp a piece is a batch of its own, begun by the call that does not wait, which tells of one piece only. Over
   rdma, where it tries a failed batch again by other devices, its own call for a batch is taken.
4. A stopped peer is waited for 30 s, by either call: each peer has a thread that waits in its place.
5. It tells success from failure and no more: what failed is said by its log, on standard error.
"""

from __future__ import annotations

import os
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import msgspec

from pd.transfer.address import numeric_address
from pd.transfer.host import rdma_devices
from pd.transfer.library import Copies, LibraryLimits, Memory
from pd.transfer.library_transport import LibraryTransport
from pd.transfer.outbox import Outbox
from pd.transfer.transport import RegistrationFailed, TransferError

PROTOCOLS = ("tcp", "rdma")

_WINDOW = 256
"""Pieces begun and not done, of one peer. Four move; of more than 1,024 the rest would fail after a second."""
_NAP_S = 50e-6
_LONG_NAP_S = 10e-3
_NAP_SHARE = 1 / 40
"""Of the time that a batch takes so far: with naps of 50 µs throughout, and another thread asking this one, three ranks
that wrote 47 MB to one took 48 ms on two cores, now 34 to 40: asking kept a core from those that move bytes."""
_SETTINGS = {
    "MC_TCP_ENABLE_CONNECTION_POOL": "1",
    "MC_LOG_LEVEL": "WARNING",  # else a dozen lines an engine, and one a batch; read once a process
}
_JOIN_S = 1.0
"""For a call that waits for a stopped peer: it is left to end by itself."""


def mooncake_transport(
    *,
    me: str,
    host: str,
    protocol: str = "tcp",
    devices: tuple[str, ...] = (),
    limits: LibraryLimits | None = None,
    outbox: Outbox | None = None,
) -> LibraryTransport:
    """`devices` are RDMA devices, or for tcp the one interface of this host that peers reach. Raises TransferError."""
    if protocol not in PROTOCOLS:
        raise TransferError(f"mooncake moves bytes by {' or '.join(PROTOCOLS)}, not by {protocol!r}")
    if protocol == "rdma":
        _refuse_what_is_not_here(devices)
    address = numeric_address(host, devices if protocol == "tcp" else (), backend="mooncake")
    nics = ",".join(devices) if protocol == "rdma" else ""
    return LibraryTransport(
        me=me,
        start=lambda _: MooncakeLibrary(address, protocol=protocol, nics=nics),
        limits=limits,
        outbox=outbox,
    )


def _refuse_what_is_not_here(devices: tuple[str, ...]) -> None:
    """Mooncake would go over tcp instead, with a warning among its own."""
    here = rdma_devices()
    if not here:
        raise TransferError(
            "mooncake over rdma: this host has no RDMA device",
            hint="--transfer-param protocol=tcp, or --transfer tcp; pd doctor --only rdma says what is missing",
        )
    if missing := [device for device in devices if device not in here]:
        raise TransferError(
            f"mooncake over rdma: no device {', '.join(missing)} here, only {', '.join(here)}",
            hint="name some of these, or leave --transfer-devices out: then it takes what it likes",
        )


class _Contact(msgspec.Struct, frozen=True, array_like=True, tag="mooncake"):
    session: str  # host:port


class MooncakeLibrary:
    """See `Library`. Peers know it from its address, which is that of one life: the port is the kernel's choice."""

    name = "mooncake"
    tend_s: float | None = None

    def __init__(self, address: str, *, protocol: str, nics: str) -> None:
        with _settings():
            engine = _imported()
            self._reaches_gpus = bool(engine.SUPPORT_CUDA or engine.SUPPORT_HIP)
            self._engine: Any = engine.TransferEngine()
            code = self._engine.initialize(address, "P2PHANDSHAKE", protocol, nics)
        if code:
            raise TransferError(
                f"mooncake cannot start on {address} with {' over '.join(filter(None, (protocol, nics)))}: "
                f"it returned {code}",
                hint="its log above says why; pd doctor --only software.mooncake,rdma",
            )
        self._address = address
        self._move = move_by_pieces if protocol == "tcp" else _move_at_once
        self._registered: list[int] = []
        self._lanes: set[_Lane] = set()
        self._ring: Callable[[], None] = _ring_nobody

    def register(self, memory: Memory, nbytes: int) -> None:
        reason = "this build of it knows no GPU" if memory.device is not None and not self._reaches_gpus else ""
        if not reason and (code := self._engine.register_memory(memory.address, nbytes)):
            reason = f"it returned {code}"
        if reason:
            raise RegistrationFailed("mooncake", memory.address, nbytes, device=memory.device, reason=reason)
        self._registered.append(memory.address)

    def contact(self) -> bytes:
        return msgspec.msgpack.encode(_Contact(f"{self._address}:{self._engine.get_rpc_port()}"))

    def meet(self, contact: bytes, memory: Memory, nbytes: int) -> object:
        try:
            there = msgspec.msgpack.decode(contact, type=_Contact)
        except msgspec.MsgspecError as error:
            raise TransferError(f"no mooncake contact: {error}") from error
        lane = _Lane(there.session, self._ring)
        self._lanes.add(lane)
        return lane

    def part(self, there: object) -> None:
        assert isinstance(there, _Lane)
        self._lanes.discard(there)
        there.errands.put(None)

    def is_owner_asked(self, *, is_near: bool) -> bool:
        return False  # over tcp it is, and takes no harm

    def post(self, there: object, copies: Copies) -> object:
        assert isinstance(there, _Lane)
        batch = _Batch(there, partial(self._move, self._engine, there.session, copies))
        self.repeat(batch)
        return batch

    def repeat(self, batch: object) -> None:
        assert isinstance(batch, _Batch)
        batch.future = Future()
        batch.lane.errands.put((batch.future, batch.move))

    def is_done(self, batch: object) -> bool:
        assert isinstance(batch, _Batch)
        if not batch.future.done():
            return False
        if (error := batch.future.exception()) is not None:
            raise TransferError(f"mooncake raised {type(error).__name__}: {error}") from error
        if code := batch.future.result():
            raise TransferError(f"mooncake returned {code}")
        return True

    def release(self, batch: object) -> None:
        pass

    def tell(self, ring: Callable[[], None]) -> bool:
        self._ring = ring
        return True

    def tend(self) -> None:
        pass

    def close(self) -> None:
        lanes = list(self._lanes)
        for lane in lanes:
            self.part(lane)
        for lane in lanes:
            lane.thread.join(_JOIN_S)
        for address in self._registered:
            self._engine.unregister_memory(address)
        self._registered.clear()
        self._engine = None


@dataclass(slots=True, eq=False)
class _Lane:
    """One peer, and the thread that waits for what it is given, in order."""

    session: str
    ring: Callable[[], None]
    errands: queue.SimpleQueue[tuple[Future[int], Callable[[], int]] | None] = field(default_factory=queue.SimpleQueue)

    thread: threading.Thread = field(init=False)

    def __post_init__(self) -> None:
        self.thread = threading.Thread(target=self._run, name=f"pd-transfer-{self.session}", daemon=True)
        self.thread.start()

    def _run(self) -> None:
        while (taken := self.errands.get()) is not None:
            future, errand = taken
            try:
                future.set_result(errand())
            except BaseException as error:  # noqa: BLE001  whoever asks gets it
                future.set_exception(error)
            self.ring()


@dataclass(slots=True, eq=False)
class _Batch:
    lane: _Lane
    move: Callable[[], int]
    future: Future[int] = field(default_factory=Future)


def move_by_pieces(engine: Any, session: str, copies: Copies) -> int:
    """Returns once every one has ended: 0, or -1 if one failed."""
    begin = engine.batch_transfer_async_read if copies.is_read else engine.batch_transfer_async_write
    begun: deque[int] = deque()
    is_well = True
    since = time.monotonic()
    for here, yonder, nbytes in zip(*_sides(copies), strict=True):
        if len(begun) >= _WINDOW:
            is_well &= _ended_well(engine, begun.popleft(), since)
        ticket = begin(session, [here], [yonder], [nbytes]) if is_well else 0
        if not ticket:
            is_well = False
            break
        begun.append(ticket)
    for ticket in begun:
        is_well &= _ended_well(engine, ticket, since)
    return 0 if is_well else -1


def _ended_well(engine: Any, ticket: int, since: float) -> bool:
    """Waits for it. `since`: when the first of its batch was begun."""
    while not (code := engine.transfer_check_status(ticket)):
        time.sleep(min(max(_NAP_S, (time.monotonic() - since) * _NAP_SHARE), _LONG_NAP_S))
    return bool(code == 1)


def _move_at_once(engine: Any, session: str, copies: Copies) -> int:
    move = engine.batch_transfer_sync_read if copies.is_read else engine.batch_transfer_sync_write
    return int(move(session, *_sides(copies)))


def _sides(copies: Copies) -> tuple[list[int], list[int], list[int]]:
    """Addresses here and there, and sizes."""
    src, dst, nbytes = copies.spans.T
    here, yonder = (dst, src) if copies.is_read else (src, dst)
    return (here + copies.ours.address).tolist(), (yonder + copies.theirs.address).tolist(), nbytes.tolist()


def _imported() -> Any:
    try:
        from mooncake import engine
    except ImportError as error:
        raise TransferError(
            f"mooncake cannot be imported: {error}",
            hint="pip install mooncake-transfer-engine (without CUDA: mooncake-transfer-engine-non-cuda); "
            "then pd doctor --only software.mooncake",
        ) from error
    return engine


def _ring_nobody() -> None:
    """Before anyone listens."""


@contextmanager
def _settings() -> Iterator[None]:
    """Mooncake reads its variables when an engine starts. Whoever has set one has chosen."""
    ours = {name: value for name, value in _SETTINGS.items() if name not in os.environ}
    os.environ.update(ours)
    try:
        yield
    finally:
        for name in ours:
            del os.environ[name]
