"""Many spans as one array, for whoever need not touch each."""

from __future__ import annotations

import array
import itertools
from collections.abc import Iterator, Sequence
from typing import overload

from pd.transfer.native import load
from pd.transfer.transport import Span


class Rows(Sequence[Span]):
    """`numbers` are src, dst and nbytes of each, 64 bits each; they are this object's from now on."""

    __slots__ = ("numbers",)

    def __init__(self, numbers: array.array[int]) -> None:
        self.numbers = numbers

    @classmethod
    def of(cls, spans: Sequence[Span]) -> Rows:
        return spans if isinstance(spans, Rows) else cls(array.array("q", itertools.chain.from_iterable(spans)))

    def __len__(self) -> int:
        return len(self.numbers) // 3

    def __iter__(self) -> Iterator[Span]:
        return map(Span, self.numbers[::3], self.numbers[1::3], self.numbers[2::3])

    @overload
    def __getitem__(self, index: int) -> Span: ...

    @overload
    def __getitem__(self, index: slice) -> Rows: ...

    def __getitem__(self, index: int | slice) -> Span | Rows:
        if isinstance(index, slice):
            start, stop, step = index.indices(len(self))
            every = range(start, stop, step)
            return Rows(self.numbers[3 * start : 3 * stop]) if step == 1 else Rows.of([self[i] for i in every])
        at = 3 * range(len(self))[index]
        return Span(*self.numbers[at : at + 3])

    def fit(self, *, src_nbytes: int, dst_nbytes: int) -> int | None:
        """Bytes of all together. None: one is empty or leaves a region, or there is no C++ to tell."""
        native = load()
        return None if native is None else native.fit(self.numbers, src_nbytes=src_nbytes, dst_nbytes=dst_nbytes)
