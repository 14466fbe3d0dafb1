"""A GPU's memory, for backends that copy by themselves: shared with other processes, copied on a stream of its own.

Through the runtime library that torch has loaded into this process. CUDA's and ROCm's are alike but for their names:

    cuda  cudaMalloc, cudaIpcGetMemHandle, …   driver: cuMemGetAddressRange
    rocm  hipMalloc, hipIpcGetMemHandle, …     hipMemGetAddressRange, in the same library

Rules
1. Nothing waits for the device but `wait`, which has a deadline. Copies go on a stream that waits for no other work.
2. What a copy reads or writes is left alone until its mark is done.
3. Calls after `enter` come from the thread that entered.
"""

from __future__ import annotations

import ctypes
import hashlib
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

import msgspec

from pd.transfer.copying import batches
from pd.transfer.transport import Span, TransferError

COPY_S = 10.0
"""For a copy: a megabyte takes some 50 µs, so only a stuck device takes longer."""


class Shared(msgspec.Struct, frozen=True, array_like=True):
    """A region as another process of this host can open it."""

    handle: bytes  # empty: it cannot be opened
    offset: int  # of the region in what the handle opens
    nbytes: int
    seal: bytes = b""

    @classmethod
    def sealed(cls, handle: bytes, offset: int, nbytes: int) -> Shared:
        return cls(handle, offset, nbytes, _seal(handle, offset, nbytes))

    @property
    def is_sound(self) -> bool:
        """Nothing else checks an offset: a broken one would lead into what is another's."""
        return self.seal == _seal(self.handle, self.offset, self.nbytes)


def _seal(handle: bytes, offset: int, nbytes: int) -> bytes:
    return hashlib.blake2b(handle + f"{offset} {nbytes}".encode(), digest_size=8).digest()


class Opened(NamedTuple):
    base: int
    address: int  # of the region


class Pinned(NamedTuple):
    """Host memory that the device copies from and to by itself."""

    address: int
    view: memoryview


class Move(NamedTuple):
    """One copy between addresses, of the host or of devices."""

    dst: int
    src: int
    nbytes: int


class Mark(NamedTuple):
    """Done when all that was copied before it is."""

    event: int


class Device(Protocol):
    """All raise TransferError where the device refuses."""

    def enter(self) -> None:
        """This thread is the one that will call."""

    def share(self, address: int, nbytes: int) -> Shared: ...

    def open(self, shared: Shared) -> Opened: ...

    def shut(self, opened: Opened) -> None: ...

    def pin(self, nbytes: int) -> Pinned: ...

    def unpin(self, pinned: Pinned) -> None: ...

    def copy(self, moves: Iterable[Move]) -> Mark:
        """Begin; in order with what was begun before."""

    def is_done(self, mark: Mark) -> bool:
        """Once True, the mark is spent."""

    def close(self) -> None:
        """Of the stream; raises nothing."""


class MakesDevice(Protocol):
    def __call__(self, number: int) -> Device: ...


def wait(device: Device, mark: Mark, *, timeout_s: float = COPY_S) -> None:
    """Until the copies before `mark` are done. Raises TransferError after the timeout."""
    until = time.monotonic() + timeout_s
    num_asked = 0
    while not device.is_done(mark):
        if time.monotonic() > until:
            raise TransferError(f"the GPU has not copied in {timeout_s:g} s")
        num_asked += 1
        time.sleep(0 if num_asked < _SPINS else _NAP_S)


class DeviceCopier:
    """Copies between regions of devices: begins the next batch while the last one goes on. See `copying.Copies`."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._last: Mark | None = None

    def steps(self, src: int, dst: int, spans: Sequence[Span]) -> Iterator[None]:
        for batch in batches(spans):
            yield
            before = self._last
            self._last = self._device.copy(Move(dst + span.dst, src + span.src, span.nbytes) for span in batch)
            if before is not None:
                wait(self._device, before)

    def finish(self) -> None:
        if self._last is not None:
            mark, self._last = self._last, None
            wait(self._device, mark)


_SPINS = 50
_NAP_S = 50e-6
_IPC_NBYTES = 64
_LAZY_PEER_ACCESS, _NON_BLOCKING, _NO_TIMING, _ANY_TO_ANY = 1, 1, 2, 4
_NOT_READY = 600  # in both runtimes


class _IpcHandle(ctypes.Structure):
    _fields_ = [("reserved", ctypes.c_char * _IPC_NBYTES)]


class Gpu:
    """See `Device`. Made for one GPU of this process, by its number here."""

    def __init__(self, number: int) -> None:
        """Raises TransferError where no GPU runtime is loaded."""
        path, prefix = _runtime()
        self._number = number
        self._prefix = prefix
        self._library = ctypes.CDLL(path)
        self._library[f"{prefix}GetErrorString"].restype = ctypes.c_char_p
        self._library[f"{prefix}IpcOpenMemHandle"].argtypes = [ctypes.c_void_p, _IpcHandle, ctypes.c_uint]
        self._spare: list[int] = []  # events
        self._stream = ctypes.c_void_p()

    def enter(self) -> None:
        self._call("SetDevice", self._number)
        if not self._stream:
            self._call("StreamCreateWithFlags", ctypes.byref(self._stream), _NON_BLOCKING)

    def share(self, address: int, nbytes: int) -> Shared:
        handle = _IpcHandle()
        self._call("SetDevice", self._number)
        self._call("IpcGetMemHandle", ctypes.byref(handle), ctypes.c_void_p(address))
        return Shared.sealed(bytes(handle), address - self._base_of(address), nbytes)

    def open(self, shared: Shared) -> Opened:
        if not shared.handle:
            raise TransferError("its GPU memory cannot be shared with other processes")
        if len(shared.handle) != _IPC_NBYTES:
            raise TransferError(f"a handle of GPU memory has {_IPC_NBYTES} bytes, not {len(shared.handle)}")
        base = ctypes.c_void_p()
        handle = _IpcHandle.from_buffer_copy(shared.handle)
        self._call("SetDevice", self._number)
        self._call("IpcOpenMemHandle", ctypes.byref(base), handle, _LAZY_PEER_ACCESS)
        assert base.value is not None
        return Opened(base.value, base.value + shared.offset)

    def shut(self, opened: Opened) -> None:
        self._call("IpcCloseMemHandle", ctypes.c_void_p(opened.base))

    def pin(self, nbytes: int) -> Pinned:
        address = ctypes.c_void_p()
        name = "HostAlloc" if self._prefix == "cuda" else "HostMalloc"
        self._call(name, ctypes.byref(address), ctypes.c_size_t(nbytes), 0)
        assert address.value is not None
        return Pinned(address.value, memoryview((ctypes.c_char * nbytes).from_address(address.value)).cast("B"))

    def unpin(self, pinned: Pinned) -> None:
        self._call("FreeHost" if self._prefix == "cuda" else "HostFree", ctypes.c_void_p(pinned.address))

    def copy(self, moves: Iterable[Move]) -> Mark:
        begin = self._library[f"{self._prefix}MemcpyAsync"]
        for dst, src, nbytes in moves:
            code = begin(
                *(ctypes.c_void_p(dst), ctypes.c_void_p(src), ctypes.c_size_t(nbytes)), _ANY_TO_ANY, self._stream
            )
            if code:
                raise self._error("MemcpyAsync", code)
        event = self._spare.pop() if self._spare else self._new_event()
        self._call("EventRecord", ctypes.c_void_p(event), self._stream)
        return Mark(event)

    def is_done(self, mark: Mark) -> bool:
        code = self._library[f"{self._prefix}EventQuery"](ctypes.c_void_p(mark.event))
        if code == _NOT_READY:
            return False
        if code:
            raise self._error("EventQuery", code)
        self._spare.append(mark.event)
        return True

    def close(self) -> None:
        for event in self._spare:
            self._library[f"{self._prefix}EventDestroy"](ctypes.c_void_p(event))
        if self._stream:
            self._library[f"{self._prefix}StreamDestroy"](self._stream)
        self._spare, self._stream = [], ctypes.c_void_p()

    def _new_event(self) -> int:
        event = ctypes.c_void_p()
        self._call("EventCreateWithFlags", ctypes.byref(event), _NO_TIMING)
        assert event.value is not None
        return event.value

    def _base_of(self, address: int) -> int:
        """Where the allocation begins that holds the address: a handle is always of a whole one."""
        base, nbytes = ctypes.c_void_p(), ctypes.c_size_t()
        if self._prefix == "cuda":
            ask = ctypes.CDLL("libcuda.so.1").cuMemGetAddressRange_v2
        else:
            ask = self._library.hipMemGetAddressRange
        if code := ask(ctypes.byref(base), ctypes.byref(nbytes), ctypes.c_void_p(address)):
            raise TransferError(f"the driver does not know GPU memory at {address:#x}: it returned {code}")
        assert base.value is not None
        return base.value

    def _call(self, name: str, *args: object) -> None:
        if code := self._library[f"{self._prefix}{name}"](*args):
            raise self._error(name, code)

    def _error(self, name: str, code: int) -> TransferError:
        said = self._library[f"{self._prefix}GetErrorString"](code)
        self._library[f"{self._prefix}GetLastError"]()  # else torch would find it and take it for its own
        return TransferError(f"GPU {self._number}: {self._prefix}{name}: {said.decode(errors='replace')} ({code})")


def _runtime() -> tuple[str, str]:
    """The path of the GPU runtime that this process has loaded, and how its functions' names begin."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        path = line.rpartition(" ")[2]
        name = path.rpartition("/")[2]
        for library, prefix in (("libcudart.so", "cuda"), ("libamdhip64.so", "hip")):
            if name.startswith(library) or (library == "libcudart.so" and name.startswith("libcudart-")):
                return path, prefix
    raise TransferError("this process has loaded no GPU runtime (libcudart or libamdhip64), which torch brings")
