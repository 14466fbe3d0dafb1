"""How fast KV goes to a peer is told once it is known, and of the right peer."""

from __future__ import annotations

import logging

import pytest

from pd.transfer.memory import MemoryHub, MemoryTransport
from pd.transfer.paced import ENOUGH_NBYTES, Pace, Paced
from pd.transfer.transport import Span

MIB = 1 << 20


def test_the_best_of_the_large_jobs_is_told_once_enough_was_moved() -> None:
    pace = Pace()
    assert pace.note("p", 1000, 1e-9) is None, "a small job says nothing"
    for _ in range(3):
        assert pace.note("p", ENOUGH_NBYTES // 4, 1.0) is None
        assert pace.note("q", MIB, 1.0) is None
    assert pace.note("p", ENOUGH_NBYTES // 4, 0.01) == "1.68 GB/s at best of 4 jobs, 64 MiB"
    assert pace.note("p", ENOUGH_NBYTES, 0.01) is None, "told"
    pace.forget("p")
    assert pace.note("p", ENOUGH_NBYTES, 0.1) == "0.67 GB/s at best of 1 jobs, 64 MiB"


def test_a_transport_tells_its_log(caplog: pytest.LogCaptureFixture) -> None:
    hub = MemoryHub()
    a, b = Paced(MemoryTransport(me="a", hub=hub)), MemoryTransport(me="b", hub=hub)
    a.allocate(32 * MIB)[:] = b"\x03" * (32 * MIB)
    view = b.allocate(32 * MIB)
    a.connect("b", b.endpoint())
    with caplog.at_level(logging.INFO):
        for job in range(3):
            (a.read if job % 2 else a.write)("b", [Span(0, 0, 32 * MIB)], job=job)
            a.poll()
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.startswith("KV to or from b goes at ") and line.endswith("GB/s at best of 2 jobs, 64 MiB, by memory")
    assert view[-1] == 3
    a.close()
    b.close()
