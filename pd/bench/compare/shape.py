"""A server to compare: its command and cores; started, waited for, and ended with all its processes."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from typing import IO

from pd.bench.load.http import Exchange, Server
from pd.runtime.config import ConfigError
from pd.runtime.roles.process import die_with

_START_S = 300.0
_POLL_S = 0.25
_END_S = 8.0
_TAIL, _WIDTH = 12, 300  # lines of its output that a failure shows, and characters of each
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")


@dataclass(frozen=True, slots=True)
class Shape:
    name: str
    command: tuple[str, ...]  # {port} and {model} are filled in
    cores: tuple[int, ...]  # all of its processes may use these and no others

    def filled(self, **values: str) -> Shape:
        """With each {name} of its command replaced by that value."""
        words = self.command
        for name, value in values.items():
            words = tuple(word.replace(f"{{{name}}}", value) for word in words)
        return replace(self, command=words)

    def on(self, port: int, model: str) -> list[str]:
        return list(self.filled(port=str(port), model=model).command)


@dataclass(frozen=True, slots=True)
class Running:
    url: str
    pid: int  # of the process that was started; its session has the same number
    said: tuple[str, ...]  # what it said of itself when it became ready: dtype, operators, pages
    fault: Callable[[], ConfigError | None]
    """Why it serves no more, with its last words; None while it runs."""


Ready = Callable[[str], Awaitable[str | None]]
"""Why the server at this URL cannot serve yet; None: it can."""


def ours(name: str, layout: Sequence[str], *, cores: Sequence[int], further: Sequence[str]) -> Shape:
    """`pd serve` with a layout."""
    listed = ",".join(map(str, cores))
    command = (sys.executable, "-P", "-m", "pd", "serve", "{model}", "--port={port}", f"--cores={listed}")
    return Shape(name, (*command, *layout, *further), tuple(cores))


def foreign(command: str, *, cores: Sequence[int], example: str = "vllm serve {model} --port {port}") -> Shape:
    """Another server's command line, named by its program. Raises ValueError."""
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise ValueError(f"--vs is {command!r}: {error}") from None
    if not words or "{port}" not in command:
        raise ValueError(f"--vs is {command!r}: it must hold {{port}}, as in '{example}'")
    return Shape(_program(words), tuple(words), tuple(cores))


def _program(words: Sequence[str]) -> str:
    """`env A=1 vllm serve …` is vllm, `python -m router.launch …` router.launch, `python proxy.py` proxy.py."""
    if "serve" in words[1:]:
        return os.path.basename(words[words.index("serve") - 1])
    python = next((place for place, word in enumerate(words) if os.path.basename(word).startswith("python")), None)
    match words[1 if python is None else python + 1 :]:
        case ["-m", module, *_] if python is not None:
            return module
        case [script, *_] if python is not None:
            return os.path.basename(script)
        case _:
            return os.path.basename(words[0])


@contextlib.asynccontextmanager
async def running(
    shape: Shape, model: str, *, ready: Ready | None = None, start_s: float = _START_S
) -> AsyncIterator[Running]:
    """Where it is, once it can serve. Raises ConfigError, with its last words, if it cannot within `start_s`."""
    port = free_port()
    with tempfile.TemporaryFile() as log:
        process = _start(shape.on(port, model), shape.cores, log)
        try:
            url = f"http://127.0.0.1:{port}"
            await _until_ready(shape, process, url, log, ready=ready or _says_so, start_s=start_s)
            yield Running(url, process.pid, _said(log), lambda: _fault(shape, process, log, "while it served"))
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


async def _until_ready(
    shape: Shape, process: subprocess.Popen[bytes], url: str, log: IO[bytes], *, ready: Ready, start_s: float
) -> None:
    loop = asyncio.get_running_loop()
    until = loop.time() + start_s
    why: str | None = ""
    while loop.time() < until:
        if fault := _fault(shape, process, log, "before it could serve"):
            raise fault
        if (why := await ready(url)) is None:
            return
        await asyncio.sleep(_POLL_S)
    raise ConfigError(*_words(f"{shape.name} cannot serve after {start_s:g} s ({why})", log), hint=_command(process))


def _fault(shape: Shape, process: subprocess.Popen[bytes], log: IO[bytes], when: str) -> ConfigError | None:
    status = process.poll()
    if status is None:
        return None
    how = f"was ended by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
    return ConfigError(*_words(f"{shape.name} {how} {when}", log), hint=_command(process))


def _words(what: str, log: IO[bytes]) -> list[str]:
    """What happened, and what the server said last."""
    said = _tail(log)
    return [f"{what}:", *said] if said else [f"{what}, and said nothing"]


def _command(process: subprocess.Popen[bytes]) -> str:
    return shlex.join(process.args)  # type: ignore[arg-type]


async def _says_so(url: str) -> str | None:
    """Ours says so at /ready; of others, naming a model is taken for it."""
    server = Server(url)
    try:
        ready = await server.fetch("GET", "/ready", timeout_s=2.0)
        if ready.status == 503 or ready.fault is not None:
            return said(ready, "/ready")
        models = await server.fetch("GET", "/v1/models", timeout_s=2.0)
        return None if models.status == 200 and b'"id"' in models.body else said(models, "/v1/models")
    finally:
        server.close()


def said(answer: Exchange, path: str) -> str:
    """An answer that is none, in a few words."""
    if answer.fault is not None:
        return f"{path}: {': '.join(answer.fault)}"
    return f"{path}: status {answer.status} {bytes(answer.body[:200]).decode(errors='replace').strip()}".strip()


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
    """Without colours, and no line longer than a person reads."""
    return [_COLOUR.sub("", line)[:_WIDTH] for line in _lines(log)[-_TAIL:]]


def _lines(log: IO[bytes]) -> list[str]:
    """Read in place: the server writes on through the same descriptor, whose position must not move."""
    size = os.fstat(log.fileno()).st_size
    return os.pread(log.fileno(), size, 0).decode(errors="replace").splitlines()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])
