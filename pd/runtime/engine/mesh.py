"""The ranks of one instance and what they say to each other inside a step. Made once, handed down.

Rules
1. Every rank makes the same calls in the same order; none asks whether it is alone: a mesh of one answers at once.
2. A sum is the same bits on every rank: ranks that disagreed by a rounding would sample from different logits.
"""

from __future__ import annotations

from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from pd.runtime.engine import shm_group

# B rows, V vocabulary of the model, W of the widest rank


class Mesh(Protocol):
    """Tensor-parallel ranks on one axis."""

    tp: int
    rank: int
    note: str  # for the start-up line: what carries the sums

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum over ranks, in place; returns x."""

    def gather_to_first(self, x_BW: Tensor) -> Tensor | None:
        """Stack all ranks' tensors, alike in shape, on rank 0: [tp, B, W]. None elsewhere."""

    def broadcast(self, x: Tensor) -> Tensor:
        """Rank 0's values, in place; returns x."""

    def minimum(self, value: int) -> int: ...

    def close(self) -> None: ...


def make_mesh(tp: int, rank: int, *, like: Tensor, rendezvous: str) -> Mesh:
    """Meet the other ranks at `rendezvous` (an init_method of torch.distributed). Blocks until all are there.

    `like`: of the dtype and device that sums will have. Between CPU ranks they go through shared memory where the
    C++ ops are built: gloo takes 300 µs where that takes 10, twice a layer.
    """
    if tp == 1:
        return Alone()
    distributed = Distributed(tp, rank, device=like.device, rendezvous=rendezvous)
    if like.device.type == "cpu" and like.dtype in (torch.float32, torch.bfloat16):
        group = shm_group.join(rank, tp)
        if group is not None:
            return SharedMemory(group, distributed)
    return distributed


class Alone:
    """A mesh of one rank."""

    tp = 1
    rank = 0
    note = "one rank"

    def all_reduce(self, x: Tensor) -> Tensor:
        return x

    def gather_to_first(self, x_BW: Tensor) -> Tensor | None:
        return x_BW[None]

    def broadcast(self, x: Tensor) -> Tensor:
        return x

    def minimum(self, value: int) -> int:
        return value

    def close(self) -> None:
        pass


class Distributed:
    """Over torch.distributed: NCCL (RCCL on ROCm) between GPUs, gloo between CPU processes."""

    def __init__(self, tp: int, rank: int, *, device: torch.device, rendezvous: str) -> None:
        self.tp = tp
        self.rank = rank
        self.note = "nccl" if device.type == "cuda" else "gloo"
        self._device = device
        # Told its device, NCCL joins at once: a rank that cannot is heard of here and not in the first step.
        device_id = device if device.type == "cuda" else None
        dist.init_process_group(self.note, init_method=rendezvous, world_size=tp, rank=rank, device_id=device_id)

    def all_reduce(self, x: Tensor) -> Tensor:
        dist.all_reduce(x)
        return x

    def gather_to_first(self, x_BW: Tensor) -> Tensor | None:
        if self.rank != 0:
            dist.gather(x_BW.contiguous())
            return None
        parts = x_BW.new_empty(self.tp, *x_BW.shape)
        dist.gather(x_BW.contiguous(), list(parts.unbind(0)))
        return parts

    def broadcast(self, x: Tensor) -> Tensor:
        dist.broadcast(x, src=0)
        return x

    def minimum(self, value: int) -> int:
        held = torch.tensor([value], dtype=torch.int64, device=self._device)
        dist.all_reduce(held, dist.ReduceOp.MIN)
        return int(held.item())

    def close(self) -> None:
        dist.destroy_process_group()


class SharedMemory:
    """Between CPU ranks of one host; what happens once, at start, still goes through torch.distributed."""

    note = "shared memory"

    def __init__(self, group: shm_group.ShmGroup, distributed: Distributed) -> None:
        self.tp = group.size
        self.rank = group.rank
        self._distributed = distributed
        self._group = group
        self.all_reduce = group.all_reduce_
        self.gather_to_first = group.gather_to_first
        self.broadcast = group.broadcast

    def minimum(self, value: int) -> int:
        return self._distributed.minimum(value)

    def close(self) -> None:
        self._group.close()
        self._distributed.close()
