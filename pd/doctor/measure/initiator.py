"""The side that writes: several sizes, each several times, each compared by checksum."""

from __future__ import annotations

import os
import random
import socket
import subprocess
import sys
import zlib
from collections.abc import Sequence
from typing import TypeVar

from pd.doctor.answers import Timing
from pd.doctor.asking import QUIET
from pd.doctor.measure.ends import End, MeasureError, make_end
from pd.doctor.measure.frames import Frames
from pd.doctor.measure.messages import Address, Checksum, Clear, Done, FromTarget, Meet, Ready, Sum, Trouble

SIZES = (64 << 10, 1 << 20, 256 << 20)
HERE = (64 << 10, 1 << 20, 64 << 20)
"""Within one host: more than a core's caches hold, and a quarter of the time."""
TRIES = {64 << 10: 20, 1 << 20: 10}
"""The best of so many: small writes are latency, which interruptions blur. Larger ones twice: the first touches
pages."""
PATIENCE_S = 6.0
SEED = 20260

M = TypeVar("M")


def measure(backend: str, frames: Frames[FromTarget], *, host: str, sizes: Sequence[int]) -> tuple[Timing, ...]:
    """Raises MeasureError and PeerError. `frames` leads to a target of the same backend."""
    there = expect(frames, Address)
    end = make_end(backend, name=f"doctor-initiator-{os.getpid()}", host=host, nbytes=max(sizes))
    try:
        frames.send(Meet(end.address()))
        end.meet(there.address)
        expect(frames, Ready)
        _fill(end)
        return _measure_all(end, frames, sizes)
    finally:
        frames.send(Done())
        end.close()


def expect(frames: Frames[FromTarget], kind: type[M]) -> M:
    message = frames.receive()
    if isinstance(message, Trouble):
        raise MeasureError(message.reason)
    if not isinstance(message, kind):
        raise MeasureError(f"the target said {type(message).__name__} where {kind.__name__} belongs")
    return message


def start_target(backend: str, *, host: str, nbytes: int) -> tuple[subprocess.Popen[bytes], socket.socket]:
    """A target process on this host, and the socket that leads to it. The caller ends both."""
    mine, theirs = socket.socketpair()
    command = [sys.executable, "-P", "-m", "pd.doctor.measure.target", backend, host, str(nbytes), str(theirs.fileno())]
    silent = subprocess.DEVNULL  # what goes wrong it tells by the socket, or by its exit status
    process = subprocess.Popen(
        command, pass_fds=[theirs.fileno()], stdin=silent, stdout=silent, stderr=silent, env={**QUIET, **os.environ}
    )
    theirs.close()
    return process, mine


def _fill(end: End) -> None:
    """A MiB of seeded noise, again and again, each copy marked with its number: a misplaced piece changes the sum."""
    noise = random.Random(SEED).randbytes(1 << 20)
    for start in range(0, len(end.region), 1 << 20):
        piece = end.region[start : start + (1 << 20)]
        piece[:] = noise[: len(piece)]
        piece[:8] = start.to_bytes(8, "little")


def _measure_all(end: End, frames: Frames[FromTarget], sizes: Sequence[int]) -> tuple[Timing, ...]:
    """Stops before a size that would take longer than PATIENCE_S by the rate of the one before."""
    found: list[Timing] = []
    for nbytes in sizes:
        if found and nbytes * found[-1].seconds / found[-1].nbytes > PATIENCE_S:
            break
        if found:  # what was written before is cleared; the rest of the region was never touched
            frames.send(Clear(found[-1].nbytes))
            expect(frames, Ready)
        found.append(_time(end, frames, nbytes))
    return tuple(found)


def _time(end: End, frames: Frames[FromTarget], nbytes: int) -> Timing:
    best = min(end.write(nbytes) for _ in range(TRIES.get(nbytes, 2)))
    frames.send(Sum(nbytes))
    sent = zlib.crc32(end.region[:nbytes])  # while the target sums its own
    arrived = expect(frames, Checksum).value
    if arrived != sent:
        raise MeasureError(f"{nbytes} bytes arrived wrong: checksum {arrived:08x}, not {sent:08x}")
    return Timing(nbytes=nbytes, seconds=best)
