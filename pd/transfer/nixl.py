"""NIXL as the library of a `LibraryTransport`: one agent, one backend (UCX unless told), no thread of its own.

What is done because it was measured or met (NIXL 1.5.1):
1. No progress thread: an idle one takes a whole core. `tend` makes progress for peers' writes instead.
2. A batch whose pieces lie at equal steps, as those of pages do, is told by their numbers in lists that were prepared
   once a peer (`nixl_lists`); another is described row by row. Out of cold caches the first takes a third less: of 128
   pieces 0.19 ms and 0.29, of 1,024 0.23 and 0.35, of 7 0.17 and 0.26, in 16 batches of 1,024 3.5 and 5.0. Prepared
   once is also the read of a peer's door, posted again and again.
3. Failures come as exceptions and as "ERR"; both are TransferError here.
4. Nothing is unpickled: the agent's metadata goes through NIXL's own reader, behind a digest.
5. Its `ucx_devices` is ignored for TCP; UCX's own UCX_NET_DEVICES is honoured. What is not there UCX warns of, and
   takes the rest: so whoever calls has looked (`address.refuse_unknown`).
6. UCX over TCP has the owner send what is read. If the reader dies with several reads under way, the owner's process
   may die too: of 96 readers killed with reads of 4 KiB under way four took it along (SIGSEGV, SIGABRT).
7. Its logger writes to standard output, which belongs to whoever started the process: it is given standard error.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pd.transfer import native
from pd.transfer.host import rdma_devices
from pd.transfer.library import Copies, LibraryLimits, Memory
from pd.transfer.library_transport import LibraryTransport
from pd.transfer.nixl_lists import Lists, Numbering, place
from pd.transfer.outbox import Outbox
from pd.transfer.transport import RegistrationFailed, TransferError

UCX_PARAMS = {
    *("engine_config", "num_threads", "num_workers", "split_batch_size", "ucx_error_handling_mode"),
    "ucx_num_device_channels",
}
"""NIXL takes any name and says nothing of those that mean nothing."""

_TEND_S = 1e-3


def nixl_transport(
    *,
    me: str,
    backend: str = "UCX",
    params: Mapping[str, str] | None = None,
    devices: tuple[str, ...] = (),
    limits: LibraryLimits | None = None,
    outbox: Outbox | None = None,
) -> LibraryTransport:
    """`params` are the NIXL backend's own (`num_threads`, `engine_config`, …). Raises TransferError."""
    if devices and backend != "UCX":
        raise TransferError(f"nixl's {backend} backend cannot be told its devices, so not {', '.join(devices)} either")
    options = dict(params or {})
    if backend == "UCX" and (unknown := sorted(set(options) - UCX_PARAMS)):
        known = ", ".join(sorted(UCX_PARAMS))
        raise TransferError(f"nixl's UCX backend would ignore the parameters {', '.join(unknown)}; it knows {known}")
    return LibraryTransport(
        me=me,
        start=lambda name: NixlLibrary(name, backend=backend, params=options, devices=devices),
        limits=limits,
        outbox=outbox,
    )


class NixlLibrary:
    """See `Library`. `name` is the agent's; peers know it from its metadata."""

    name = "nixl"
    tend_s: float | None = _TEND_S

    def __init__(self, name: str, *, backend: str, params: Mapping[str, str], devices: tuple[str, ...]) -> None:
        try:
            from nixl._api import nixl_agent, nixl_agent_config
        except ImportError as error:
            raise TransferError(
                f"nixl cannot be imported: {error}", hint="pip install nixl; then pd doctor --only nixl"
            ) from error
        _log_to_stderr()
        self._backend = backend
        asked = ", ".join([f"{key}={value}" for key, value in params.items()] + [*devices]) or "no parameters"
        with _Told(f"nixl cannot start its {backend} backend with {asked}"), _net_devices(devices):
            self._agent: Any = nixl_agent(name, nixl_agent_config(enable_prog_thread=False, backends=[]))
            if backend not in self._agent.get_plugin_list():
                raise TransferError(f"nixl has no backend {backend}, only {', '.join(self._agent.get_plugin_list())}")
            self._agent.create_backend(backend, dict(params))
        self._is_tcp = _is_tcp_alone(params)
        self._registered: list[Any] = []
        self._sizes: dict[Memory, int] = {}
        self._numbering = Numbering(native.load())

    def register(self, memory: Memory, nbytes: int) -> None:
        kind, device = place(memory)
        try:
            with _Told("registering"):
                self._registered.append(
                    self._agent.register_memory([(memory.address, nbytes, device, "")], kind, backends=[self._backend])
                )
            self._sizes[memory] = nbytes
        except TransferError as error:
            raise RegistrationFailed("nixl", memory.address, nbytes, device=memory.device, reason=str(error)) from error

    def contact(self) -> bytes:
        with _Told("reading nixl's metadata"):
            return bytes(self._agent.get_agent_metadata())

    def meet(self, contact: bytes, memory: Memory, nbytes: int) -> object:
        with _Told("meeting a peer's agent"):
            name = self._agent.add_remote_agent(contact)
            name = name.decode() if isinstance(name, bytes) else name
            return Lists(self._agent, self._backend, self._numbering, name, memory, nbytes)

    def part(self, there: object) -> None:
        assert isinstance(there, Lists)
        there.release()
        with _unheard():
            self._agent.remove_remote_agent(there.name)

    def is_owner_asked(self, *, is_near: bool) -> bool:
        return self._backend == "UCX" and (self._is_tcp if is_near else self._is_tcp or not rdma_devices())

    def post(self, there: object, copies: Copies) -> object:
        assert isinstance(there, Lists)
        with _Told("posting"):
            nbytes = self._sizes.get(copies.ours)
            made = there.make(copies, nbytes) if nbytes else None  # else it is a line of the slate
            batch = _Batch(self._described(there.name, copies) if made is None else made)
            batch.is_done = _check(self._agent.transfer(batch.transfer))
            return batch

    def _described(self, name: str, copies: Copies) -> Any:
        ours, theirs = _descriptors(copies)
        mine = self._agent.get_xfer_descs(ours, place(copies.ours)[0])
        yours = self._agent.get_xfer_descs(theirs, place(copies.theirs)[0])
        operation = "READ" if copies.is_read else "WRITE"
        return self._agent.initialize_xfer(operation, mine, yours, name, backends=[self._backend])

    def repeat(self, batch: object) -> None:
        assert isinstance(batch, _Batch)
        batch.is_done = False
        with _Told("posting again"):
            batch.is_done = _check(self._agent.transfer(batch.transfer))

    def is_done(self, batch: object) -> bool:
        assert isinstance(batch, _Batch)
        if not batch.is_done:
            with _Told("asking"):
                batch.is_done = _check(self._agent.check_xfer_state(batch.transfer))
        return batch.is_done

    def release(self, batch: object) -> None:
        assert isinstance(batch, _Batch)
        with _unheard():
            self._agent.release_xfer_handle(batch.transfer)

    def tell(self, ring: Callable[[], None]) -> bool:
        return False

    def tend(self) -> None:
        with _Told("tending"):
            self._agent.get_new_notifs()  # nobody sends any: landing is the leaders' message

    def close(self) -> None:
        for registered in self._registered:
            with _unheard():
                self._agent.deregister_memory(registered)
        self._registered.clear()
        self._agent = None


@dataclass(slots=True, eq=False)
class _Batch:
    transfer: Any
    is_done: bool = False


def _log_to_stderr() -> None:
    """Warnings and worse, unless NIXL's own variable asks for more."""
    logger = logging.getLogger("nixl")
    for sink in logger.handlers:
        if type(sink) is logging.StreamHandler:  # its own, and not one of a subclass that another has added
            sink.stream = sys.stderr  # `setStream` flushes the one before, which whoever gave it may have closed
    if "NIXL_LOG_LEVEL" not in os.environ:
        logger.setLevel(logging.WARNING)


def _is_tcp_alone(params: Mapping[str, str]) -> bool:
    """Whether UCX was told to take nothing but TCP."""
    settings = dict(pair.partition("=")[::2] for pair in params.get("engine_config", "").split(","))
    means = settings.get("TLS", os.environ.get("UCX_TLS", ""))
    return "tcp" in means.split(",") and set(means.split(",")) <= {"tcp", "self"}


@contextmanager
def _net_devices(devices: tuple[str, ...]) -> Iterator[None]:
    """UCX reads its variable once, when a backend starts."""
    if not devices:
        yield
        return
    wanted, found = ",".join(devices), os.environ.get("UCX_NET_DEVICES")
    if found not in (None, wanted):
        raise TransferError(f"devices are given twice: {wanted}, and UCX_NET_DEVICES={found}")
    os.environ["UCX_NET_DEVICES"] = wanted
    try:
        yield
    finally:
        if found is None:
            del os.environ["UCX_NET_DEVICES"]


def _descriptors(copies: Copies) -> tuple[NDArray[np.uint64], NDArray[np.uint64]]:
    """(address, length, device) a row, of our side and of theirs."""
    src, dst, nbytes = copies.spans.T
    here, there = (dst, src) if copies.is_read else (src, dst)
    return _rows(copies.ours, here, nbytes), _rows(copies.theirs, there, nbytes)


def _rows(memory: Memory, offsets: NDArray[np.int64], nbytes: NDArray[np.int64]) -> NDArray[np.uint64]:
    rows = np.empty((len(offsets), 3), np.uint64)
    rows[:, 0], rows[:, 1], rows[:, 2] = offsets + memory.address, nbytes, memory.device or 0
    return rows


def _check(state: str) -> bool:
    if state == "ERR":
        raise TransferError("nixl says ERR")
    return state == "DONE"


class _Told:
    """What NIXL raises within is a TransferError. No generator: it is entered four times a batch."""

    def __init__(self, what: str) -> None:
        self._what = what

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, Exception) and not isinstance(error, TransferError):
            raise TransferError(f"{self._what}: nixl raised {type(error).__name__}: {error}") from error


@contextmanager
def _unheard() -> Iterator[None]:
    """For what is let go: it may be gone already."""
    try:
        yield
    except Exception:  # noqa: BLE001
        return
