"""The two processes of `pd bench transfer`: source ranks here, destination ranks in a child; and what each is held
against. The child is `python -m pd.bench.transfer_ends`, with its order as JSON on standard input."""

from __future__ import annotations

import ctypes
import os
import random
import select
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from typing import NamedTuple

import msgspec

from pd.bench.shapes import ModelShape
from pd.bench.transfer_limits import OtherEnd, make_limit, serve_limit
from pd.transfer.choose import make_transport
from pd.transfer.layout import KVLayout, Shard, pool_nbytes, tp_shards
from pd.transfer.many import plan
from pd.transfer.plan import routes_between
from pd.transfer.transport import JobDone, TransferError, Transport

JOB_S = 60.0
"""For the slowest request over the slowest backend."""


class Order(msgspec.Struct, frozen=True):
    """What the child is to hold."""

    backend: str
    params: dict[str, str]
    pools: list[int]  # bytes, one a destination rank
    limit: int  # bytes of the buffer that takes what is measured as the limit


class Answer(msgspec.Struct, frozen=True):
    endpoints: list[bytes]
    limit: OtherEnd
    error: str = ""  # why there are none, and what mends it
    hint: str = ""


class Moved(NamedTuple):
    num_spans: int
    nbytes: int
    seconds: float


class Meeting:
    """Source ranks here, destination ranks in a child, connected; every page touched."""

    def __init__(
        self,
        backend: str,
        shape: ModelShape,
        *,
        tps: tuple[int, int],
        num_tokens: int,
        params: Mapping[str, str],
    ) -> None:
        """`num_tokens` is the longest request. Raises TransferError, and ValueError for TP sizes that cannot be."""
        self._layout = layout = shape.layout
        num_pages = -(-num_tokens // layout.page_size)
        src, dst = (tp_shards(layout, shape.num_query_heads, tp, num_pages) for tp in tps)
        self._routes = routes_between(layout, src, layout, dst)
        self._pages = list(range(num_pages))
        random.Random(0).shuffle(self._pages)
        self._nbytes = sum(_nbytes(layout, shard) for shard in dst)
        self.ranks: list[Transport] = []
        self._child = subprocess.Popen(
            [sys.executable, "-P", "-m", "pd.bench.transfer_ends"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        try:
            pools = [_nbytes(layout, shard) for shard in dst]
            answer = self._send(Order(backend, dict(params), pools, self._nbytes))
            for i, shard in enumerate(src):
                self.ranks.append(start_rank(backend, f"src{i}", _nbytes(layout, shard), params))
            for rank in self.ranks:
                for i, endpoint in enumerate(answer.endpoints):
                    rank.connect(f"dst{i}", endpoint)
            self.limit = make_limit(backend, self._nbytes, answer.limit, params)
            self.move(num_tokens)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Meeting:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        for rank in self.ranks:
            rank.close()
        self._child.kill()
        self._child.communicate()

    def move(self, num_tokens: int) -> Moved:
        """One request's KV to every destination rank; planning it is part of the time."""
        num_pages = -(-num_tokens // self._layout.page_size)
        began = time.perf_counter()
        given = []
        open_jobs = [0] * len(self.ranks)
        for job, route in enumerate(self._routes):
            spans = plan(route, self._pages[:num_pages], self._pages[::-1][:num_pages], 0, num_tokens)
            self.ranks[route.src].write(f"dst{route.dst}", spans, job=job)
            open_jobs[route.src] += 1
            given.append(spans)
        for rank, num_jobs in zip(self.ranks, open_jobs, strict=True):
            wait_done(rank, num_jobs)
        seconds = time.perf_counter() - began
        return Moved(sum(map(len, given)), sum(span.nbytes for spans in given for span in spans), seconds)

    def _send(self, order: Order) -> Answer:
        assert self._child.stdin is not None and self._child.stdout is not None
        self._child.stdin.write(msgspec.json.encode(order) + b"\n")
        self._child.stdin.flush()
        line = self._child.stdout.readline()
        if not line:
            raise TransferError("the process of the destination ranks ended; its last words are above")
        answer = msgspec.json.decode(line, type=Answer)
        if answer.error:
            raise TransferError(answer.error, hint=answer.hint)
        return answer


def start_rank(backend: str, me: str, nbytes: int, params: Mapping[str, str]) -> Transport:
    transport = make_transport(backend, me=me, host="127.0.0.1", params=params)
    view = transport.allocate(nbytes)
    ctypes.memset(ctypes.addressof(ctypes.c_char.from_buffer(view)), 1, len(view))
    return transport


def wait_done(transport: Transport, num_jobs: int) -> None:
    """Raises TransferError if one failed or takes too long."""
    poller = select.poll()
    poller.register(transport.wake_fd, select.POLLIN)
    until = time.monotonic() + JOB_S
    while num_jobs:
        poller.poll(1000)
        for end in transport.poll():
            if not isinstance(end, JobDone):
                raise TransferError(f"a transfer failed: {end.reason}")
            num_jobs -= 1
        if time.monotonic() > until:
            raise TransferError(f"a transfer by {transport.name} takes longer than {JOB_S:g} s")


def _nbytes(layout: KVLayout, shard: Shard) -> int:
    return pool_nbytes(layout, shard)


def main() -> None:
    """The child: destination ranks and the drain, until it is killed or its parent is gone."""
    voice = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a library prints goes to the terminal, not among our answers
    order = msgspec.json.decode(sys.stdin.buffer.readline(), type=Order)

    def say(answer: Answer) -> None:
        voice.write(msgspec.json.encode(answer) + b"\n")
        voice.flush()

    try:
        _serve(order, say)
    except TransferError as error:
        say(Answer([], OtherEnd(), str(error), error.hint))
    os._exit(0)  # with the vendors' verbs libraries loaded, UCX crashes in the interpreter's own farewell


def _serve(order: Order, say: Callable[[Answer], None]) -> None:
    ranks = [start_rank(order.backend, f"dst{i}", nbytes, order.params) for i, nbytes in enumerate(order.pools)]
    with serve_limit(order.backend, order.limit, order.params) as limit:
        say(Answer([rank.endpoint() for rank in ranks], limit))
        sys.stdin.buffer.read()
    for rank in ranks:
        rank.close()


if __name__ == "__main__":
    main()
