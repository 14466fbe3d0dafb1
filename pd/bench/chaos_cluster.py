"""A cluster to break: a router and instances as processes, each instance's link to the router through a wire of ours.

What ends is started again after half a second, as `pd serve` does. All end with `close`.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp

from pd.runtime.roles.process import die_with

_AGAIN_S = 0.5
_END_S = 8.0
_ANSWER_S = 5.0


class Wire:
    """Carries one instance's connection to the router, and can be cut."""

    def __init__(self, port: int) -> None:
        """`port`: the router's."""
        self.address = ""
        self._port = port
        self._is_cut = False
        self._writers: set[asyncio.StreamWriter] = set()
        self._server: asyncio.Server | None = None

    async def open(self) -> None:
        self._server = await asyncio.start_server(self._carry, "127.0.0.1", 0)
        self.address = f"tcp://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    def cut(self) -> None:
        """End what is connected; let nothing new through."""
        self._is_cut = True
        for writer in self._writers:
            writer.transport.abort()

    def mend(self) -> None:
        self._is_cut = False

    def close(self) -> None:
        self.cut()
        if self._server is not None:
            self._server.close()

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._is_cut:
            writer.transport.abort()
            return
        try:
            there, back = await asyncio.open_connection("127.0.0.1", self._port)
        except OSError:
            writer.transport.abort()
            return
        both = {writer, back}
        self._writers |= both
        try:
            await asyncio.gather(_pipe(reader, back), _pipe(there, writer))
        except OSError:
            pass
        finally:
            self._writers -= both
            for one in both:
                one.transport.abort()


async def _pipe(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(1 << 16):
        writer.write(data)
        await writer.drain()
    raise ConnectionResetError("one end is gone")


@dataclass(slots=True)
class Member:
    """One process that is kept alive. `broken`: what we are doing to it just now."""

    name: str
    role: str
    command: list[str]
    wire: Wire | None = None
    process: subprocess.Popen[bytes] | None = None
    broken: str | None = None
    num_lives: int = 0

    def ranks(self) -> list[int]:
        """Process ids of its ranks."""
        if self.process is None:
            return []
        return [pid for pid in _children(self.process.pid) if b"pd.runtime.roles.rank" in _command_line(pid)]

    def tree(self) -> list[int]:
        return [] if self.process is None else [self.process.pid, *self.ranks()]


@dataclass(slots=True)
class Cluster:
    """Processes of one model; output goes to a file a process in `logs`."""

    model: str
    logs: Path
    options: tuple[str, ...]
    router_options: tuple[str, ...] = ()
    http: int = field(default_factory=lambda: _free_port())
    meeting: int = field(default_factory=lambda: _free_port())
    members: list[Member] = field(default_factory=list)
    _keepers: list[asyncio.Task[None]] = field(default_factory=list)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.http}"

    async def start(self, *, num_prefill: int, num_decode: int) -> None:
        self._add("router", "router", f"tcp://127.0.0.1:{self.meeting}", f"--port={self.http}", *self.router_options)
        for role, count in (("prefill", num_prefill), ("decode", num_decode)):
            for number in range(count):
                wire = Wire(self.meeting)
                await wire.open()
                name = f"{role}-{number}"
                self._add(name, role, wire.address, f"--name={name}", *self.options, wire=wire)
        self._keepers = [asyncio.create_task(self._keep(member)) for member in self.members]

    @property
    def router(self) -> Member:
        return self.members[0]

    @property
    def instances(self) -> list[Member]:
        return [member for member in self.members if member.wire is not None]

    async def state(self, session: aiohttp.ClientSession) -> dict[str, dict[str, object]]:
        """The router's instances by name; empty while it does not answer."""
        try:
            async with asyncio.timeout(_ANSWER_S), session.get(f"{self.url}/state") as answer:
                found = (await answer.json())["instances"]
        except (OSError, TimeoutError, aiohttp.ClientError, ValueError, KeyError):
            return {}
        return {instance["name"]: instance for instance in found}

    async def close(self) -> None:
        """End all: TERM, then KILL."""
        for keeper in self._keepers:
            keeper.cancel()
        await asyncio.gather(*self._keepers, return_exceptions=True)
        for number, wait_s in ((signal.SIGTERM, _END_S), (signal.SIGKILL, _END_S)):
            for member in self.members:
                for pid in member.tree():
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGCONT)
                if member.process is not None and member.process.poll() is None:
                    os.killpg(member.process.pid, number)
            until = asyncio.get_running_loop().time() + wait_s
            while any(m.process is not None and m.process.poll() is None for m in self.members):
                if asyncio.get_running_loop().time() > until:
                    break
                await asyncio.sleep(0.05)
        for member in self.members:
            if member.wire is not None:
                member.wire.close()

    def _add(self, name: str, role: str, router: str, *options: str, wire: Wire | None = None) -> None:
        command = [sys.executable, "-P", "-m", "pd", "launch", f"--role={role}", f"--model={self.model}"]
        self.members.append(Member(name, role, [*command, f"--router={router}", *options], wire))

    async def _keep(self, member: Member) -> None:
        parent = os.getpid()
        while True:
            with open(self.logs / f"{member.name}.log", "ab") as log:
                member.process = subprocess.Popen(
                    member.command,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                    preexec_fn=lambda: die_with(parent),
                )
            member.num_lives += 1
            while member.process.poll() is None:
                await asyncio.sleep(0.05)
            await asyncio.sleep(_AGAIN_S)


def _children(pid: int) -> list[int]:
    try:
        text = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    except OSError:
        return []
    return [int(word) for word in text.split()]


def _command_line(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])
