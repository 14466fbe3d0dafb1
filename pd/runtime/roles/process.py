"""What every process of ours does at its start: logging, cores, dying with its parent, and being told to stop."""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import socket
import sys
import uuid
from types import FrameType
from urllib.parse import urlsplit

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_LIBC = ctypes.CDLL(None, use_errno=True)  # before any fork: a child may not load it


def setup_logging(who: str, *, says: str = "requests") -> None:
    """Log lines to standard error, each with the time and who speaks. What no line says is not gathered, as Python's
    own logging HOWTO has it: three lines a request were a sixth of the router's time. `says` is the option --log."""
    logging.logThreads = logging.logProcesses = logging.logMultiprocessing = False
    logging._srcfile = None  # no caller is looked for
    logging.basicConfig(
        level=logging.INFO, stream=sys.stderr, format=f"%(asctime)s {who} %(message)s", datefmt="%H:%M:%S", force=True
    )
    logging.getLogger("pd").setLevel(logging.DEBUG if says == "requests" else logging.INFO)


def die_with(parent: int, *, by: signal.Signals = signal.SIGKILL) -> None:
    """From now on the kernel sends `by` to this process when its parent, of this process id, ends. Linux only."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, by)
    if os.getppid() != parent:
        os._exit(1)  # it ended before we could ask


def adopt_orphans() -> None:
    """From now on a process whose parent ends, and that descends from this one, is this one's child. Linux only.

    Raises OSError if the kernel, or what confines this process, does not allow it.
    """
    if _LIBC.prctl(_PR_SET_CHILD_SUBREAPER, 1):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER) is refused; ranks need a parent that is told")


def new_epoch() -> str:
    """A name for this process's life."""
    return uuid.uuid4().hex[:12]


class StopSignals:
    """SIGTERM and SIGINT, counted: the first asks to drain, the second to leave at once."""

    def __init__(self) -> None:
        self.num_seen = 0
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.num_seen += 1


def reachable_host(host: str, towards: str) -> str:
    """`host` as others reach it. A wildcard becomes the address this machine uses towards a `tcp://host:port`."""
    if host not in ("0.0.0.0", "::", "*"):
        return host
    parts = urlsplit(towards)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((parts.hostname or "127.0.0.1", parts.port or 1))  # a datagram socket: nothing is sent
        return str(probe.getsockname()[0])
