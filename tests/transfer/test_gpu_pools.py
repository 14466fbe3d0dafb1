"""Pools on a GPU, between two processes. Without one: the same code over a card that is none, test_device.py."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch

from pd.transfer.transport import Span
from tests.transfer.gpu_child import fill, pool_on_gpu
from tests.transfer.kit import ROOT, backends, done_jobs, wait_jobs

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA or ROCm device, and torch built for it"),
]
NBYTES = 64 << 20
PIECE = 1 << 18


class GpuChild:
    def __init__(self, backend: str) -> None:
        env = os.environ | {"PYTHONPATH": os.pathsep.join((str(ROOT), *sys.path))}
        command = [sys.executable, "-m", "tests.transfer.gpu_child", backend, str(NBYTES)]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env, cwd=ROOT, text=True
        )
        self.endpoint = bytes.fromhex(self._answer())

    def ask(self, order: str) -> str:
        assert self.process.stdin is not None
        self.process.stdin.write(order + "\n")
        self.process.stdin.flush()
        return self._answer()

    def _answer(self) -> str:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, f"child ended with {self.process.wait()}"
        return line.strip()


@pytest.fixture(params=backends("tcp", "shm", "auto", "nixl"))
def backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def child(backend: str) -> Iterator[GpuChild]:
    made = GpuChild(backend)
    yield made
    made.process.kill()
    made.process.communicate()


def test_bytes_are_exact_in_every_direction(backend: str, child: GpuChild) -> None:
    a, pool = pool_on_gpu(backend, "a", NBYTES)
    a.connect("b", child.endpoint)
    assert child.ask(f"connect {a.endpoint().hex()}") == "connected"
    fill(pool, 1)
    pieces = [Span(i * PIECE, i * PIECE, PIECE) for i in range(NBYTES // PIECE)]
    a.write("b", pieces[::2], job=1)
    a.write("b", pieces[1::2], job=2)
    assert done_jobs(wait_jobs(a, 2)) == [1, 2]
    assert child.ask("has 1") == "True"
    child.ask("fill 2")
    a.read("b", [Span(0, 0, NBYTES)], job=3)
    assert done_jobs(wait_jobs(a, 1)) == [3]
    other = torch.empty_like(pool)
    fill(other, 2)
    assert torch.equal(pool, other)
    child.ask("fill 3")
    assert child.ask("write") == "True"
    fill(other, 3)
    assert torch.equal(pool, other)
    a.close()


def test_a_killed_peer_fails_the_jobs_and_leaves_the_gpu_usable(backend: str, child: GpuChild) -> None:
    a, pool = pool_on_gpu(backend, "a", NBYTES)
    a.connect("b", child.endpoint)
    a.write("b", [Span(0, 0, PIECE)], job=0)
    assert done_jobs(wait_jobs(a, 1)) == [0]
    child.process.kill()
    child.process.wait()
    for _ in range(100):
        a.poll()
    a.close()
    assert int(pool.sum()) == 0, "the device answers still"
