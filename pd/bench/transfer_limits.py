"""What a backend cannot beat, measured beside it: for shm one memmove of as many bytes into another process's memory,
for tcp one raw stream into another process, for a library its own write of one piece, without any of our transport
around it."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from typing import Protocol

import msgspec
import numpy as np

from pd.transfer.library import Copies, Library, Memory
from pd.transfer.transport import TransferError

_WRITE_S = 60.0
_TOLD_S = 50e-3
"""Longest between two looks at a write whose end is told."""


class OtherEnd(msgspec.Struct, frozen=True):
    """In the child."""

    port: int = 0  # of the raw stream
    fd: int = -1  # the child's memory, to be mapped
    pid: int = 0
    contact: bytes = b""
    address: int = 0


class Limit(Protocol):
    name: str

    def seconds(self, nbytes: int) -> float:
        """For so many bytes, once."""


def make_limit(backend: str, nbytes: int, there: OtherEnd, params: Mapping[str, str]) -> Limit | None:
    """Of at most `nbytes`. None: nothing is moved."""
    match backend:
        case "fake":
            return None
        case "shm":
            return _Memmove(nbytes, there)
        case "tcp":
            return _Stream(nbytes, there.port)
    return _LibraryWrite(backend, nbytes, there, params)


@contextlib.contextmanager
def serve_limit(backend: str, nbytes: int, params: Mapping[str, str]) -> Iterator[OtherEnd]:
    """The child's half."""
    match backend:
        case "fake":
            yield OtherEnd()
        case "shm":
            fd = os.memfd_create("pd-limit", os.MFD_CLOEXEC)
            with _shared(fd, nbytes):
                yield OtherEnd(fd=fd, pid=os.getpid())
            os.close(fd)
        case "tcp":
            with socket.create_server(("127.0.0.1", 0)) as server:
                threading.Thread(target=_drain, args=(server, nbytes), daemon=True).start()
                yield OtherEnd(port=server.getsockname()[1])
        case _:
            memory, address = _touched(nbytes)
            library = _bare(backend, "limit-there", params)
            library.register(Memory(address), nbytes)
            contact = library.contact()
            threading.Thread(target=_tend, args=(library,), daemon=True).start()
            yield OtherEnd(contact=contact, address=address)
            del memory


class _Memmove:
    """By one thread, between memory as the pools are: each made and touched by its own process."""

    name = "memcpy"

    def __init__(self, nbytes: int, there: OtherEnd) -> None:
        ours = os.memfd_create("pd-limit", os.MFD_CLOEXEC)
        theirs = os.open(f"/proc/{there.pid}/fd/{there.fd}", os.O_RDWR | os.O_CLOEXEC)
        self._memory = _shared(ours, nbytes), _shared(theirs, nbytes)
        self._src, self._dst = map(_address, self._memory)
        os.close(ours)
        os.close(theirs)

    def seconds(self, nbytes: int) -> float:
        began = time.perf_counter()
        ctypes.memmove(self._dst, self._src, nbytes)
        return time.perf_counter() - began


class _Stream:
    name = "raw stream"

    def __init__(self, nbytes: int, port: int) -> None:
        self._memory, _ = _touched(nbytes)
        self._sock = socket.create_connection(("127.0.0.1", port))
        self._sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def seconds(self, nbytes: int) -> float:
        """Until the reader says that it has the last byte."""
        began = time.perf_counter()
        self._sock.sendall(nbytes.to_bytes(8, "big"))
        self._sock.sendall(memoryview(self._memory)[:nbytes])
        self._sock.recv(1)
        return time.perf_counter() - began


class _LibraryWrite:
    name = "one large write"

    def __init__(self, backend: str, nbytes: int, there: OtherEnd, params: Mapping[str, str]) -> None:
        self._memory, address = _touched(nbytes)
        self._library = _bare(backend, "limit-here", params)
        self._has_ended = threading.Event()
        self._is_told = self._library.tell(self._has_ended.set)
        self._ours, self._theirs = Memory(address), Memory(there.address)
        self._library.register(self._ours, nbytes)
        self._library.contact()
        self._there = self._library.meet(there.contact, self._theirs, nbytes)
        self.seconds(nbytes)

    def seconds(self, nbytes: int) -> float:
        began = time.perf_counter()
        copies = Copies(self._ours, self._theirs, np.array([[0, 0, nbytes]]), is_read=False)
        batch = self._library.post(self._there, copies)
        while not self._library.is_done(batch):
            if time.perf_counter() - began > _WRITE_S:
                raise TransferError(
                    f"one write of {nbytes} bytes by {self._library.name} is not done in {_WRITE_S:g} s"
                )
            if self._is_told:  # as ours are: to ask all the time would take a core from those that move the bytes
                self._has_ended.wait(_TOLD_S)
                self._has_ended.clear()
        took = time.perf_counter() - began
        self._library.release(batch)
        return took


def _bare(backend: str, name: str, params: Mapping[str, str]) -> Library:
    given = dict(params)
    if backend == "nixl":
        from pd.transfer.nixl import NixlLibrary

        return NixlLibrary(name, backend=given.pop("backend", "UCX"), params=given, devices=())
    from pd.transfer.mooncake import MooncakeLibrary

    return MooncakeLibrary("127.0.0.1", protocol=given.get("protocol", "tcp"), nics="")


def _tend(library: Library) -> None:
    while library.tend_s is not None:
        library.tend()
        time.sleep(library.tend_s)


def _touched(nbytes: int) -> tuple[mmap.mmap, int]:
    """Memory as the pools of tcp and of libraries are: private, and in huge pages where there are any."""
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):
        memory.madvise(mmap.MADV_HUGEPAGE)
    ctypes.memset(_address(memory), 1, nbytes)
    return memory, _address(memory)


def _shared(fd: int, nbytes: int) -> mmap.mmap:
    """A memfd of so many bytes, mapped and touched."""
    os.ftruncate(fd, nbytes)
    memory = mmap.mmap(fd, nbytes)
    ctypes.memset(_address(memory), 1, nbytes)
    return memory


def _address(memory: mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


def _drain(server: socket.socket, nbytes: int) -> None:
    """Read streams into memory, and answer each with one byte."""
    memory = memoryview(_touched(nbytes)[0])
    sock, _ = server.accept()
    while header := sock.recv(8, socket.MSG_WAITALL):
        left = memory[: int.from_bytes(header, "big")]
        while left:
            left = left[sock.recv_into(left) :]
        sock.sendall(b".")
