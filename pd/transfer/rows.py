"""Many spans as one array, for whoever need not touch each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import overload

import numpy as np
from numpy.typing import NDArray

from pd.transfer.transport import Span


class Rows(Sequence[Span]):
    """Rows of (src, dst, nbytes)."""

    __slots__ = ("array",)

    def __init__(self, array: NDArray[np.int64]) -> None:
        """`array` is this object's from now on."""
        self.array = array

    def __len__(self) -> int:
        return len(self.array)

    def __iter__(self) -> Iterator[Span]:
        return map(Span._make, self.array.tolist())

    @overload
    def __getitem__(self, index: int) -> Span: ...

    @overload
    def __getitem__(self, index: slice) -> Rows: ...

    def __getitem__(self, index: int | slice) -> Span | Rows:
        return Rows(self.array[index]) if isinstance(index, slice) else Span._make(self.array[index].tolist())

    def fit(self, *, src_nbytes: int, dst_nbytes: int) -> bool:
        """Whether each lies within both regions, and none is empty."""
        nbytes = self.array[:, 2]
        rooms = np.array((src_nbytes, dst_nbytes)) - nbytes[:, None]
        is_within = (self.array[:, :2] >= 0) & (self.array[:, :2] <= rooms)
        return bool((nbytes > 0).all() and is_within.all())
