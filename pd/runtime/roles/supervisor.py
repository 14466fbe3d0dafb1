"""`pd serve`: a router and instances as child processes, kept alive, shown together and ended together.

One asyncio loop and no thread, because it forks.

    TERM to all ── _NUDGE_S ──► TERM again: leave at once ── _KILL_S ──► KILL        all within 5 s
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass

from rich.table import Table

from pd.runtime.config import ConfigError
from pd.runtime.roles.child import Child, ask_to_end, ended, ending, kill_group, lines, start
from pd.runtime.roles.screen import Screen
from pd.runtime.wire.values import Role

_NUDGE_S, _KILL_S = 3.1, 4.0
"""From the request to stop. A leader drains for 3 s; what is left of the 5 s is for reaping."""
_FIRST_DELAY_S, _LAST_DELAY_S = 0.5, 30.0
"""Before a restart, doubling."""
_STEADY_S = 60.0
"""A life as long as this makes the next restart a first one again."""
_MAX_START_FAILURES = 3
"""Of one child, before all have been ready once."""
_CONFIG_ERROR = 2
"""Exit status of a child that a person must mend; see pd/cli.py."""
_MAX_BASE = 60
"""Characters of the folder for temporary files. Leaders bind sockets below it, whose paths may have 107."""
_POLL_S = 0.1
_ANSWER_S = 2.0
_STILL_S = 15.0
"""Between lines that say what is still awaited, where no terminal shows a spinner."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeConfig:
    children: tuple[Child, ...]
    host: str
    """Where the router's HTTP is reached from here."""
    port: int
    model: str
    """As clients say it."""
    restart: bool
    api_key_file: str | None = None
    keeper: socket.socket | None = None
    """See hold_port: of where instances meet the router."""


def run(config: ServeConfig) -> int:
    """Serve until told to stop. 0: told to; 1: a child would not live; 2: a child's settings are wrong."""
    base = tempfile.gettempdir()
    if len(base) > _MAX_BASE:
        base = "/tmp"
    with Screen() as screen, tempfile.TemporaryDirectory(prefix="pd-serve-", dir=base) as scratch:
        return asyncio.run(Supervisor(config, screen, scratch=scratch).run())


def claim_port(host: str, port: int) -> int:
    """`port`, or a free one for 0, checked to be free now. Raises ConfigError if it is not."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            reason = error.strerror or str(error)
            raise ConfigError(
                f"cannot listen on {host}:{port}: {reason}",
                hint="choose another --port, or 0 for any free one",
            ) from error
        return int(probe.getsockname()[1])


def hold_port(port: int) -> socket.socket | None:
    """Keep `port` of this machine for our router, which binds it later. None: another `pd serve` keeps it.

    Until closed, or this process ends. It is a name that only one can have: holding the port itself would keep our own
    router out. Linux only.
    """
    keeper = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        keeper.bind(f"\0pd-serve-{port}")
    except OSError:
        keeper.close()
        return None
    return keeper


class Supervisor:
    def __init__(self, config: ServeConfig, screen: Screen, *, scratch: str) -> None:
        """`scratch`: a folder for what a killed child leaves; the caller removes it."""
        self._config = config
        self._scratch = scratch
        self._screen = screen
        self._living: dict[str, subprocess.Popen[bytes]] = {}
        self._stopping = asyncio.Event()
        self._status = 0
        self._was_ready = False
        self._began = time.monotonic()

    async def run(self) -> int:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            loop.add_signal_handler(number, self._on_signal)
        keepers = [asyncio.create_task(self._keep(child)) for child in self._config.children]
        herald = asyncio.create_task(self._announce())
        for task in (herald, *keepers):
            task.add_done_callback(self._on_task_end)
        await self._stopping.wait()
        herald.cancel()
        self._screen.wait_for(None)
        began = time.monotonic()
        await self._end_all(keepers)
        self._screen.say(f"all ended after {time.monotonic() - began:.1f} s")
        for task in (herald, *keepers):
            with contextlib.suppress(asyncio.CancelledError):
                await task  # raises what a bug raised
        return self._status

    def _on_signal(self) -> None:
        if self._stopping.is_set():
            self._kill_all()
            return
        self._screen.say("stopping")
        self._stopping.set()

    def _on_task_end(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and task.exception() is not None:
            self._stopping.set()  # a bug: end all, then raise it

    def _fail(self, status: int, why: str) -> None:
        if not self._stopping.is_set():
            self._screen.say(why)
            self._status = status
            self._stopping.set()

    async def _end_all(self, keepers: list[asyncio.Task[None]]) -> None:
        for wait_s in (_NUDGE_S, _KILL_S - _NUDGE_S):
            for process in self._living.values():
                ask_to_end(process)
            _, open_ones = await asyncio.wait(keepers, timeout=wait_s)
            if not open_ones:
                return
        self._kill_all()
        await asyncio.wait(keepers)

    def _kill_all(self) -> None:
        for process in self._living.values():
            kill_group(process)

    # ---- one child -----------------------------------------------------------------------------------------

    async def _keep(self, child: Child) -> None:
        """Start `child`, and again whenever it ends, until all are to stop."""
        delay_s, num_failures = _FIRST_DELAY_S, 0
        while not self._stopping.is_set():
            began = time.monotonic()
            status = await self._live(child)
            if self._stopping.is_set():
                return
            if time.monotonic() - began > _STEADY_S:
                delay_s, num_failures = _FIRST_DELAY_S, 0
            num_failures += 1
            how = f"{child.name} {ending(status)}"
            if status == 0:
                self._screen.say(f"{child.name} ended as it was told to; it is not started again")
                return
            if status == _CONFIG_ERROR and not self._was_ready:
                return self._fail(_CONFIG_ERROR, f"{child.name} cannot start: its error stands above")
            if not self._config.restart:
                return self._fail(1, f"{how}; --restart never: ending the others")
            if not self._was_ready and num_failures >= _MAX_START_FAILURES:
                return self._fail(1, f"{how}, {num_failures} times before all were ready; giving up")
            self._screen.say(f"{how}; starting it again in {delay_s:g} s")
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), delay_s)
            delay_s = min(2 * delay_s, _LAST_DELAY_S)

    async def _live(self, child: Child) -> int:
        """One life of `child`: its exit status as Popen gives it, after its last line has been passed on."""
        process = start(child, scratch=self._scratch)
        self._living[child.name] = process
        output = asyncio.create_task(self._pass_on(child, process))
        try:
            await ended(process)
        finally:
            kill_group(process)  # also where a bug has this task cancelled: what is waited for below must end
            del self._living[child.name]
            status = process.wait()
        await output
        return status

    async def _pass_on(self, child: Child, process: subprocess.Popen[bytes]) -> None:
        """The child's lines, each with the child's name, until every writer has closed the pipe."""
        says_who = re.compile(rf"\d\d:\d\d:\d\d {re.escape(child.name)}\b")
        async for line in lines(process):
            self._screen.line(line if says_who.match(line) else f"{child.name} | {line}")

    # ---- all of them ---------------------------------------------------------------------------------------

    async def _announce(self) -> None:
        """Wait until the router can serve; then say where and how."""
        said = time.monotonic()
        while (missing := await self._missing()) is not None:
            self._screen.wait_for(f"waiting for {missing}")
            if not self._screen.is_terminal and time.monotonic() - said > _STILL_S:
                said = time.monotonic()
                self._screen.say(f"still waiting for {missing}")
            await asyncio.sleep(_POLL_S)
        self._screen.wait_for(None)
        self._was_ready = True
        self._screen.show(*self._summary())

    async def _missing(self) -> str | None:
        """What /ready still lacks; None: nothing."""
        try:
            async with asyncio.timeout(_ANSWER_S):
                status, body = await _get(self._config.host, self._config.port, "/ready")
        except (OSError, ValueError, TimeoutError):
            return "the router"
        return None if status == 200 else missing_instances(body, {child.says[0] for child in self._config.children})

    def _summary(self) -> Iterator[str | Table]:
        config = self._config
        host = f"[{config.host}]" if ":" in config.host else config.host
        address = f"http://{host}:{config.port}"
        table = Table("process", "pid", "role", "tp", "cores", box=None, pad_edge=False)
        for child in config.children:
            process = self._living.get(child.name)
            table.add_row(child.name, str(process.pid) if process else "", *child.says)
        yield f"ready: {config.model} at {address} after {time.monotonic() - self._began:.1f} s"
        yield table
        question = '{"role": "user", "content": "What is the capital of France?"}'
        key = f'-H "Authorization: Bearer $(head -1 {config.api_key_file})" ' if config.api_key_file else ""
        yield f"try    curl {address}/v1/chat/completions {key}-H 'Content-Type: application/json' \\"
        yield f'         -d \'{{"model": "{config.model}", "messages": [{question}], "temperature": 0}}\''
        yield f"stop   Ctrl-C, or kill {os.getpid()}"


def missing_instances(body: str, ours: set[str]) -> str:
    """Of /ready's answer: the roles that no living instance has, or why those that live cannot serve. A colocated one,
    where we keep but such, has both roles."""
    try:
        said = json.loads(body)
        missing = [role if role in ours else Role.COLOCATED.value for role in said["missing"]]
        roles = " and ".join(f"a {role} instance" for role in dict.fromkeys(missing))
        return roles or str(said.get("reason", "instances"))
    except (ValueError, KeyError, TypeError):
        return "instances"


async def _get(host: str, port: int, path: str) -> tuple[int, str]:
    """Status and body of one HTTP request to our own router. Raises OSError or ValueError."""
    reader, writer = await asyncio.open_connection(host, port)
    try:
        writer.write(f"GET {path} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n".encode())
        head, _, body = (await reader.read(-1)).decode(errors="replace").partition("\r\n\r\n")
        return int(head.split(maxsplit=2)[1]) if head.startswith("HTTP/") else 0, body
    finally:
        writer.close()
