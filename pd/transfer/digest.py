"""A digest of what KV says, whatever the arrangement it lies in: two sides of a handoff tell the same, or bytes differ.

A row is one token's K or V of one layer and head. Its bytes are hashed together with its place in the model, and the
hashes of all rows are added up: so neither pages, nor axis order, nor who holds which heads matters, and a rank adds up
what it has.

    sum over rows of mix(words · odd numbers + layer·a + head·b + position·c + kv·d)        all modulo 2^64

A row that has changed changes the sum; several that have, or that stand in each other's places, do but once in 2^32
times or so. Nobody is meant to forge one: it is no signature.

Rules
1. Rows are hashed as they are at the receiver: who sends to another dtype converts first, as the move does.
2. Sums over parts of the tokens, heads and layers add up to that of all.
3. What is in hand at once is CHUNK_NBYTES of rows, or one page.
4. C++ makes the same number, where it was built, for rows in host memory that are hashed as they lie. PyTorch's way
   says what it means, and does the rest: on GPUs, and where rows are converted first.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from pd.transfer import native
from pd.transfer.float8 import E4M3, bits, cast
from pd.transfer.packed import End
from pd.transfer.pairs import Pair
from pd.transfer.reshard import DTYPES, views

# N pages, H kv heads, L layers, S tokens a page, E head size, W words of 64 bits a row, R rows

CHUNK_NBYTES = 1 << 20
"""Of rows on a CPU: they and what is made of them stay in a core's cache."""
CHUNK_NBYTES_GPU = 64 << 20
PART_NBYTES = 8 << 20
"""Of rows by C++, which keeps nothing of them: a millisecond's work or two, after which others may have the thread."""
_LAYER, _HEAD, _POSITION, _KV = 0x9FB21C651E98DF25, 0xD6E8FEB86659FD93, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9
_MASK = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class Digester:
    """Of some heads and layers of one rank's pool, made once. `dtype` is the receiver's."""

    region: Tensor
    end: End
    box: Pair  # its heads and layers
    dtype: str
    _views: tuple[Tensor, ...] = field(init=False, repr=False)
    _weights: tuple[Tensor, ...] = field(init=False, repr=False)  # of the words of a row of K, and of V
    _places_HL1: Tensor = field(init=False, repr=False)
    _rows: ctypes.Array[native.PoolRows] | None = field(init=False, repr=False)  # None: PyTorch does it

    def __post_init__(self) -> None:
        device, itemsize = self.region.device, DTYPES[self.dtype].itemsize
        found = views(self.region, *self.end, self.box)
        weights = tuple(_odd_numbers(_num_words(view.shape[-1] * itemsize), device) for view in found)
        heads, layers = (torch.tensor(list(each), device=device) for each in (self.box.heads, self.box.layers))
        places_HL = heads[:, None] * _signed(_HEAD) + layers * _signed(_LAYER)
        object.__setattr__(self, "_views", found)
        object.__setattr__(self, "_weights", weights)
        object.__setattr__(self, "_places_HL1", places_HL[:, :, None])
        is_as_it_lies = self.region.is_cpu and self.dtype == self.end.layout.dtype
        object.__setattr__(self, "_rows", self._native_rows() if is_as_it_lies and native.load() else None)

    def parts(self, pages: Sequence[int], tokens: range) -> Iterator[Tensor]:
        """The digest of `tokens`, in parts to be added up modulo 2^64, each one int64 on the region's device.

        `pages` are the pool's; the first begins with `tokens.start`. Each part is begun when it is asked for.
        """
        if any(not 0 <= page < len(self._views[0]) for page in pages):  # C++ would read whatever is there
            raise IndexError(f"pages {min(pages)}..{max(pages)} are not all of the pool's {len(self._views[0])}")
        return self.parts_by_torch(pages, tokens) if self._rows is None else self._parts_by_native(pages, tokens)

    def _parts_by_native(self, pages: Sequence[int], tokens: range) -> Iterator[Tensor]:
        library, rows, size = native.load(), self._rows, self.end.layout.page_size
        assert library is not None and rows is not None
        of_page = sum(view_PHLSE[0].numel() * view_PHLSE.element_size() for view_PHLSE in self._views)
        num_pages = max(1, PART_NBYTES // of_page)
        for first in range(0, len(pages), num_pages):
            part = tokens[first * size : (first + num_pages) * size]
            if part:
                found = library.digest(rows, pages[first : first + num_pages], len(part), part.start)
                yield torch.tensor(_signed(found))

    def parts_by_torch(self, pages: Sequence[int], tokens: range) -> Iterator[Tensor]:
        """The reference of `parts`, on any device."""
        size = self.end.layout.page_size
        num_whole, rest = divmod(len(tokens), size)
        for kv, view_PHLSE in enumerate(self._views):
            num_pages = max(1, self._chunk_nbytes // (view_PHLSE[0].numel() * DTYPES[self.dtype].itemsize))
            for first in range(0, num_whole, num_pages):
                chosen = pages[first : min(first + num_pages, num_whole)]
                yield self._part(view_PHLSE, chosen, kv=kv, start=tokens.start + first * size)
            if rest:
                last, start = pages[num_whole : num_whole + 1], tokens.start + num_whole * size
                yield self._part(view_PHLSE[:, :, :, :rest], last, kv=kv, start=start)

    def _native_rows(self) -> ctypes.Array[native.PoolRows]:
        found = []
        for view_PHLSE, weights_W in zip(self._views, self._weights, strict=True):
            itemsize = view_PHLSE.element_size()
            steps = [step * itemsize for step in view_PHLSE.stride()]
            sizes = (*view_PHLSE.shape[1:4], self.box.heads.start, self.box.layers.start, view_PHLSE.shape[4], itemsize)
            found.append(native.PoolRows(view_PHLSE.data_ptr(), *steps, *sizes, weights_W.data_ptr()))
        return (native.PoolRows * len(found))(*found)

    @property
    def _chunk_nbytes(self) -> int:
        return CHUNK_NBYTES_GPU if self.region.is_cuda else CHUNK_NBYTES

    @torch.inference_mode()
    def _part(self, view_PHLSE: Tensor, pages: Sequence[int], *, kv: int, start: int) -> Tensor:
        """Of the view's tokens on these pages; the first is at position `start`."""
        rows_NHLSE = gathered(view_PHLSE, pages, DTYPES[self.dtype])
        hashes_NHLS = _hashes(_words(rows_NHLSE.flatten(0, 3)), self._weights[kv]).view(rows_NHLSE.shape[:4])
        num_pages, num_tokens = rows_NHLSE.shape[0], rows_NHLSE.shape[3]
        device, size = self.region.device, self.end.layout.page_size
        begins_N = torch.arange(start, start + num_pages * size, size, device=device)
        positions_NS = begins_N[:, None] + torch.arange(num_tokens, device=device)
        hashes_NHLS += self._places_HL1
        hashes_NHLS += (positions_NS * _signed(_POSITION) + _signed(kv * _KV))[:, None, None]
        _mix(hashes_NHLS)
        return hashes_NHLS.sum()


def whole(end: End) -> Pair:
    """All that a rank holds, as a box."""
    return Pair(0, 0, end.shard.layers, end.shard.heads)


def gathered(view_PHLSE: Tensor, pages: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Those pages as rows_NHLSE of their own, converted as a move does it."""
    if view_PHLSE.is_cuda:
        index_N = torch.tensor(pages, device=view_PHLSE.device)
        picked_NHLSE = bits(view_PHLSE).index_select(0, index_N).view(view_PHLSE.dtype)
        return cast(picked_NHLSE, dtype).contiguous()
    rows_NHLSE = torch.empty((len(pages), *view_PHLSE.shape[1:]), dtype=dtype)
    for place, page in enumerate(pages):  # as in reshard: indexing takes an element at a time
        rows_NHLSE[place].copy_(cast(view_PHLSE[page], E4M3) if dtype is E4M3 else view_PHLSE[page])
    return rows_NHLSE


def total(parts: Sequence[int]) -> int:
    """Digests of parts as that of all."""
    return sum(parts) & _MASK


def _words(rows_RE: Tensor) -> Tensor:
    """Each row's bytes as words_RW, zeros behind. The rows are the caller's to give: they may be written."""
    bytes_RB = rows_RE.view(torch.uint8)
    if missing := -bytes_RB.shape[1] % 8:
        bytes_RB = torch.nn.functional.pad(bytes_RB, (0, missing))
    return bytes_RB.view(torch.int64)


def _hashes(words_RW: Tensor, weights_W: Tensor) -> Tensor:
    """hashes_R. Changes words_RW.

    The top bits of a word count in the top bits of its product alone, where those of two words would cancel out. So
    they are first folded into its lower half, which can be undone and so loses nothing.
    """
    halves = words_RW.view(torch.int32)
    halves[:, 0::2].bitwise_xor_(halves[:, 1::2])
    if words_RW.is_cuda:
        return (words_RW * weights_W).sum(1)
    return torch.mv(words_RW, weights_W)


def _mix(x: Tensor) -> None:
    """Stir each number, in place, so that sums do not cancel out: a shorter splitmix64 (Steele, Lea, Flood 2014), as
    a pass over a row's hash costs a tenth of one over the row. The sign comes in from the left."""
    x ^= x >> 32
    x *= _signed(0xBF58476D1CE4E5B9)
    x ^= x >> 29


def _odd_numbers(num_words: int, device: torch.device) -> Tensor:
    """weights_W, the same everywhere: splitmix64's first numbers, made odd."""
    numbers = []
    for place in range(1, num_words + 1):
        x = place * 0x9E3779B97F4A7C15 & _MASK
        x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & _MASK
        x = (x ^ x >> 27) * 0x94D049BB133111EB & _MASK
        numbers.append(_signed((x ^ x >> 31) | 1))
    return torch.tensor(numbers, dtype=torch.int64, device=device)


def _num_words(nbytes: int) -> int:
    return math.ceil(nbytes / 8)


def _signed(number: int) -> int:
    """As two's complement of 64 bits, which is what torch takes."""
    number &= _MASK
    return number - (1 << 64) if number >> 63 else number
