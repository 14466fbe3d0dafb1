"""A backend measured: to a process beside this one, or (with a peer) to one that a `pd doctor --serve` starts."""

from __future__ import annotations

import signal
import subprocess

from pd.doctor.answers import Loopback, Timing
from pd.doctor.measure.ends import MeasureError, load
from pd.doctor.measure.frames import Frames, PeerError
from pd.doctor.measure.initiator import SIZES, measure, start_target
from pd.doctor.measure.messages import FromTarget
from pd.doctor.peer.visit import borrow_target

ENOUGH = 1 << 30
"""Bytes available for two regions of 256 MiB and room; with less the largest size is left out."""


def answer(backend: str, peer: str = "") -> Loopback:
    """Raises ModuleNotFoundError for a backend whose library is not installed."""
    sizes = SIZES if _available() >= ENOUGH else SIZES[:-1]
    note = "" if sizes == SIZES else "memory is short: 256 MiB left out"
    load(backend)
    try:
        timings = _remote(backend, peer, sizes) if peer else _local(backend, sizes)
        if len(timings) < len(sizes):
            note = f"too slow for more than {timings[-1].nbytes >> 10} KiB at a time"
    except (MeasureError, PeerError) as error:
        return Loopback(backend=backend, timings=(), error=str(error), note=note)
    return Loopback(backend=backend, timings=timings, error="", note=note)


def _local(backend: str, sizes: tuple[int, ...]) -> tuple[Timing, ...]:
    process, sock = start_target(backend, host="127.0.0.1", nbytes=max(sizes))
    frames: Frames[FromTarget] = Frames(sock, FromTarget)  # type: ignore[arg-type]
    try:
        return measure(backend, frames, host="127.0.0.1", sizes=sizes)
    except PeerError as error:
        raise PeerError(f"{error}; {_ending(process)}") from error
    finally:
        frames.close()
        process.kill()
        process.wait()


def _ending(process: subprocess.Popen[bytes]) -> str:
    """What became of a target that stopped talking."""
    try:
        code = process.wait(timeout=1)
    except subprocess.TimeoutExpired:
        return "the target still runs"
    return f"the target ended by {signal.Signals(-code).name}" if code < 0 else f"the target ended with {code}"


def _remote(backend: str, peer: str, sizes: tuple[int, ...]) -> tuple[Timing, ...]:
    frames = borrow_target(peer, backend, nbytes=max(sizes))
    try:
        return measure(backend, frames, host=frames.sock.getsockname()[0], sizes=sizes)
    finally:
        frames.close()


def _available() -> int:
    with open("/proc/meminfo") as file:
        return next(int(line.split()[1]) << 10 for line in file if line.startswith("MemAvailable"))
