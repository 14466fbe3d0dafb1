"""The ranks of `pd bench transfer`, each a process (`transfer_rank`), and what they are held against."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from typing import NamedTuple, TypeVar

import msgspec

from pd.bench.environment import free_memory
from pd.bench.shapes import ModelShape
from pd.bench.transfer_limits import make_limit
from pd.bench.transfer_rank import JOB_S, Answer, Moved, Order, Ready, Refused, Request
from pd.transfer.layout import pool_nbytes, tp_shards
from pd.transfer.transport import TransferError

_START_S = 120.0
"""For the largest pool to be touched and registered, by as many ranks as there are, on few cores."""
_PAGE_NBYTES = 64
"""Of a page's number in a rank's lists."""
_GRACE_S = 5.0
"""For ranks to close what they hold; Mooncake takes a second."""


T = TypeVar("T", Ready, Moved)


class Whole(NamedTuple):
    """A request moved, by all source ranks."""

    num_spans: int
    nbytes: int
    seconds: float  # from the first rank's beginning to the last one's end


class Meeting:
    """Source and destination ranks, connected; every page touched."""

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
        layout = shape.layout
        request = Request(backend, dict(params), shape.name, layout.page_size, tps, num_tokens)
        sources, sinks = (
            sum(pool_nbytes(layout, shard) for shard in tp_shards(layout, shape.num_query_heads, tp, request.num_pages))
            for tp in tps
        )
        _check_room(request, sources, sinks)
        self._ranks: list[_Rank] = []
        self._sources: list[_Rank] = []
        try:
            there = [self._started(Order(request, i, limit=0 if i else sinks)) for i in range(tps[1])]
            met = [rank.hear(Ready, within_s=_START_S) for rank in there]
            endpoints = [ready.endpoint for ready in met]
            self._sources = [self._started(Order(request, i, destinations=endpoints)) for i in range(tps[0])]
            for rank in self._sources:
                rank.hear(Ready, within_s=_START_S)
            self.limit = make_limit(backend, sinks, met[0].limit, params)
            self.move(num_tokens)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Meeting:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        for rank in self._ranks:
            rank.let_go()
        until = time.monotonic() + _GRACE_S
        for rank in self._ranks:
            rank.end(until)

    def move(self, num_tokens: int) -> Whole:
        """One request's KV to every destination rank; planning it is part of the time. Raises TransferError."""
        for rank in self._sources:
            rank.tell(b"%d" % num_tokens)
        moved = [rank.hear(Moved, within_s=2 * JOB_S) for rank in self._sources]
        seconds = max(part.ended for part in moved) - min(part.began for part in moved)
        return Whole(sum(part.num_spans for part in moved), sum(part.nbytes for part in moved), seconds)

    def _started(self, order: Order) -> _Rank:
        rank = _Rank()
        self._ranks.append(rank)
        rank.tell(msgspec.json.encode(order))
        return rank


def _check_room(request: Request, sources: int, sinks: int) -> None:
    """Raises TransferError where the pools and what the limit is measured with are more than this host has free: its
    kernel would end some process, not always one of ours."""
    tables = sum(request.tps) * request.num_pages * _PAGE_NBYTES
    needed = tables if request.backend == "fake" else tables + sources + 3 * sinks
    free = free_memory()
    if free is not None and needed > free:
        there, here = f"{needed / 1e9:.1f} GB", f"{free / 1e9:.1f}"
        raise TransferError(
            f"{request.num_tokens} tokens take {there} in all ranks, of which this host has {here}",
            hint="fewer --tokens, or a smaller --model-shape",
        )


class _Rank:
    """The process of one."""

    def __init__(self) -> None:
        command = [sys.executable, "-P", "-m", "pd.bench.transfer_rank", str(os.getpid())]
        self._process = process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,  # the terminal's Ctrl-C is the parent's, also while they still import
        )
        assert process.stdin is not None and process.stdout is not None
        self._ears, self._mouth = process.stdout, process.stdin

    def tell(self, line: bytes) -> None:
        """Raises TransferError."""
        try:
            self._mouth.write(line + b"\n")
            self._mouth.flush()
        except BrokenPipeError as error:
            raise self._ended() from error

    def hear(self, wanted: type[T], *, within_s: float) -> T:
        """Its answer to what it was told. Raises TransferError."""
        if not select.select([self._ears], [], [], within_s)[0]:
            raise TransferError(f"a rank's process has not answered in {within_s:g} s")
        line = self._ears.readline()
        if not line:
            raise self._ended()
        answer = msgspec.json.decode(line, type=Answer)
        if isinstance(answer, Refused):
            raise TransferError(answer.reason, hint=answer.hint)
        assert isinstance(answer, wanted)
        return answer

    def _ended(self) -> TransferError:
        """What became of it."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_GRACE_S)
        code = self._process.returncode
        if code is not None and code < 0:
            return TransferError(
                f"a rank's process was ended by {signal.Signals(-code).name}",
                hint="SIGKILL is most often the kernel's, where memory has run out: fewer --tokens",
            )
        return TransferError("a rank's process ended; its last words are above")

    def let_go(self) -> None:
        """Have it close what it holds."""
        with contextlib.suppress(BrokenPipeError):  # it has ended
            self._mouth.close()

    def end(self, until: float) -> None:
        try:
            self._process.wait(max(0.0, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._ears.close()
