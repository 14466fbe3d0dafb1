"""Mooncake's transfer engine as the library of a `LibraryTransport`; peers find each other without a metadata server.

What is done because it was measured or met (0.3.13):
1. A call that moves bytes waits for them, 30 s for a stopped peer; the calls that do not wait tell of one piece only.
   So each peer has a thread that waits in its place.
2. A batch of 4,096 pieces fails and one of 2,048 passes: `batches` cuts at 1,024.
3. It tells success from failure and no more: what failed is said by its log, on standard error.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import msgspec

from pd.transfer.address import numeric_address
from pd.transfer.library import Copies, LibraryLimits, Memory
from pd.transfer.library_transport import LibraryTransport
from pd.transfer.outbox import Outbox
from pd.transfer.transport import RegistrationFailed, TransferError

PROTOCOLS = ("tcp", "rdma")

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
    address = numeric_address(host, devices if protocol == "tcp" else (), backend="mooncake")
    nics = ",".join(devices) if protocol == "rdma" else ""
    return LibraryTransport(
        me=me,
        start=lambda _: MooncakeLibrary(address, protocol=protocol, nics=nics),
        limits=limits,
        outbox=outbox,
    )


class _Contact(msgspec.Struct, frozen=True, array_like=True, tag="mooncake"):
    session: str  # host:port


class MooncakeLibrary:
    """See `Library`. Peers know it from its address, which is that of one life: the port is the kernel's choice."""

    name = "mooncake"
    tend_s: float | None = None

    def __init__(self, address: str, *, protocol: str, nics: str) -> None:
        try:
            from mooncake import engine
        except ImportError as error:
            raise TransferError(
                f"mooncake cannot be imported: {error}",
                hint="pip install mooncake-transfer-engine (without CUDA: mooncake-transfer-engine-non-cuda); "
                "then pd doctor --only software.mooncake",
            ) from error
        self._reaches_gpus = bool(engine.SUPPORT_CUDA or engine.SUPPORT_HIP)
        self._engine: Any = engine.TransferEngine()
        if code := self._engine.initialize(address, "P2PHANDSHAKE", protocol, nics):
            raise TransferError(
                f"mooncake cannot start on {address} with {' over '.join(filter(None, (protocol, nics)))}: "
                f"it returned {code}",
                hint="its log above says why; pd doctor --only software.mooncake,rdma",
            )
        self._address = address
        self._registered: list[int] = []
        self._lanes: set[_Lane] = set()

    def register(self, memory: Memory, nbytes: int) -> None:
        reason = "this build of it knows no GPU" if memory.device is not None and not self._reaches_gpus else ""
        if not reason and (code := self._engine.register_memory(memory.address, nbytes)):
            reason = f"it returned {code}"
        if reason:
            raise RegistrationFailed("mooncake", memory.address, nbytes, device=memory.device, reason=reason)
        self._registered.append(memory.address)

    def contact(self) -> bytes:
        return msgspec.msgpack.encode(_Contact(f"{self._address}:{self._engine.get_rpc_port()}"))

    def meet(self, contact: bytes) -> object:
        try:
            there = msgspec.msgpack.decode(contact, type=_Contact)
        except msgspec.MsgspecError as error:
            raise TransferError(f"no mooncake contact: {error}") from error
        lane = _Lane(there.session)
        self._lanes.add(lane)
        return lane

    def part(self, there: object) -> None:
        assert isinstance(there, _Lane)
        self._lanes.discard(there)
        there.errands.put(None)

    def post(self, there: object, copies: Copies) -> object:
        assert isinstance(there, _Lane)
        engine, session = self._engine, there.session
        move = engine.batch_transfer_sync_read if copies.is_read else engine.batch_transfer_sync_write
        here = [copies.ours.address + (dst if copies.is_read else src) for src, dst, _ in copies.spans]
        yonder = [copies.theirs.address + (src if copies.is_read else dst) for src, dst, _ in copies.spans]
        sizes = [nbytes for _, _, nbytes in copies.spans]
        return there.do(lambda: int(move(session, here, yonder, sizes)))

    def is_done(self, batch: object) -> bool:
        assert isinstance(batch, Future)
        if not batch.done():
            return False
        if code := batch.result():
            raise TransferError(f"mooncake returned {code}")
        return True

    def release(self, batch: object) -> None:
        pass

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
    errands: queue.SimpleQueue[tuple[Future[int], Callable[[], int]] | None] = field(default_factory=queue.SimpleQueue)

    thread: threading.Thread = field(init=False)

    def __post_init__(self) -> None:
        self.thread = threading.Thread(target=self._run, name=f"pd-transfer-{self.session}", daemon=True)
        self.thread.start()

    def do(self, errand: Callable[[], int]) -> Future[int]:
        future: Future[int] = Future()
        self.errands.put((future, errand))
        return future

    def _run(self) -> None:
        while (taken := self.errands.get()) is not None:
            future, errand = taken
            try:
                future.set_result(errand())
            except BaseException as error:  # noqa: BLE001  whoever asks gets it
                future.set_exception(error)
