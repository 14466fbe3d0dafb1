"""Asks libraries, each question in a process of its own, forked by one that has Python started: `pd.doctor.ask`."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable

import msgspec

from pd.doctor.machine import Silence, Why

QUIET = {"NIXL_LOG_LEVEL": "ERROR", "UCX_LOG_LEVEL": "fatal", "GLOG_minloglevel": "3", "MC_LOG_LEVEL": "ERROR"}
"""For libraries that are asked: their last words are read, not their greetings."""
MISSING = 3
"""Exit code of a question about a library that is not installed."""
_CHUNK = 1 << 16


class Reply(msgspec.Struct, frozen=True, array_like=True):
    """What became of a question's process, and what it wrote."""

    code: int  # negative: the signal that ended it
    out: bytes
    err: str


class Asker:
    """Owns the process that forks, started at the first question; it ends when this is gone."""

    def __init__(self) -> None:
        self._starting = threading.Lock()
        self._door: socket.socket | None = None
        self._end: Callable[[], object] = bool

    def close(self) -> None:
        """Whoever is being asked is killed; who waits for it hears that."""
        self._end()

    def ask(self, module: str, *arguments: str, within_s: float) -> bytes | Silence:
        """The answer's JSON. From any thread. Too late, or interrupted, the question's processes are killed."""
        mine, theirs = socket.socketpair()
        with mine, theirs:
            try:
                socket.send_fds(self._opened(), [msgspec.json.encode((module, *arguments))], [theirs.fileno()])
            except OSError as error:
                return Silence(Why.FAILED, f"no process to ask it in: {error.strerror}")
            theirs.close()
            return _hear(mine, within_s)

    def _opened(self) -> socket.socket:
        with self._starting:
            if self._door is None:
                self._door, theirs = socket.socketpair(type=socket.SOCK_SEQPACKET)
                process = _start(theirs)
                self._end = weakref.finalize(self, _end, self._door, process)
            return self._door


def _start(theirs: socket.socket) -> subprocess.Popen[bytes]:
    """In a session of its own, so that a terminal's Ctrl-C is ours to act on."""
    silent = subprocess.DEVNULL
    with theirs:
        return subprocess.Popen(
            [sys.executable, "-P", "-m", "pd.doctor.ask", str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            stdin=silent,
            stdout=silent,
            stderr=silent,
            start_new_session=True,
            env={**QUIET, **os.environ},
        )


def _end(door: socket.socket, process: subprocess.Popen[bytes]) -> None:
    door.close()
    process.wait()


def _hear(sock: socket.socket, within_s: float) -> bytes | Silence:
    """First the number of the question's session, then a Reply, then the end."""
    until, heard = time.monotonic() + within_s, b""
    try:
        while True:
            sock.settimeout(max(1e-3, until - time.monotonic()))
            piece = sock.recv(_CHUNK)
            if not piece:
                break
            heard += piece
    except TimeoutError:
        return Silence(Why.SLOW, f"no answer in {within_s:g} s")
    finally:
        if len(heard) == 4:  # it has begun, and not ended
            with contextlib.suppress(ProcessLookupError):
                os.killpg(int.from_bytes(heard, "little"), signal.SIGKILL)
    if len(heard) <= 4:
        return Silence(Why.FAILED, "its process ended without a word")
    return _judged(msgspec.msgpack.decode(heard[4:], type=Reply))


def _judged(reply: Reply) -> bytes | Silence:
    last = next((line.strip() for line in reversed(reply.err.splitlines()) if line.strip()), "")
    if reply.code < 0:
        return Silence(Why.CRASHED, f"{signal.Signals(-reply.code).name} {last}".strip())
    if reply.code == 0:
        return reply.out
    return Silence(Why.MISSING if reply.code == MISSING else Why.FAILED, last)
