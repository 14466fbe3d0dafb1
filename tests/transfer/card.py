"""A GPU that is none: its memory is the host's. A copy is carried out when its mark is asked for, not when it is begun,
so whoever reads what was not waited for, or overwrites what is still to be copied, has wrong bytes."""

from __future__ import annotations

import ctypes
import threading
from collections import deque
from collections.abc import Iterable

from pd.transfer.device import Mark, Move, Opened, Pinned, Shared
from pd.transfer.transport import TransferError

_HANDLE_NBYTES = 64


class Card:
    """See `pd.transfer.device.Device`. Other processes cannot open what it shares."""

    can_share = True

    def __init__(self, number: int) -> None:
        self.number = number
        self.pinned: dict[int, ctypes.Array[ctypes.c_char]] = {}
        self._begun: deque[list[Move]] = deque()
        self._num_begun = self._num_done = 0
        self._thread: int | None = None

    def enter(self) -> None:
        self._thread = threading.get_ident()

    def share(self, address: int, nbytes: int) -> Shared:
        if not self.can_share:
            raise TransferError("this card shares nothing")
        return Shared.sealed(address.to_bytes(_HANDLE_NBYTES, "little"), 0, nbytes)

    def open(self, shared: Shared) -> Opened:
        if len(shared.handle) != _HANDLE_NBYTES:
            raise TransferError("no handle of a card")
        address = int.from_bytes(shared.handle, "little")
        return Opened(address, address + shared.offset)

    def shut(self, opened: Opened) -> None:
        pass

    def pin(self, nbytes: int) -> Pinned:
        self._check_thread()
        memory = ctypes.create_string_buffer(nbytes)
        address = ctypes.addressof(memory)
        self.pinned[address] = memory
        return Pinned(address, memoryview(memory).cast("B"))

    def unpin(self, pinned: Pinned) -> None:
        self._check_thread()
        del self.pinned[pinned.address]

    def copy(self, moves: Iterable[Move]) -> Mark:
        self._check_thread()
        self._begun.append(list(moves))
        self._num_begun += 1
        return Mark(self._num_begun)

    def is_done(self, mark: Mark) -> bool:
        self._check_thread()
        if self._num_done >= mark.event:
            return True
        for dst, src, nbytes in self._begun.popleft():
            ctypes.memmove(dst, src, nbytes)
        self._num_done += 1
        return False  # not even now: who asks must ask again

    def close(self) -> None:
        assert not self.pinned, f"{len(self.pinned)} pieces of host memory are still pinned"
        assert not self._begun, f"{len(self._begun)} copies were begun and not waited for"

    def _check_thread(self) -> None:
        assert threading.get_ident() == self._thread, "copies are for the thread that entered"
