"""Transfer speed: `python -m benchmarks.transfer`. Every figure is a ratio to a floor taken in the same run.

shm is held against one memmove of as many bytes, tcp against one raw socket stream into the same child. Sources live
in this process, destinations in a child. KV is of the default model's shape in bfloat16; pages are scattered, so that
no two merge: the worst case of equal page sizes.
"""

from __future__ import annotations

import ctypes
import itertools
import json
import mmap
import random
import select
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from typing import NamedTuple

from pd.transfer.choose import make_transport
from pd.transfer.layout import KVLayout, Shard, pool_nbytes, tp_shards
from pd.transfer.plan import Route, pair_up
from pd.transfer.transport import JobDone, Transport

LAYOUT = KVLayout(num_layers=30, num_kv_heads=3, head_dim=64, page_size=16, dtype="bfloat16")
NUM_QUERY_HEADS = 9
NUM_TOKENS = (128, 2048, 8192)
TP_PAIRS = ((1, 1), (1, 2), (2, 1), (3, 2))
NUM_PAGES = max(NUM_TOKENS) // LAYOUT.page_size
ROUNDS = {128: 60, 2048: 15, 8192: 7}
"""By tokens. The best counts: neighbours on the machine only ever add time."""


class Figure(NamedTuple):
    num_spans: int
    nbytes: int
    seconds: float


def main() -> None:
    with Floors() as floors:
        sys.stdout.write(f"{'':8}{'tp':>6}{'tokens':>8}{'spans':>7}{'MB':>8}{'ms':>9}{'GB/s':>7}  of the floor\n")
        for backend, (tp_src, tp_dst) in itertools.product(("shm", "tcp"), TP_PAIRS):
            with Meeting(backend, tp_src, tp_dst) as meeting:
                for num_tokens in NUM_TOKENS:
                    floor_of = floors.memmove if backend == "shm" else floors.stream
                    ours, floor = best_of(meeting, num_tokens, floor_of)
                    told = f"{ours.num_spans:>7}{ours.nbytes / 1e6:>8.1f}{ours.seconds * 1e3:>9.2f}"
                    told += f"{ours.nbytes / ours.seconds / 1e9:>7.2f}  {floor / ours.seconds:.2f}"
                    sys.stdout.write(f"{backend:8}{tp_src:>3}→{tp_dst:<2}{num_tokens:>8}{told}\n")
                    sys.stdout.flush()


def best_of(meeting: Meeting, num_tokens: int, floor: Callable[[int], float]) -> tuple[Figure, float]:
    """Taken in turns, so that both see the same neighbours."""
    figures, floors = [], []
    for _ in range(ROUNDS[num_tokens]):
        figures.append(meeting.move(num_tokens))
        floors.append(floor(figures[-1].nbytes))
    return min(figures, key=lambda figure: figure.seconds), min(floors)


class Meeting:
    """Source ranks here, destination ranks in a child, connected."""

    def __init__(self, backend: str, tp_src: int, tp_dst: int) -> None:
        self._src = tp_shards(LAYOUT, NUM_QUERY_HEADS, tp_src, NUM_PAGES)
        self._dst = tp_shards(LAYOUT, NUM_QUERY_HEADS, tp_dst, NUM_PAGES)
        self._ranks = [start_rank(backend, f"src{i}", shard) for i, shard in enumerate(self._src)]
        self._child = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.transfer", "serve", backend, str(tp_dst)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._child.stdout is not None
        endpoints = [bytes.fromhex(told) for told in json.loads(self._child.stdout.readline())]
        self._routes = [
            (pair, Route(LAYOUT, self._src[pair.src], LAYOUT, self._dst[pair.dst], pair))
            for pair in pair_up(self._src, self._dst)
        ]
        for rank in self._ranks:
            for i, endpoint in enumerate(endpoints):
                rank.connect(f"dst{i}", endpoint)
        pages = list(range(NUM_PAGES))
        random.Random(0).shuffle(pages)
        self._src_pages, self._dst_pages = pages, pages[::-1]
        self.move(max(NUM_TOKENS))  # touches every page

    def __enter__(self) -> Meeting:
        return self

    def __exit__(self, *exc: object) -> None:
        for rank in self._ranks:
            rank.close()
        self._child.communicate()

    def move(self, num_tokens: int) -> Figure:
        """One request's KV to every destination rank; planning it is part of the time."""
        num_pages = num_tokens // LAYOUT.page_size
        began = time.perf_counter()
        num_spans = nbytes = 0
        open_jobs = [0] * len(self._ranks)
        for job, (pair, route) in enumerate(self._routes):
            spans = route.spans(self._src_pages[:num_pages], self._dst_pages[:num_pages], 0, num_tokens)
            self._ranks[pair.src].write(f"dst{pair.dst}", spans, job=job)
            open_jobs[pair.src] += 1
            num_spans += len(spans)
            nbytes += sum(span.nbytes for span in spans)
        for rank, num_jobs in zip(self._ranks, open_jobs, strict=True):
            wait_done(rank, num_jobs)
        return Figure(num_spans, nbytes, time.perf_counter() - began)


class Floors:
    """One memmove between touched memory, and one raw stream to a thread that reads into touched memory."""

    def __init__(self) -> None:
        nbytes = 2 * NUM_PAGES * LAYOUT.page_size * LAYOUT.token_nbytes  # heads repeat where TP does not divide
        self._memory = [mmap.mmap(-1, nbytes, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE) for _ in range(2)]
        self._child = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.transfer", "drain", str(nbytes)], stdout=subprocess.PIPE, text=True
        )
        assert self._child.stdout is not None
        self._sock = socket.create_connection(("127.0.0.1", int(self._child.stdout.readline())))
        self._sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def __enter__(self) -> Floors:
        return self

    def __exit__(self, *exc: object) -> None:
        self._sock.close()
        self._child.communicate()

    def memmove(self, nbytes: int) -> float:
        src, dst = (ctypes.addressof(ctypes.c_char.from_buffer(memory)) for memory in self._memory)
        began = time.perf_counter()
        ctypes.memmove(dst, src, nbytes)
        return time.perf_counter() - began

    def stream(self, nbytes: int) -> float:
        """Until the reader says that it has the last byte."""
        began = time.perf_counter()
        self._sock.sendall(nbytes.to_bytes(8, "big"))
        self._sock.sendall(memoryview(self._memory[0])[:nbytes])
        self._sock.recv(1)
        return time.perf_counter() - began


def start_rank(backend: str, me: str, shard: Shard) -> Transport:
    transport = make_transport(backend, me=me, host="127.0.0.1")
    view = transport.allocate(pool_nbytes(LAYOUT, shard))
    ctypes.memset(ctypes.addressof(ctypes.c_char.from_buffer(view)), 1, len(view))
    return transport


def wait_done(transport: Transport, num_jobs: int) -> None:
    poller = select.poll()
    poller.register(transport.wake_fd, select.POLLIN)
    while num_jobs:
        poller.poll(10_000)
        for end in transport.poll():
            if not isinstance(end, JobDone):
                raise SystemExit(f"a transfer failed: {end}")
            num_jobs -= 1


def serve(backend: str, tp: int) -> None:
    """The child: destination ranks, until standard input ends."""
    shards = tp_shards(LAYOUT, NUM_QUERY_HEADS, tp, NUM_PAGES)
    ranks = [start_rank(backend, f"dst{i}", shard) for i, shard in enumerate(shards)]
    sys.stdout.write(json.dumps([rank.endpoint().hex() for rank in ranks]) + "\n")
    sys.stdout.flush()
    sys.stdin.read()
    for rank in ranks:
        rank.close()


def drain(nbytes: int) -> None:
    """The child: reads streams into memory, and answers each with one byte."""
    memory = memoryview(mmap.mmap(-1, nbytes, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE))
    with socket.create_server(("127.0.0.1", 0)) as server:
        sys.stdout.write(f"{server.getsockname()[1]}\n")
        sys.stdout.flush()
        sock, _ = server.accept()
        while header := sock.recv(8, socket.MSG_WAITALL):
            left = memory[: int.from_bytes(header, "big")]
            while left:
                left = left[sock.recv_into(left) :]
            sock.sendall(b".")


if __name__ == "__main__":
    match sys.argv[1:]:
        case []:
            main()
        case ["serve", name, size]:
            serve(name, int(size))
        case ["drain", size]:
            drain(int(size))
