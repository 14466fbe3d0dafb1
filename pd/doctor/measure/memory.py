"""Host memory for libraries that register what the caller made."""

from __future__ import annotations

import ctypes
import mmap


class Memory:
    """Anonymous and zeroed, in huge pages where the kernel gives them (copies between processes pin page by page)."""

    def __init__(self, nbytes: int) -> None:
        self._map = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            self._map.madvise(mmap.MADV_HUGEPAGE)
        self.view = memoryview(self._map)
        first = ctypes.c_char.from_buffer(self._map)
        self.address = ctypes.addressof(first)
        self.nbytes = nbytes
