"""NIXL as the library of a `LibraryTransport`: one agent, one backend (UCX unless told), no thread of its own.

What is done because it was measured or met (NIXL 1.5.1):
1. No progress thread: an idle one takes a whole core. `tend` makes progress for peers' writes instead.
2. Descriptor lists are made a batch, not prepared once a peer: a request of 128 pieces takes 7 µs to make from such
   lists and 5 from prepared ones (1,024: 36 and 35), after as long to find the indices as to make the lists, and 8 ms
   (12) to move. Prepared once is what is the same each time: the read of a peer's door, posted again and again.
3. Failures come as exceptions and as "ERR"; both are TransferError here.
4. Nothing is unpickled: the agent's metadata goes through NIXL's own reader, behind a digest.
5. Its `ucx_devices` is ignored for TCP; UCX's own UCX_NET_DEVICES is honoured, and refuses what is not there.
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
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pd.transfer.host import rdma_devices
from pd.transfer.library import Copies, LibraryLimits, Memory
from pd.transfer.library_transport import LibraryTransport
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
        with _told(f"nixl cannot start its {backend} backend with {asked}"), _net_devices(devices):
            self._agent: Any = nixl_agent(name, nixl_agent_config(enable_prog_thread=False, backends=[]))
            if backend not in self._agent.get_plugin_list():
                raise TransferError(f"nixl has no backend {backend}, only {', '.join(self._agent.get_plugin_list())}")
            self._agent.create_backend(backend, dict(params))
        self._is_tcp = _is_tcp_alone(params)
        self._registered: list[Any] = []

    def register(self, memory: Memory, nbytes: int) -> None:
        kind, device = _place(memory)
        try:
            with _told("registering"):
                self._registered.append(
                    self._agent.register_memory([(memory.address, nbytes, device, "")], kind, backends=[self._backend])
                )
        except TransferError as error:
            raise RegistrationFailed("nixl", memory.address, nbytes, device=memory.device, reason=str(error)) from error

    def contact(self) -> bytes:
        with _told("reading nixl's metadata"):
            return bytes(self._agent.get_agent_metadata())

    def meet(self, contact: bytes) -> object:
        with _told("meeting a peer's agent"):
            name = self._agent.add_remote_agent(contact)
            return name.decode() if isinstance(name, bytes) else name

    def part(self, there: object) -> None:
        with _unheard():
            self._agent.remove_remote_agent(there)

    def is_owner_asked(self, *, is_near: bool) -> bool:
        return self._backend == "UCX" and (self._is_tcp if is_near else self._is_tcp or not rdma_devices())

    def post(self, there: object, copies: Copies) -> object:
        ours, theirs = _descriptors(copies)
        with _told("posting"):
            mine = self._agent.get_xfer_descs(ours, _place(copies.ours)[0])
            yours = self._agent.get_xfer_descs(theirs, _place(copies.theirs)[0])
            handle = self._agent.initialize_xfer(
                "READ" if copies.is_read else "WRITE", mine, yours, there, backends=[self._backend]
            )
            _check(self._agent.transfer(handle))
            return handle

    def repeat(self, batch: object) -> None:
        with _told("posting again"):
            _check(self._agent.transfer(batch))

    def is_done(self, batch: object) -> bool:
        with _told("asking"):
            return _check(self._agent.check_xfer_state(batch))

    def release(self, batch: object) -> None:
        with _unheard():
            self._agent.release_xfer_handle(batch)

    def tell(self, ring: Callable[[], None]) -> bool:
        return False

    def tend(self) -> None:
        with _told("tending"):
            self._agent.get_new_notifs()  # nobody sends any: landing is the leaders' message

    def close(self) -> None:
        for registered in self._registered:
            with _unheard():
                self._agent.deregister_memory(registered)
        self._registered.clear()
        self._agent = None


def _log_to_stderr() -> None:
    """Warnings and worse, unless NIXL's own variable asks for more."""
    logger = logging.getLogger("nixl")
    for sink in logger.handlers:
        if type(sink) is logging.StreamHandler:  # its own, and not one of a subclass that another has added
            sink.setStream(sys.stderr)
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


def _place(memory: Memory) -> tuple[str, int]:
    return ("DRAM", 0) if memory.device is None else ("VRAM", memory.device)


def _check(state: str) -> bool:
    if state == "ERR":
        raise TransferError("nixl says ERR")
    return state == "DONE"


@contextmanager
def _told(what: str) -> Iterator[None]:
    try:
        yield
    except TransferError:
        raise
    except Exception as error:
        raise TransferError(f"{what}: nixl raised {type(error).__name__}: {error}") from error


@contextmanager
def _unheard() -> Iterator[None]:
    """For what is let go: it may be gone already."""
    try:
        yield
    except Exception:  # noqa: BLE001
        return
