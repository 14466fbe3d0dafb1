"""Collectives of CPU ranks: shared memory beside gloo, in one run: `python -m benchmarks.shm_group [--ranks N]`.

The best of many turns of each, of 20 calls, since other processes share the machine. A rank that shares a core with
another waits for it to be scheduled: then the figure is the scheduler's.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch
import torch.distributed as dist
from torch import Tensor

from pd.runtime.engine import shm_group

NUM_TURNS = 40
CALLS_A_TURN = 20
SIZES = (512, 16 * 576, 512 * 576)
"""bf16 elements: 1 KiB; a decode step of 16 rows of the default model; a prefill chunk of 512."""


def mean_us(call: Callable[[Tensor], object], x: Tensor) -> float:
    """Of one turn. A single call tells little: the rank that comes last does not wait."""
    start = time.perf_counter()
    for _ in range(CALLS_A_TURN):
        call(x)
    return (time.perf_counter() - start) / CALLS_A_TURN * 1e6


def run(rank: int, num_ranks: int, rendezvous: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=rendezvous, world_size=num_ranks, rank=rank)
    group = shm_group.join(rank, num_ranks)
    if group is None:
        sys.stdout.write("no C++ ops, nothing to compare\n" if rank == 0 else "")
        return
    for size in SIZES:
        x = torch.zeros(size, dtype=torch.bfloat16)
        ours = gloo = float("inf")
        for _ in range(NUM_TURNS):
            ours = min(ours, mean_us(group.all_reduce_, x))
            gloo = min(gloo, mean_us(dist.all_reduce, x))
        if rank == 0:
            line = f"all-reduce of {size * 2:>7} bytes, {num_ranks} ranks: {ours:8.1f} us, gloo {gloo / ours:5.1f}x"
            sys.stdout.write(line + "\n")
    group.close()
    dist.destroy_process_group()


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        spawn = multiprocessing.get_context("fork")
        ranks = [
            spawn.Process(target=run, args=(rank, args.ranks, f"file://{folder}/meet")) for rank in range(args.ranks)
        ]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join()


if __name__ == "__main__":
    main()
