"""Collectives in shared memory: real processes, forked, since the memory is shared between such."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from pd.runtime.engine import cpu_build, shm_group
from pd.runtime.engine.shm_group import GroupError, ShmGroup

NATIVE = cpu_build.load().module
needs_cpp = pytest.mark.skipif(NATIVE is None, reason="C++ ops not built")
FORK = multiprocessing.get_context("fork")
WAIT_S = 60.0  # for a child that hangs: the test fails then

Body = Callable[[ShmGroup, Connection], Any]


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


class Ranks:
    """Processes of one group, each running `body(group, pipe)`, whose answer or GroupError comes back."""

    def __init__(self, size: int, body: Body, *, max_bytes: int = 1 << 20, deadline_s: float = 60.0) -> None:
        assert NATIVE is not None
        fd = NATIVE.make_region(size, max_bytes)
        path = f"/proc/{os.getpid()}/fd/{fd}"
        self.pipes, self.processes = [], []
        for rank in range(size):
            ours, theirs = FORK.Pipe()
            process = FORK.Process(
                target=_run, args=(rank, size, path, theirs, body, {"max_bytes": max_bytes, "deadline_s": deadline_s})
            )
            process.start()
            theirs.close()
            self.pipes.append(ours)
            self.processes.append(process)
        self.fd = fd

    def answer(self, rank: int) -> Any:
        assert self.pipes[rank].poll(WAIT_S), f"rank {rank} hangs"
        return self.pipes[rank].recv()

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self.fd)
        for process in self.processes:
            process.join(timeout=0.5)
            process.kill()
            process.join()


def _run(rank: int, size: int, path: str, pipe: Connection, body: Body, options: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    with ShmGroup(rank, size, path, **options) as group:
        try:
            pipe.send(body(group, pipe))
        except GroupError as error:
            pipe.send(error)


def answers(size: int, body: Body, **options: Any) -> list[Any]:
    with Ranks(size, body, **options) as ranks:
        return [ranks.answer(rank) for rank in range(size)]


def part(rank: int, size: int, seed: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed * 100 + rank)).to(dtype)


SIZES = (0, 1, 7, 16, 511, 9000, 70_001)  # the last two take several pieces of 64 KiB


@needs_cpp
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_rank_gets_the_sum_in_the_order_of_ranks(num_ranks: int, dtype: torch.dtype) -> None:
    def body(group: ShmGroup, _: Connection) -> list[torch.Tensor]:
        return [group.all_reduce_(part(group.rank, size, size, dtype)).view(torch.uint8).numpy() for size in SIZES]

    got = answers(num_ranks, body, max_bytes=65_536)
    for at, size in enumerate(SIZES):
        total = torch.zeros(size)
        for rank in range(num_ranks):
            total += part(rank, size, size, dtype).float()
        want = total.to(dtype).view(torch.uint8).numpy()
        for rank in range(num_ranks):
            assert (got[rank][at] == want).all(), (rank, size)


@needs_cpp
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int64])
def test_gather_and_broadcast_carry_any_bytes(dtype: torch.dtype) -> None:
    def body(group: ShmGroup, _: Connection) -> tuple[Any, Any]:
        x = torch.arange(30_000).view(3, -1).to(dtype) + group.rank
        gathered = group.gather_to_first(x)
        told = group.broadcast(x.clone())
        return None if gathered is None else gathered.float().numpy(), told.float().numpy()

    base = torch.arange(30_000).view(3, -1)
    got = answers(3, body, max_bytes=65_536)
    want = torch.stack([base.to(dtype) + rank for rank in range(3)]).float().numpy()
    assert (got[0][0] == want).all() and got[1][0] is None and got[2][0] is None
    assert all((told == want[0]).all() for _, told in got)


@needs_cpp
@pytest.mark.parametrize("seed", range(2))
def test_many_collectives_of_ranks_that_outnumber_the_cores(seed: int) -> None:
    """Each rank dawdles at its own places; a slot read too early or too late would show as a wrong sum."""

    def body(group: ShmGroup, _: Connection) -> list[float]:
        sizes, dawdle = random.Random(seed), random.Random(seed * 100 + group.rank)
        sums = []
        for step in range(300):
            size = sizes.choice([1, 100, 20_000])
            if dawdle.random() < 0.05:
                torch.randn(300, 300) @ torch.randn(300, 300)
            x = torch.full((size,), float(step * 10 + group.rank))
            match sizes.choice(["reduce", "gather", "broadcast"]):
                case "reduce":
                    sums.append(float(group.all_reduce_(x).double().mean()))
                case "gather":
                    gathered = group.gather_to_first(x)
                    sums.append(-1.0 if gathered is None else float(gathered.double().mean()))
                case _:
                    sums.append(float(group.broadcast(x).double().mean()))
        return sums

    got = answers(8, body)
    rng = random.Random(seed)
    for step in range(300):
        rng.choice([1, 100, 20_000])
        kind = rng.choice(["reduce", "gather", "broadcast"])
        total = sum(step * 10 + rank for rank in range(8))
        want = {"reduce": [total] * 8, "gather": [total / 8] + [-1] * 7, "broadcast": [step * 10] * 8}[kind]
        assert [sums[step] for sums in got] == want, f"seed {seed} step {step} {kind}"


@needs_cpp
def test_a_killed_peer_is_named_at_once() -> None:
    def body(group: ShmGroup, pipe: Connection) -> float:
        group.all_reduce_(torch.ones(8))
        if group.rank == 2:
            pipe.send("ready")
            signal.pause()
        start = time.monotonic()
        try:
            group.all_reduce_(torch.ones(8))
        except GroupError as error:
            return str(error), time.monotonic() - start
        return "no error", 0.0

    with Ranks(3, body) as ranks:
        assert ranks.answer(2) == "ready"
        os.kill(ranks.processes[2].pid, signal.SIGKILL)
        for rank in (0, 1):
            words, seconds = ranks.answer(rank)
            # The other survivor may have seen it first, and left.
            assert words in (f"rank 2 (pid {ranks.processes[2].pid}) died", f"rank {1 - rank} has left the group")
            assert seconds < 10


@needs_cpp
def test_a_peer_that_does_not_come_is_named_after_the_deadline() -> None:
    def body(group: ShmGroup, pipe: Connection) -> str:
        if group.rank == 1:
            pipe.recv()
            return "waited"
        group.all_reduce_(torch.ones(8))
        return "no error"

    with Ranks(2, body, deadline_s=0.2) as ranks:
        error = ranks.answer(0)
        assert isinstance(error, GroupError)
        assert str(error).startswith(f"rank 1 (pid {ranks.processes[1].pid}) did not come")
        ranks.pipes[1].send("go")
        assert ranks.answer(1) == "waited"


@needs_cpp
def test_a_peer_that_left_is_named_and_what_it_brought_before_still_counts() -> None:
    def body(group: ShmGroup, _: Connection) -> str:
        first = float(group.all_reduce_(torch.ones(1)))
        if group.rank == 0:
            group.close()
            with pytest.raises(GroupError, match="this rank has left"):
                group.all_reduce_(torch.ones(1))
            return f"{first} left"
        try:
            group.all_reduce_(torch.ones(1))
        except GroupError as error:
            return f"{first} {error}"
        return "no error"

    assert answers(2, body) == ["2.0 left", "2.0 rank 0 has left the group"]


@needs_cpp
def test_a_waiting_rank_hears_a_signal() -> None:
    def body(group: ShmGroup, pipe: Connection) -> None:
        if group.rank == 1:
            signal.pause()
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))
        pipe.send("waiting")
        group.all_reduce_(torch.ones(8))

    with Ranks(2, body) as ranks:
        assert ranks.answer(0) == "waiting"
        os.kill(ranks.processes[0].pid, signal.SIGTERM)
        ranks.processes[0].join(timeout=WAIT_S)
        assert ranks.processes[0].exitcode == 7


@needs_cpp
def test_a_tensor_with_gaps_is_refused() -> None:
    def body(group: ShmGroup, _: Connection) -> str:
        with pytest.raises(RuntimeError, match="contiguous"):
            group.all_reduce_(torch.ones(4, 4)[:, ::2])
        return "refused"

    assert answers(1, body) == ["refused"]


# ---- joining ----------------------------------------------------------------------------------------------------


def _join(rank: int, rendezvous: str, pipe: Connection, *, has_cpp: bool) -> None:
    torch.set_num_threads(1)
    if not has_cpp:
        cpu_build.load = lambda: cpu_build.Native(None, "none")  # type: ignore[assignment]
    dist.init_process_group("gloo", init_method=rendezvous, world_size=2, rank=rank)
    group = shm_group.join(rank, 2)
    total = None if group is None else float(group.all_reduce_(torch.tensor([rank + 1.0])))
    pipe.send(total)
    dist.destroy_process_group()


@pytest.mark.parametrize("who_has_cpp", [(True, True), (True, False), (False, True)])
def test_all_ranks_join_or_none(who_has_cpp: tuple[bool, bool], tmp_path: Path) -> None:
    pipes, processes = [], []
    for rank in range(2):
        ours, theirs = FORK.Pipe()
        target = (rank, f"file://{tmp_path}/meet", theirs)
        processes.append(FORK.Process(target=_join, args=target, kwargs={"has_cpp": who_has_cpp[rank]}))
        processes[-1].start()
        pipes.append(ours)
    try:
        assert all(pipe.poll(WAIT_S) for pipe in pipes)
        want = 3.0 if all(who_has_cpp) and NATIVE is not None else None
        assert [pipe.recv() for pipe in pipes] == [want, want]
    finally:
        for process in processes:
            process.kill()
            process.join()
