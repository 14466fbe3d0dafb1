"""One child process of `pd serve`: started in a group of its own, heard line by line, ended with its group.

Rules
1. Called from a process without threads, so that what runs between fork and exec is safe.
2. A terminal's Ctrl-C does not reach a child; its parent decides.
3. An ended child stays a zombie until its group is killed: so neither number can have become another's.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
from collections.abc import AsyncIterator
from dataclasses import dataclass

from pd.runtime.roles.process import die_with

_LINE_NBYTES = 1 << 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Child:
    name: str
    says: tuple[str, ...]
    """Columns of the table that is shown when all is ready: role, tp, cores."""
    command: tuple[str, ...]
    environment: tuple[tuple[str, str], ...] = ()
    """Beside what it inherits."""


def start(child: Child, *, scratch: str) -> subprocess.Popen[bytes]:
    """Its standard output and error are one pipe, for `lines`; its temporary files go into the folder `scratch`."""
    parent = os.getpid()
    return subprocess.Popen(
        child.command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        env=os.environ | dict(child.environment) | {"TMPDIR": scratch},
        preexec_fn=lambda: die_with(parent, by=signal.SIGTERM),
    )


async def ended(process: subprocess.Popen[bytes]) -> None:
    """Wait until `process` has ended, and leave it a zombie."""
    handle = os.pidfd_open(process.pid)
    event = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_reader(handle, event.set)
    try:
        await event.wait()
    finally:
        loop.remove_reader(handle)
        os.close(handle)


def ask_to_end(process: subprocess.Popen[bytes]) -> None:
    """SIGTERM. Not Popen.terminate, which would wait for a zombie before its group is killed."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(process.pid, signal.SIGTERM)


def kill_group(process: subprocess.Popen[bytes]) -> None:
    """Only while `process` has not been waited for."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def ending(status: int) -> str:
    """How it ended, in words; `status` as Popen gives it."""
    if status < 0:
        return f"was ended by {signal.Signals(-status).name}"
    return f"ended with status {status}"


async def lines(process: subprocess.Popen[bytes]) -> AsyncIterator[str]:
    """What `process` prints, line by line; a line beyond _LINE_NBYTES comes in parts."""
    reader = asyncio.StreamReader()
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), process.stdout)
    rest = b""
    while piece := await reader.read(_LINE_NBYTES):
        *whole, rest = (rest + piece).split(b"\n")
        if len(rest) > _LINE_NBYTES:
            whole, rest = [*whole, rest], b""
        for line in whole:
            yield line.decode(errors="replace")
    if rest:
        yield rest.decode(errors="replace")
