"""Copies against plain slices, by each way of copying."""

from __future__ import annotations

import ctypes
import random
import shutil
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from pd.transfer import native
from pd.transfer.copying import BATCH_NBYTES, Copier, Copies, NativeCopier, batches
from pd.transfer.rows import Rows
from pd.transfer.transport import Span
from tests.transfer.kit import cpp, random_spans


class MovesOnly(Copier):
    """As where a container forbids the kernel's way."""

    def __init__(self) -> None:
        self.has_vectors = False


@pytest.fixture(params=["native", "vectors", "moves"])
def copier(request: pytest.FixtureRequest) -> Copies:
    if request.param != "native":
        return Copier() if request.param == "vectors" else MovesOnly()
    return NativeCopier(cpp())


@pytest.mark.parametrize("seed", range(10))
def test_copies_are_exact(copier: Copies, seed: int) -> None:
    rng = random.Random(seed)
    nbytes = rng.choice([3000, 3_000_000])
    source, sink = bytearray(rng.randbytes(nbytes)), bytearray(rng.randbytes(nbytes))
    expected = bytearray(sink)
    spans = random_spans(rng, nbytes, rng.randint(1, 1200))
    for src, dst, size in spans:
        expected[dst : dst + size] = source[src : src + size]
    copy(copier, source, sink, spans)
    assert sink == expected, f"seed {seed}"


@pytest.mark.parametrize("past", [False, True], ids=["plain", "past the cache"])
def test_any_alignment_and_length_is_copied_and_nothing_beside_it(past: bool) -> None:
    """By C++, whose lines begin at multiples of 64 bytes of the destination; cut into batches of odd lengths."""
    library = cpp()
    rng = random.Random(5)
    source = bytearray(rng.randbytes(9000))
    for nbytes in [*range(1, 70), *range(250, 330), 4095, 4096, 8000]:
        src, dst = rng.randrange(0, 900), rng.randrange(0, 900)
        sink = bytearray(rng.randbytes(9000))
        expected = bytearray(sink)
        expected[dst : dst + nbytes] = source[src : src + nbytes]
        most = rng.choice([1, 63, 64, 257, 1 << 20])
        table = Rows.of([Span(src, dst, nbytes)]).numbers
        for _ in library.copy(address_of(source), address_of(sink), table, most=most, is_past_cache=past):
            pass
        assert sink == expected, f"{nbytes} bytes from {src} to {dst}, {most} at a time"


def test_a_changed_source_asks_for_another_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = native.library_path()
    assert before is not None, "where tests are, sources are"
    shutil.copytree(native.SOURCES, tmp_path / "bytes")
    monkeypatch.setattr(native, "SOURCES", tmp_path / "bytes")
    assert native.library_path() == before
    (tmp_path / "bytes" / "copy.cpp").open("a").write("\n")
    assert native.library_path() != before


def test_what_is_not_asked_for_is_not_copied(copier: Copies) -> None:
    """A batch a step: who stops after the first leaves the rest as it was."""
    nbytes = BATCH_NBYTES + 100
    source, sink = bytearray(b"\x01" * nbytes), bytearray(nbytes)
    steps = copier.steps(address_of(source), address_of(sink), [Span(0, 0, 10), Span(10, 10, nbytes - 10)])
    next(steps)
    assert sink == bytes(nbytes)
    next(steps)
    assert sink == source[:BATCH_NBYTES] + bytes(100)
    assert list(steps) == []
    assert sink == source


@pytest.mark.parametrize("seed", range(20))
def test_batches_are_bounded_and_cover_each_span_once(seed: int) -> None:
    rng = random.Random(seed)
    spans, at = [], 0
    for _ in range(rng.randint(0, 3000)):
        nbytes = rng.choice([1, 100, 40_000, BATCH_NBYTES, 3 * BATCH_NBYTES + 5])
        spans.append(Span(at, 2 * at + 1, nbytes))
        at += nbytes + 1
    cut = list(batches(spans))
    assert all(len(batch) <= 1024 and sum(span.nbytes for span in batch) <= BATCH_NBYTES for batch in cut)
    rejoined: list[Span] = []
    for piece in (piece for batch in cut for piece in batch):
        last = rejoined[-1] if rejoined else Span(-1, -1, 0)
        if (last.src + last.nbytes, last.dst + last.nbytes) == (piece.src, piece.dst):
            rejoined[-1] = last._replace(nbytes=last.nbytes + piece.nbytes)
        else:
            rejoined.append(piece)
    assert rejoined == spans, f"seed {seed}"


@pytest.mark.parametrize("copier", ["native", "vectors"], indirect=True)
def test_a_thread_that_runs_python_all_the_time_does_not_stall_a_copy(copier: Copies) -> None:
    """128 pieces with 5 ms of waiting for each were 640 ms; the bound is half of that, the best of five counts."""
    nbytes, num_pieces = 64 << 10, 128
    source, sink = bytearray(b"\x01" * (nbytes * num_pieces)), bytearray(nbytes * num_pieces)
    spans = [Span(i * nbytes, (num_pieces - 1 - i) * nbytes, nbytes) for i in range(num_pieces)]
    is_over = threading.Event()

    def spin() -> None:
        while not is_over.is_set():
            sum(range(1000))

    thread = threading.Thread(target=spin)
    thread.start()
    took = []
    for _ in range(5):
        began = time.perf_counter()
        copy(copier, source, sink, spans)
        took.append(time.perf_counter() - began)
    is_over.set()
    thread.join()
    assert sink == source
    assert min(took) < 0.32


def copy(copier: Copies, source: bytearray, sink: bytearray, spans: Sequence[Span]) -> None:
    for _ in copier.steps(address_of(source), address_of(sink), spans):
        pass
    copier.finish()


def address_of(memory: bytearray) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))
