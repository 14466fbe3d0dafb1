"""The C++ routines of kernels/cpu/bytes, where they were built: plain functions, called through ctypes without torch
and with the interpreter's lock released.

The library's name carries a hash of its sources and flags: after a change the old one is not found, and who asks does
without until the next build, by `python -m pd.runtime.engine.cpu_ops build`.
"""

from __future__ import annotations

import array
import ctypes
import functools
import hashlib
import platform
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

SOURCES = Path(__file__).parents[2] / "kernels" / "cpu" / "bytes"
LIBRARY = "_bytes"
_FLAGS = ("-std=c++20", "-O2", "-fPIC", "-fvisibility=hidden", "-Wall", "-Wextra", "-shared")


class PoolRows(ctypes.Structure):
    """K, or V, of some heads and layers of a pool; steps are bytes. Whoever makes it keeps its memory alive."""

    _fields_ = (
        ("base", ctypes.c_void_p),  # page 0's first head, layer and token of those meant
        *((name, ctypes.c_int64) for name in ("page", "head", "layer", "token", "dim")),
        *((name, ctypes.c_int64) for name in ("num_heads", "num_layers", "page_size")),
        *((name, ctypes.c_int64) for name in ("first_head", "first_layer")),  # their numbers in the model
        *((name, ctypes.c_int64) for name in ("num_dims", "itemsize")),
        ("weights", ctypes.c_void_p),  # one a word of a row
    )


@dataclass(frozen=True, slots=True)
class Native:
    _library: ctypes.CDLL

    def copy(self, src: int, dst: int, table: array.array[int], *, most: int, is_past_cache: bool) -> Iterator[None]:
        """Copy the spans of `table`, three numbers each, between what begins at these addresses, at most `most` bytes
        each time one more is asked for; yields before. `is_past_cache`: what is written is not left in the cache, nor
        read into it."""
        num_spans = len(table) // 3
        cursor = array.array("Q", (0, 0))
        at_table, at_cursor = table.buffer_info()[0], cursor.buffer_info()[0]
        while cursor[0] < num_spans:
            yield
            self._library.pd_copy(src, dst, at_table, num_spans, at_cursor, most, is_past_cache)

    def plan(self, route: array.array[int], job: array.array[int], spans: array.array[int]) -> int:
        """Fill `spans`, which has room for all that are not merged; returns how many, or -1 where a page is not in its
        pool. `route` and `job`: see kernels/cpu/bytes/bytes.h."""
        found: int = self._library.pd_plan(route.buffer_info()[0], job.buffer_info()[0], spans.buffer_info()[0])
        return found

    def fit(self, spans: array.array[int], *, src_nbytes: int, dst_nbytes: int) -> int | None:
        """Bytes of all spans together; None if one is empty or leaves a region."""
        found: int = self._library.pd_fit(spans.buffer_info()[0], len(spans) // 3, src_nbytes, dst_nbytes)
        return None if found < 0 else found

    def digest(self, rows: ctypes.Array[PoolRows], pages: Sequence[int], num_tokens: int, start: int) -> int:
        """Of `num_tokens` on those pages, modulo 2^64; the first is at position `start`. `rows`: K's, and V's."""
        numbers = array.array("q", pages)
        found: int = self._library.pd_digest(rows, len(rows), numbers.buffer_info()[0], num_tokens, start)
        return found

    def number(self, spans: int, num_spans: int, grid: array.array[int], src: int, dst: int, most: int) -> int:
        """Write the numbers of all pieces, 32 bits each, to the addresses `src` and `dst`, `most` at most; how many, or
        -1 where they do not lie on the grid. `spans` is the address of three numbers a span; `grid`: first and step of
        the source, of the destination, and the pieces' length."""
        found: int = self._library.pd_number(spans, num_spans, grid.buffer_info()[0], src, dst, most)
        return found


@functools.cache
def load() -> Native | None:
    """None: not built here. Once a process."""
    path = library_path()
    if path is None or not path.exists():
        return None
    library = ctypes.CDLL(str(path))
    pointer, number = ctypes.c_void_p, ctypes.c_uint64
    library.pd_copy.argtypes = (pointer, pointer, pointer, number, pointer, number, ctypes.c_int)
    library.pd_copy.restype = number
    library.pd_plan.argtypes = (pointer, pointer, pointer)
    library.pd_plan.restype = ctypes.c_int64
    library.pd_fit.argtypes = (pointer, ctypes.c_int64, number, number)
    library.pd_fit.restype = ctypes.c_int64
    library.pd_digest.argtypes = (ctypes.POINTER(PoolRows), ctypes.c_int64, pointer, ctypes.c_int64, ctypes.c_int64)
    library.pd_digest.restype = number
    library.pd_number.argtypes = (pointer, ctypes.c_int64, pointer, pointer, pointer, ctypes.c_int64)
    library.pd_number.restype = ctypes.c_int64
    return Native(library)


def library_path() -> Path | None:
    """Where the library of these sources is or would be; None where they are not here."""
    if not SOURCES.is_dir():
        return None
    key = hashlib.sha256(f"{platform.machine()} {_FLAGS}".encode())
    for source in sorted(SOURCES.iterdir()):
        key.update(source.read_bytes())
    return Path(__file__).with_name(f"{LIBRARY}.{key.hexdigest()[:16]}.so")


def build_command(output: Path) -> tuple[str, ...]:
    return ("g++", *_FLAGS, *map(str, sorted(SOURCES.glob("*.cpp"))), "-o", str(output))
