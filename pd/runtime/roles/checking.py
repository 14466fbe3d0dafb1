"""A rank's digests: of what it sends, and of what landed. Made piece by piece between the other work of its I/O thread.

Owned by the Mover.
"""

from __future__ import annotations

import contextlib
import time
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from pd.runtime.wire.plans import WriteJob
from pd.transfer.digest import Digester, total, whole
from pd.transfer.packed import End
from pd.transfer.pairs import Pair, boxes

TURN_S = 0.004
"""Then the I/O thread looks after its messages and transfers."""


class Counted(NamedTuple):
    """What is sent to so many ranks of a peer counts as often: each of them will tell what it holds."""

    digester: Digester
    num_times: int


@dataclass(slots=True)
class Checker:
    """`own`: this rank's pool, in the `region` that the transport knows."""

    region: Tensor
    own: End
    _waiting: deque[tuple[int, Iterator[Tensor]]] = field(default_factory=deque)
    _sums: list[Tensor] = field(default_factory=list)  # of the first that waits
    _stream: torch.cuda.Stream | None = None

    def __post_init__(self) -> None:
        if self.region.is_cuda:  # not behind the steps that are queued: what is looked at is there already
            self._stream = torch.cuda.Stream(self.region.device)  # type: ignore[no-untyped-call]

    @property
    def is_busy(self) -> bool:
        return bool(self._waiting)

    def of_all(self) -> tuple[Counted, ...]:
        """What this rank holds, as it lies."""
        return (Counted(Digester(self.region, self.own, whole(self.own), self.own.layout.dtype), 1),)

    def of_sent(self, pairs: Sequence[Pair], dtype: str) -> tuple[Counted, ...]:
        """What this rank sends by these pairs, in the dtype that arrives; what goes to several is looked at once."""
        times = Counter((head, layer) for pair in pairs for head in pair.heads for layer in pair.layers)
        return tuple(
            Counted(Digester(self.region, self.own, pairs[0]._replace(layers=layers, heads=heads), dtype), num_times)
            for num_times in sorted(set(times.values()))
            for layers, heads in boxes((h, range(n, n + 1)) for (h, n), num in times.items() if num == num_times)
        )

    def give(self, number: int, job: WriteJob, pages: Sequence[int], *, of: Sequence[Counted]) -> None:
        """Have the digest of the job's tokens made, which are on `pages` here. `turn` tells it under that number."""
        tokens = range(job.start, job.stop)
        parts = (part * counted.num_times for counted in of for part in counted.digester.parts(pages, tokens))
        self._waiting.append((number, parts))

    def turn(self) -> list[tuple[int, int]]:
        """Go on for a while. What is done: its number and digest."""
        if not self._waiting:
            return []
        until = time.perf_counter() + TURN_S
        done: list[tuple[int, int]] = []
        with torch.cuda.stream(self._stream) if self._stream is not None else contextlib.nullcontext():
            while self._waiting:
                number, parts = self._waiting[0]
                part = next(parts, None)
                if part is not None:
                    self._sums.append(part)
                else:
                    done.append((number, total([int(torch.stack(self._sums).sum())] if self._sums else [])))
                    self._sums.clear()
                    self._waiting.popleft()
                if time.perf_counter() >= until:
                    break
        return done
