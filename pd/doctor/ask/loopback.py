"""A backend measured: to a process beside this one, or (with a peer) to one that a `pd doctor --serve` starts."""

from __future__ import annotations

import multiprocessing
import signal
import socket
from multiprocessing.process import BaseProcess

from pd.doctor.answers import Loopback, Timing
from pd.doctor.measure.ends import MeasureError, load
from pd.doctor.measure.frames import Frames, PeerError
from pd.doctor.measure.initiator import HERE, SIZES, measure
from pd.doctor.measure.messages import FromTarget
from pd.doctor.measure.target import serve
from pd.doctor.peer.visit import borrow_target

ENOUGH = 4
"""Times the largest size that must be available: two regions, and room; with less it is left out."""
FORK = multiprocessing.get_context("fork")


def answer(backend: str, peer: str = "") -> Loopback:
    """Raises ModuleNotFoundError for a backend whose library is not installed."""
    wanted = SIZES if peer else HERE
    sizes = wanted if _available() >= ENOUGH * wanted[-1] else wanted[:-1]
    note = "" if sizes == wanted else f"memory is short: {wanted[-1] >> 20} MiB left out"
    load(backend)
    try:
        timings = _remote(backend, peer, sizes) if peer else _local(backend, sizes)
        if len(timings) < len(sizes):
            note = f"too slow for more than {timings[-1].nbytes >> 10} KiB at a time"
    except (MeasureError, PeerError) as error:
        return Loopback(backend=backend, timings=(), error=str(error), note=note)
    return Loopback(backend=backend, timings=timings, error="", note=note)


def _local(backend: str, sizes: tuple[int, ...]) -> tuple[Timing, ...]:
    """The target is a fork, which has the library loaded."""
    mine, theirs = socket.socketpair()
    process = FORK.Process(target=_serve, args=(backend, max(sizes), theirs, mine))
    process.start()
    theirs.close()
    frames: Frames[FromTarget] = Frames(mine, FromTarget)  # type: ignore[arg-type]
    try:
        return measure(backend, frames, host="127.0.0.1", sizes=sizes)
    except PeerError as error:
        raise PeerError(f"{error}; {_ending(process)}") from error
    finally:
        frames.close()
        process.kill()
        process.join()


def _serve(backend: str, nbytes: int, theirs: socket.socket, mine: socket.socket) -> None:
    mine.close()
    serve(backend, "127.0.0.1", nbytes, theirs)


def _ending(process: BaseProcess) -> str:
    """What became of a target that stopped talking."""
    process.join(timeout=1)
    code = process.exitcode
    if code is None:
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
