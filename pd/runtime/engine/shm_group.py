"""Collectives between the CPU ranks of one instance through shared memory: some 10 µs where gloo takes 300.

Rules
1. All ranks make the same calls in the same order with tensors of the same size.
2. A sum is taken in the order of ranks, in float32, rounded once, so that every rank gets the same bits.
3. The memory has no name: it ends with the last process that maps it, however that dies.
4. A rank that waits sleeps after some 30 µs (at once where ranks outnumber cores), hears signals, and raises
   GroupError within 0.1 s when a peer died or left, and after `DEADLINE_S` when one does not come.
"""

from __future__ import annotations

import os
from types import TracebackType
from typing import Self

import torch.distributed as dist
from torch import Tensor

from pd.runtime.engine import cpu_build

MAX_BYTES = 1 << 20
"""A rank's slot; larger tensors go in pieces. Two slots of all ranks of a wide instance (8) still fit a cache."""
DEADLINE_S = 60.0
"""Longer than any step, so that a slow peer is not taken for a lost one."""


class GroupError(Exception):
    """A peer died, left, or did not come; the message names it. The group is of no more use."""


def join(rank: int, size: int, *, max_bytes: int = MAX_BYTES) -> ShmGroup | None:
    """Meet the other ranks of torch.distributed's default group in shared memory.

    None, on every rank alike, where one of them has no C++ ops or cannot reach the memory (another PID namespace).
    """
    native = cpu_build.load().module
    fd = native.make_region(size, max_bytes) if native is not None and rank == 0 else None
    path = f"/proc/{os.getpid()}/fd/{fd}" if fd is not None else ""
    paths: list[str | None] = [None] * size
    dist.all_gather_object(paths, path if native is not None else None)
    group = None
    if native is not None and None not in paths:
        try:
            group = ShmGroup(rank, size, str(paths[0]), max_bytes=max_bytes)
        except OSError:
            group = None
    reached: list[bool] = [False] * size
    dist.all_gather_object(reached, group is not None)
    if fd is not None:
        os.close(fd)
    if group is not None and not all(reached):
        group.close()
    return group if all(reached) else None


class ShmGroup:
    """One rank's end. Tensors are contiguous and on the CPU, of any size, zero included."""

    def __init__(
        self, rank: int, size: int, path: str, *, max_bytes: int = MAX_BYTES, deadline_s: float = DEADLINE_S
    ) -> None:
        """`path`: of a region of `make_region(size, max_bytes)`. OSError if it cannot be opened."""
        native = cpu_build.load().module
        assert native is not None, "join() asks first"
        self.rank = rank
        self.size = size
        self._broken = native.GroupBroken
        self._group = native.ShmGroup(rank, size, os.open(path, os.O_RDWR | os.O_CLOEXEC), max_bytes, deadline_s)

    def all_reduce_(self, x: Tensor) -> Tensor:
        """The sum over ranks, in place; returns x. float32 or bfloat16."""
        try:
            self._group.all_reduce(x)
        except self._broken as error:
            raise GroupError(str(error)) from error
        return x

    def gather_to_first(self, x: Tensor) -> Tensor | None:
        """All ranks' tensors stacked, on rank 0: [size, *x.shape]. None elsewhere. Any dtype."""
        try:
            return self._group.gather_to_first(x)
        except self._broken as error:
            raise GroupError(str(error)) from error

    def broadcast(self, x: Tensor) -> Tensor:
        """Rank 0's values, in place; returns x. Any dtype."""
        try:
            self._group.broadcast(x)
        except self._broken as error:
            raise GroupError(str(error)) from error
        return x

    def close(self) -> None:
        """Leave. Peers that still wait for this rank raise. Idempotent."""
        self._group.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
