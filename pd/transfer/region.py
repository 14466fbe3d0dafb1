"""The memory a transport moves bytes in and out of, and the check that spans stay inside."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
from collections.abc import Sequence

from pd.transfer.rows import Rows
from pd.transfer.transport import Span, TransferError


class Region:
    """One piece of this process's memory. `view` and `address` are good until `close`."""

    def __init__(
        self, memory: mmap.mmap | ctypes.Array[ctypes.c_char] | None, nbytes: int, *, address: int | None = None
    ) -> None:
        """`address` alone, without `memory`: of a GPU, where the processor cannot look."""
        self.nbytes = nbytes
        self.view = memoryview(memory).cast("B")[:nbytes] if memory is not None else memoryview(b"")
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(memory)) if memory is not None else address or 0

    @classmethod
    def anonymous(cls, nbytes: int) -> Region:
        """Zeroed memory of this process alone. Raises TransferError where there is none."""
        check_size(nbytes)
        try:
            memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except (OSError, OverflowError) as error:
            raise TransferError(f"cannot allocate a region of {nbytes} bytes: {error}") from error
        with contextlib.suppress(OSError):  # a kernel without them
            memory.madvise(
                mmap.MADV_HUGEPAGE
            )  # a library that copies through the kernel pins pages: 5.2 GB/s, else 2.9
        return cls(memory, nbytes)

    @classmethod
    def at(cls, address: int, nbytes: int) -> Region:
        """Host memory that the caller made and keeps alive until `close`."""
        check_size(nbytes)
        return cls((ctypes.c_char * nbytes).from_address(address), nbytes)

    @classmethod
    def on_device(cls, address: int, nbytes: int) -> Region:
        """GPU memory that the caller made and keeps alive until `close`. `view` is empty."""
        check_size(nbytes)
        return cls(None, nbytes, address=address)

    def close(self) -> None:
        """Let go. The memory goes with the last view of it: releasing the view instead would pull it from under
        `torch.frombuffer`, which keeps the view alive but does not count as its export."""
        self.view = memoryview(b"")
        self.address = 0


def check_size(nbytes: int) -> None:
    if nbytes < 1:
        raise TransferError(f"a region has at least 1 byte, not {nbytes}")


def check_spans(spans: Sequence[Span], *, src_nbytes: int, dst_nbytes: int) -> int:
    """Bytes of all spans together. Raises TransferError naming the first that leaves a region."""
    if isinstance(spans, Rows) and (nbytes := spans.fit(src_nbytes=src_nbytes, dst_nbytes=dst_nbytes)) is not None:
        return nbytes
    total = 0
    for src, dst, nbytes in spans:
        if not (0 <= src <= src_nbytes - nbytes and 0 <= dst <= dst_nbytes - nbytes and nbytes > 0):
            raise TransferError(
                f"Span(src={src}, dst={dst}, nbytes={nbytes}) leaves a region: "
                f"source of {src_nbytes} bytes, destination of {dst_nbytes}"
            )
        total += nbytes
    return total
