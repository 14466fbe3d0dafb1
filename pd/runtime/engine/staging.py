"""Between host and device without waiting: numbers go up in one copy a step, answers are read when they are there.

On a GPU both go through pinned memory, since a copy from or to ordinary memory waits for all the work before it. Pinned
memory comes from torch's caching allocator, which gives none out again before the copy that uses it is done. On a CPU
nothing is copied.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

ALIGNMENT = 16  # bytes: kernels load four words at once


def upload(arrays: Sequence[NDArray[Any]], device: torch.device) -> list[Tensor]:
    """The arrays on the device, views of one buffer there."""
    if device.type != "cuda":
        given = [torch.from_numpy(array) for array in arrays]
        return given if device.type == "cpu" else [x.to(device) for x in given]
    offsets, nbytes = places(arrays)
    pinned = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
    fill(pinned, arrays, offsets)
    return views(pinned.to(device, non_blocking=True), arrays, offsets)


def places(arrays: Sequence[NDArray[Any]]) -> tuple[list[int], int]:
    """Where each array begins in a common buffer, and the buffer's bytes."""
    offsets, end = [], 0
    for array in arrays:
        offsets.append(end)
        end += -(-array.nbytes // ALIGNMENT) * ALIGNMENT
    return offsets, end


def fill(buffer: Tensor, arrays: Sequence[NDArray[Any]], offsets: Sequence[int]) -> None:
    """Write the arrays into a uint8 buffer of the host."""
    flat = buffer.numpy()
    for array, offset in zip(arrays, offsets, strict=True):
        flat[offset : offset + array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def views(buffer: Tensor, arrays: Sequence[NDArray[Any]], offsets: Sequence[int]) -> list[Tensor]:
    """Tensors of the arrays' shapes and dtypes over a buffer that `fill` has filled."""
    found = []
    for array, offset in zip(arrays, offsets, strict=True):
        dtype = torch.from_numpy(np.empty(0, dtype=array.dtype)).dtype
        found.append(buffer[offset : offset + array.nbytes].view(dtype).view(array.shape))
    return found


class Download:
    """Tensors on their way to the host."""

    def __init__(self, *tensors: Tensor) -> None:
        """Starts the copies behind the work that is queued now."""
        self._event: torch.cuda.Event | None = None
        self._tensors = tensors
        if any(tensor.is_cuda for tensor in tensors):
            self._tensors = tuple(_to_pinned(tensor) for tensor in tensors)
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record()

    def is_done(self) -> bool:
        return self._event is None or bool(self._event.query())  # type: ignore[no-untyped-call]

    def wait(self) -> tuple[Tensor, ...]:
        """The tensors in host memory. Returns at once where the work is done."""
        if self._event is not None:
            self._event.synchronize()
            self._event = None
        return self._tensors


def _to_pinned(tensor: Tensor) -> Tensor:
    pinned = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return pinned.copy_(tensor, non_blocking=True)
