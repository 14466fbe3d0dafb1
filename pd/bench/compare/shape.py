"""A server to compare: its command and cores; started, waited for, and ended with all its processes."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import IO, NamedTuple

from pd.bench.load.http import Server
from pd.runtime.config import ConfigError
from pd.runtime.roles.process import die_with

_START_S = 300.0
_POLL_S = 0.25
_END_S = 8.0
_TAIL = 12  # lines of its output that a failure shows


@dataclass(frozen=True, slots=True)
class Shape:
    name: str
    command: tuple[str, ...]  # {port} and {model} are filled in
    cores: tuple[int, ...]  # all of its processes may use these and no others

    def on(self, port: int, model: str) -> list[str]:
        return [word.replace("{port}", str(port)).replace("{model}", model) for word in self.command]


class Running(NamedTuple):
    url: str
    pid: int  # of the process that was started
    said: tuple[str, ...] = ()  # what it said of itself when it became ready: dtype, operators, pages


def ours(name: str, layout: Sequence[str], *, cores: Sequence[int], further: Sequence[str]) -> Shape:
    """`pd serve` with a layout."""
    listed = ",".join(map(str, cores))
    command = (sys.executable, "-m", "pd", "serve", "{model}", "--port={port}", f"--cores={listed}")
    return Shape(name, (*command, *layout, *further), tuple(cores))


def foreign(command: str, *, cores: Sequence[int]) -> Shape:
    """Another server's command line, named by its program. Raises ValueError."""
    words = shlex.split(command)
    if not words or "{port}" not in command:
        raise ValueError(f"--vs is {command!r}: it must hold {{port}}, as in 'vllm serve {{model}} --port {{port}}'")
    place = words.index("serve") - 1 if "serve" in words[1:] else 0
    return Shape(os.path.basename(words[place]), tuple(words), tuple(cores))


@contextlib.asynccontextmanager
async def running(shape: Shape, model: str) -> AsyncIterator[Running]:
    """Where it is, once it says that it can serve. Raises ConfigError, with its last words, if it does not."""
    port = free_port()
    with tempfile.TemporaryFile() as log:
        process = _start(shape.on(port, model), shape.cores, log)
        try:
            url = f"http://127.0.0.1:{port}"
            await _until_ready(shape, process, url, log)
            yield Running(url, process.pid, _said(log))
        finally:
            await _end(process)


def _start(command: list[str], cores: Sequence[int], log: IO[bytes]) -> subprocess.Popen[bytes]:
    parent = os.getpid()

    def prepare() -> None:
        os.sched_setaffinity(0, cores)
        die_with(parent, by=signal.SIGTERM)

    try:
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=prepare,
        )
    except OSError as error:
        reason = error.strerror or str(error)
        raise ConfigError(f"cannot start {command[0]}: {reason}", hint="--vs takes a command line") from error


async def _until_ready(shape: Shape, process: subprocess.Popen[bytes], url: str, log: IO[bytes]) -> None:
    loop = asyncio.get_running_loop()
    until = loop.time() + _START_S
    while loop.time() < until:
        if process.poll() is not None:
            raise ConfigError(
                f"{shape.name} ended with status {process.returncode} before it could serve:",
                *_tail(log),
                hint=shlex.join(process.args),  # type: ignore[arg-type]
            )
        if await _is_ready(url):
            return
        await asyncio.sleep(_POLL_S)
    raise ConfigError(f"{shape.name} cannot serve after {_START_S:.0f} s:", *_tail(log), hint="see its last words")


async def _is_ready(url: str) -> bool:
    """Ours says so at /ready; of others, naming a model is taken for it."""
    server = Server(url)
    try:
        ready = await server.fetch("GET", "/ready", timeout_s=2.0)
        if ready.status == 503 or ready.fault is not None:
            return False
        models = await server.fetch("GET", "/v1/models", timeout_s=2.0)
        return models.status == 200 and b'"id"' in models.body
    finally:
        server.close()


async def _end(process: subprocess.Popen[bytes]) -> None:
    """Ask, wait, insist; then whatever is left of its group."""
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        loop = asyncio.get_running_loop()
        until = loop.time() + _END_S
        while process.poll() is None and loop.time() < until:
            await asyncio.sleep(0.05)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _said(log: IO[bytes]) -> tuple[str, ...]:
    """Of ours; other servers' words are their own."""
    found = [line.partition(" ready: ")[2] for line in _lines(log) if " ready: " in line and "http" not in line]
    return tuple(dict.fromkeys(found))


def _tail(log: IO[bytes]) -> list[str]:
    return _lines(log)[-_TAIL:]


def _lines(log: IO[bytes]) -> list[str]:
    """Read in place: the server writes on through the same descriptor, whose position must not move."""
    size = os.fstat(log.fileno()).st_size
    return os.pread(log.fileno(), size, 0).decode(errors="replace").splitlines()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])
