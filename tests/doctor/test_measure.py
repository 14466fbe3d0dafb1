"""Measuring a backend: every size compared, every fault told, nothing left running."""

from __future__ import annotations

import fcntl
import importlib.util
import os
import resource
import socket
import zlib
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec
import pytest

from pd.doctor.answers import Timing
from pd.doctor.checks.transfer import describe, loopback
from pd.doctor.local import ThisMachine
from pd.doctor.measure import initiator
from pd.doctor.measure.ends import MeasureError
from pd.doctor.measure.frames import LARGEST, Frames, PeerError, send_raw
from pd.doctor.measure.initiator import measure, start_target
from pd.doctor.measure.messages import Address, Checksum, FromTarget, Meet, ToTarget, Trouble
from pd.doctor.readable import readable
from pd.doctor.recorded import Recorded, Recording
from pd.doctor.result import Status

SIZES = (4096, 1 << 20)


@contextmanager
def target(backend: str) -> Iterator[Frames[FromTarget]]:
    process, sock = start_target(backend, host="127.0.0.1", nbytes=max(SIZES))
    frames: Frames[FromTarget] = Frames(sock, FromTarget)  # type: ignore[arg-type]
    try:
        yield frames
    finally:
        frames.close()
        process.kill()
        process.wait()


@pytest.mark.parametrize("backend", ["shm", "tcp"])
def test_a_backend_is_measured_between_two_processes(backend: str) -> None:
    with target(backend) as frames:
        timings = measure(backend, frames, host="127.0.0.1", sizes=SIZES)
    assert [t.nbytes for t in timings] == list(SIZES)
    assert all(0 < t.seconds < 5 for t in timings)


@pytest.mark.skipif(importlib.util.find_spec("nixl") is None, reason="nixl is not installed")
def test_nixl_is_measured_in_processes_of_its_own() -> None:
    result = loopback(ThisMachine(), backend="nixl")
    assert result.status is not Status.FAIL, result


def test_what_the_target_says_went_wrong_is_the_measurements_error() -> None:
    with target("no-such-backend") as frames, pytest.raises(MeasureError, match="KeyError"):
        measure("shm", frames, host="127.0.0.1", sizes=SIZES)


def test_bytes_that_arrive_wrong_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    right = zlib.crc32
    monkeypatch.setattr("pd.doctor.measure.initiator.zlib.crc32", lambda data: right(data) ^ 1)
    with target("shm") as frames, pytest.raises(MeasureError, match="arrived wrong"):
        measure("shm", frames, host="127.0.0.1", sizes=SIZES)


def test_a_size_that_would_take_too_long_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(initiator, "PATIENCE_S", 0.0)
    with target("shm") as frames:
        timings = measure("shm", frames, host="127.0.0.1", sizes=SIZES)
    assert [t.nbytes for t in timings] == [SIZES[0]]


def test_timings_are_described_as_latency_then_rates() -> None:
    timings = (Timing(65536, 11e-6), Timing(1 << 20, 1e-4), Timing(256 << 20, 0.05))
    assert describe(timings) == "64 KiB 11 µs · 1 MiB 10 GB/s · 256 MiB 5.4 GB/s"


@pytest.mark.parametrize(
    ("answer", "status", "words"),
    [
        ('{"backend": "nixl", "timings": [], "error": "a write failed"}', Status.FAIL, "a write failed"),
        ('{"why": "crashed", "reason": "SIGSEGV"}', Status.FAIL, "crashed: SIGSEGV"),
        ('{"why": "slow", "reason": "no answer in 30 s"}', Status.FAIL, "no answer"),
        ('{"why": "missing", "reason": "No module named nixl"}', Status.SKIP, "not installed"),
        (
            '{"backend": "nixl", "timings": [{"nbytes": 65536, "seconds": 1e-3},'
            ' {"nbytes": 268435456, "seconds": 9}], "error": ""}',
            Status.WARN,
            "0.03 GB/s",
        ),
    ],
)
def test_a_measurement_is_judged(answer: str, status: Status, words: str) -> None:
    recording = Recording(about="", sources=(), answers={"loopback nixl": msgspec.Raw(answer.encode())})
    result = loopback(Recorded(recording), backend="nixl")
    assert result.status is status and words in result.read


@contextmanager
def talk() -> Iterator[tuple[Frames[ToTarget], socket.socket]]:
    mine, theirs = socket.socketpair()
    frames: Frames[ToTarget] = Frames(mine, ToTarget, deadline_s=0.2)  # type: ignore[arg-type]
    with mine, theirs:
        yield frames, theirs


def test_messages_come_back_as_they_went() -> None:
    with talk() as (frames, other):
        for message in (Meet(b"\0" * 4096), Address(b"x"), Checksum(7), Trouble("why")):
            frames.send(message)
        frames_back: Frames[FromTarget | Meet] = Frames(other, FromTarget | Meet)  # type: ignore[arg-type]
        assert [frames_back.receive() for _ in range(4)] == [
            Meet(b"\0" * 4096),
            Address(b"x"),
            Checksum(7),
            Trouble("why"),
        ]


@pytest.mark.parametrize(
    ("sent", "words"),
    [
        ((LARGEST + 1).to_bytes(4, "big"), "at most"),
        (b"\0\0\0\3abc", "unreadable"),
        (b"\0\0\0\1\xc0", "unreadable"),
        (b"\0\0", "no answer"),
    ],
)
def test_nonsense_is_a_peer_error(sent: bytes, words: str) -> None:
    with talk() as (frames, other):
        other.sendall(sent)
        with pytest.raises(PeerError, match=words):
            frames.receive()


def test_a_closed_connection_is_a_peer_error() -> None:
    with talk() as (frames, other):
        other.close()
        with pytest.raises(PeerError, match="closed"):
            frames.receive()
        with pytest.raises(PeerError, match="sending failed"):
            for _ in range(10):
                send_raw(frames.sock, b"x" * LARGEST)


@pytest.mark.skipif(
    resource.getrlimit(resource.RLIMIT_NOFILE)[0] <= 1500, reason="no process here has 1,500 files open"
)
def test_descriptors_of_any_number_are_waited_for() -> None:
    mine, theirs = socket.socketpair()
    high = fcntl.fcntl(mine.fileno(), fcntl.F_DUPFD, 1500)
    try:
        assert readable(high, timeout_s=0) == set()
        theirs.send(b"x")
        assert readable(high, theirs.fileno(), timeout_s=5) == {high}
    finally:
        os.close(high)
        mine.close()
        theirs.close()
