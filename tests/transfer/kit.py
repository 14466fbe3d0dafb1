"""Builders for transfer tests: transports of any backend, in this process or in a child, and waiting for ends."""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import importlib.util
import json
import mmap
import os
import random
import select
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from _pytest.mark import ParameterSet

from pd.transfer import native
from pd.transfer.auto import AutoTransport
from pd.transfer.library import LibraryLimits
from pd.transfer.memory import MemoryHub, MemoryTransport
from pd.transfer.mooncake import mooncake_transport
from pd.transfer.nixl import nixl_transport
from pd.transfer.shm import ShmTransport
from pd.transfer.tcp import TcpTransport
from pd.transfer.tcp_lane import TcpLimits
from pd.transfer.transport import Completion, JobDone, JobFailed, PeerLost, Span, TransferError, Transport
from tests.transfer.card import Card

os.environ.setdefault("UCX_MODULES", "cma")
"""With the vendors' verbs libraries loaded, UCX crashes the process at its end; a rank ends without farewell."""


def ours_in_shm() -> set[str]:
    """Names in /dev/shm that we or a library of ours could have left; other processes of the machine have theirs."""
    return {name for name in os.listdir("/dev/shm") if name.startswith(("pd", "ucx", "nixl"))}


def why_absent(library: str) -> str | None:
    """Why a backend's library cannot be used here."""
    if importlib.util.find_spec(library) is None:
        return f"{library} is not installed: pip install -e .[{library}]"
    try:
        importlib.import_module({"nixl": "nixl._api", "mooncake": "mooncake.engine"}[library])
    except (ImportError, OSError) as error:
        return f"{library} cannot be imported: {error}"
    return None


def backends(*names: str) -> list[ParameterSet]:
    """Parameters of a test, those skipped whose library is not here."""
    reasons = {name: why_absent(name) for name in ("nixl", "mooncake")}
    marks = {name: pytest.mark.skipif(reason is not None, reason=str(reason)) for name, reason in reasons.items()}
    return [pytest.param(name, marks=marks.get(name.partition("-")[0], ())) for name in names]


def cpp() -> native.Native:
    """kernels/cpu/bytes; skips the test where it is not built. `.ci/run` builds it, and fails where it cannot."""
    found = native.load()
    if found is None:
        pytest.skip("kernels/cpu/bytes is not built here (python -m pd.runtime.engine.cpu_ops build)")
    return found


SEVERS_THE_LIVING = ("memory", "tcp", "tcp3", "tcp-card")
"""The others cannot take back what a living peer may write."""

ROOT = Path(__file__).resolve().parents[2]


class CardAuto(AutoTransport):
    gpu = Card


class Net:
    """Makes the transports of one test and closes them."""

    def __init__(self, backend: str) -> None:
        self.backend = backend
        self.hub = MemoryHub()
        self.made: list[Transport] = []
        self.cards: list[mmap.mmap] = []  # memory of fake GPUs

    def make(self, me: str, nbytes: int, limits: TcpLimits | None = None) -> tuple[Transport, memoryview]:
        transport = self._new(me, limits)
        self.made.append(transport)
        if not self.backend.endswith("-card"):
            return transport, transport.allocate(nbytes)
        memory = mmap.mmap(-1, nbytes)
        address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        match transport:
            case TcpTransport():
                transport.register_on(Card(0), address, nbytes)
            case ShmTransport():
                transport.register_on(Card(0), address, nbytes, number=0)
            case _:
                transport.register(address, nbytes, device=0)
        self.cards.append(memory)
        return transport, memoryview(memory)

    def pair(self, nbytes: int) -> tuple[Transport, memoryview, Transport, memoryview]:
        """Two transports that know each other as `a` and `b`."""
        a, view_a = self.make("a", nbytes)
        b, view_b = self.make("b", nbytes)
        a.connect("b", b.endpoint())
        b.connect("a", a.endpoint())
        return a, view_a, b, view_b

    def close(self) -> None:
        for transport in self.made:
            transport.close()

    def _new(self, me: str, limits: TcpLimits | None) -> Transport:
        library_limits = LibraryLimits(limits.connect_s, limits.stall_s) if limits else LibraryLimits(look_s=0.05)
        match self.backend:
            case "memory":
                return MemoryTransport(me=me, hub=self.hub)
            case "shm":
                return ShmTransport(me=me)
            case "tcp":
                return TcpTransport(me=me, limits=limits)
            case "tcp3":
                return TcpTransport(me=me, limits=limits or TcpLimits(num_lanes=3))
            case "nixl":
                return nixl_transport(me=me, limits=library_limits)
            case "nixl-tcp":
                return nixl_transport(me=me, params={"engine_config": "TLS=tcp"}, limits=library_limits)
            case "mooncake":
                return mooncake_transport(me=me, host="127.0.0.1", limits=library_limits)
            case "auto":
                return AutoTransport(me=me)
            case "tcp-card":
                return TcpTransport(me=me, limits=limits)
            case "shm-card":
                return ShmTransport(me=me)
            case "auto-card":
                return CardAuto(me=me)
        raise ValueError(self.backend)


def wait_for(
    transport: Transport, is_enough: Callable[[list[Completion]], bool], timeout_s: float = 20.0
) -> list[Completion]:
    """Poll when woken until what ended is enough. Fails saying what did end."""
    ended: list[Completion] = []
    deadline = time.monotonic() + timeout_s
    poller = select.poll()
    poller.register(transport.wake_fd, select.POLLIN)
    while not is_enough(ended):
        left = deadline - time.monotonic()
        assert left > 0, f"after {timeout_s} s only {ended}"
        poller.poll(left * 1000)
        ended += transport.poll()
    return ended


def wait_jobs(transport: Transport, num_jobs: int, timeout_s: float = 20.0) -> list[Completion]:
    return wait_for(transport, lambda ended: _num_jobs(ended) >= num_jobs, timeout_s)


def wait_lost(transport: Transport, timeout_s: float = 20.0) -> list[Completion]:
    return wait_for(transport, lambda ended: any(isinstance(end, PeerLost) for end in ended), timeout_s)


def lost_after_write(transport: Transport, peer: str, span: Span, timeout_s: float = 5.0) -> list[Completion]:
    """Write to a peer that cannot be reached, and wait until that is known: the job fails, then the peer is lost.

    Where the loss is noticed before the write, the write is refused instead.
    """
    try:
        transport.write(peer, [span], job=1)
        expected: list[type] = [JobFailed, PeerLost]
    except TransferError:
        expected = [PeerLost]
    ended = wait_lost(transport, timeout_s)
    assert [type(end) for end in ended] == expected
    return ended


def done_jobs(ended: Sequence[Completion]) -> list[int]:
    return [end.job for end in ended if isinstance(end, JobDone)]


def _num_jobs(ended: Sequence[Completion]) -> int:
    return sum(isinstance(end, JobDone | JobFailed) for end in ended)


def random_spans(rng: random.Random, nbytes: int, num_spans: int) -> list[Span]:
    """Whose destinations do not overlap, in any order; sources may."""
    cuts = sorted(rng.sample(range(nbytes + 1), 2 * num_spans))
    spans = []
    for start, stop in zip(cuts[::2], cuts[1::2], strict=True):
        spans.append(Span(rng.randint(0, nbytes - (stop - start)), start, stop - start))
    rng.shuffle(spans)
    return spans


def open_fds() -> list[str]:
    """What this process's descriptors lead to."""
    found = []
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the one that listed them
            found.append(os.readlink(f"/proc/self/fd/{fd}"))
    return sorted(found)


def resident_nbytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


class Child:
    """A transport in a process of its own; see child.py."""

    def __init__(self, backend: str, me: str, nbytes: int) -> None:
        env = os.environ | {"PYTHONPATH": os.pathsep.join((str(ROOT), *sys.path))}
        command = [sys.executable, "-m", "tests.transfer.child", backend, me, str(nbytes)]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env, cwd=ROOT, text=True
        )
        self.endpoint = bytes.fromhex(str(self._answer()))

    def ask(self, *order: object) -> object:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(order) + "\n")
        self.process.stdin.flush()
        return self._answer()

    def kill(self) -> None:
        """kill -9, and reaped."""
        self.process.kill()
        self.process.wait()

    def close(self) -> None:
        self.kill()
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            pipe.close()

    def _answer(self) -> object:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, f"child ended with {self.process.wait()}"
        return json.loads(line)
