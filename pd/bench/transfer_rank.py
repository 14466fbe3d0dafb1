"""One rank of `pd bench transfer`, in a process of its own as in service: `python -m pd.bench.transfer_rank PARENT`.

Its order comes as one line of JSON on standard input, and is answered by one. A source rank is then told how many
tokens to move, a line each time, and answers each; a destination rank lies still. Both end with their input, and
whatever they do with the process whose id is PARENT.
"""

from __future__ import annotations

import ctypes
import os
import random
import select
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext, suppress
from dataclasses import replace
from typing import Final

import msgspec

from pd.bench.shapes import ModelShape, read_shape
from pd.bench.transfer_limits import OtherEnd, serve_limit
from pd.runtime.roles.process import die_with
from pd.transfer.choose import make_transport, refuse_params
from pd.transfer.fake import FakeTransport
from pd.transfer.layout import Shard, pool_nbytes, tp_shards
from pd.transfer.many import plan
from pd.transfer.plan import routes_between
from pd.transfer.transport import JobDone, TransferError, Transport

JOB_S: Final = 60.0
"""For the slowest request over the slowest backend."""


class Request(msgspec.Struct, frozen=True):
    """What all ranks move: `num_tokens` is the longest."""

    backend: str
    params: dict[str, str]
    shape: str  # as `read_shape` takes it
    page_size: int
    tps: tuple[int, int]  # source, destination
    num_tokens: int

    @property
    def num_pages(self) -> int:
        return -(-self.num_tokens // self.page_size)


class Order(msgspec.Struct, frozen=True):
    request: Request
    rank: int
    destinations: list[bytes] | None = None  # their endpoints; None: it is one itself
    limit: int = 0  # bytes of the buffer that takes what is measured as the limit


class Ready(msgspec.Struct, frozen=True, tag=True):
    endpoint: bytes = b""
    limit: OtherEnd = OtherEnd()


class Moved(msgspec.Struct, frozen=True, tag=True):
    """By one rank. Times are of the clock that all processes of a machine share, s."""

    num_spans: int
    nbytes: int
    began: float
    ended: float


class Refused(msgspec.Struct, frozen=True, tag=True):
    reason: str
    hint: str = ""


Answer = Ready | Moved | Refused


class _Source:
    """Connected to every destination rank; every page touched."""

    def __init__(self, order: Order, endpoints: list[bytes]) -> None:
        """Raises TransferError."""
        request = order.request
        shape, (src, dst) = _shape(request), _shards(request)
        self._page_size = request.page_size
        self._routes = [r for r in routes_between(shape.layout, src, shape.layout, dst) if r.src == order.rank]
        self._pages = list(range(request.num_pages))
        random.Random(0).shuffle(self._pages)
        self._transport = _start(request, f"src{order.rank}", pool_nbytes(shape.layout, src[order.rank]))
        for i, endpoint in enumerate(endpoints):
            self._transport.connect(f"dst{i}", endpoint)

    def move(self, num_tokens: int) -> Moved:
        """Its part of a request to every destination rank; planning it is part of the time. Raises TransferError."""
        num_pages = -(-num_tokens // self._page_size)
        began = time.monotonic()
        given = []
        for job, route in enumerate(self._routes):
            spans = plan(route, self._pages[:num_pages], self._pages[::-1][:num_pages], 0, num_tokens)
            self._transport.write(f"dst{route.dst}", spans, job=job)
            given.append(spans)
        _wait_done(self._transport, len(given))
        ended = time.monotonic()
        return Moved(sum(map(len, given)), sum(span.nbytes for spans in given for span in spans), began, ended)

    def close(self) -> None:
        self._transport.close()


def _wait_done(transport: Transport, num_jobs: int) -> None:
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


def _start(request: Request, me: str, nbytes: int) -> Transport:
    """With a region of so many bytes, every page of it touched; the fake one needs none. Raises TransferError."""
    if request.backend == "fake":
        refuse_params("fake", request.params)
        return FakeTransport(me=me, seed=0)
    transport = make_transport(request.backend, me=me, host="127.0.0.1", params=request.params)
    view = transport.allocate(nbytes)
    ctypes.memset(ctypes.addressof(ctypes.c_char.from_buffer(view)), 1, len(view))
    return transport


def _shape(request: Request) -> ModelShape:
    shape = read_shape(request.shape)
    return replace(shape, layout=replace(shape.layout, page_size=request.page_size))


def _shards(request: Request) -> tuple[tuple[Shard, ...], tuple[Shard, ...]]:
    """Of source and destination."""
    shape = _shape(request)
    src, dst = (tp_shards(shape.layout, shape.num_query_heads, tp, request.num_pages) for tp in request.tps)
    return src, dst


def _serve_source(order: Order, endpoints: list[bytes], say: Callable[[Answer], None]) -> None:
    source = _Source(order, endpoints)
    say(Ready())
    while line := sys.stdin.buffer.readline():
        say(source.move(int(line)))
    source.close()


def _serve_destination(order: Order, say: Callable[[Answer], None]) -> None:
    request = order.request
    nbytes = pool_nbytes(_shape(request).layout, _shards(request)[1][order.rank])
    rank = _start(request, f"dst{order.rank}", nbytes)
    with serve_limit(request.backend, order.limit, request.params) if order.limit else nullcontext(OtherEnd()) as limit:
        say(Ready(rank.endpoint(), limit))
        sys.stdin.buffer.read()
    rank.close()


def main() -> None:
    """Until its input ends."""
    die_with(int(sys.argv[1]))
    voice = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)  # what a library prints goes to the terminal, not among our answers

    def say(answer: Answer) -> None:
        with suppress(BrokenPipeError):  # who asked is gone
            voice.write(msgspec.json.encode(answer) + b"\n")

    order = msgspec.json.decode(sys.stdin.buffer.readline(), type=Order)
    try:
        if order.destinations is None:
            _serve_destination(order, say)
        else:
            _serve_source(order, order.destinations, say)
    except TransferError as error:
        say(Refused(str(error), error.hint))
    os._exit(0)  # with the vendors' verbs libraries loaded, UCX crashes in the interpreter's own farewell


if __name__ == "__main__":
    main()
