"""`pd bench router`: what our router costs a request and a token, beside the same answers without it.

Behind the router stands an instance that computes nothing; beside it an HTTP server that says the same at once. Both
are driven by the same client, one after the other, so what differs is the router. Its CPU time is read beside, since
that is what a shared machine does not blur.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from dataclasses import asdict, dataclass

import uvloop
from rich.table import Table

from pd.bench.compare.shape import Running, Shape, free_port, running
from pd.bench.environment import environment, in_words
from pd.bench.lines import FORMAT, Lines, written
from pd.bench.load.asks import Ask, Conversation, Form
from pd.bench.load.drive import Drive, Traffic
from pd.bench.load.goals import Goals
from pd.bench.load.http import Server
from pd.bench.load.metrics import Summary, summarize
from pd.bench.load.tables import console
from pd.bench.options import RouterOptions
from pd.runtime.checkpoint import resolve
from pd.runtime.config import ConfigError
from pd.runtime.roles.process import die_with

_CONCURRENCY = 64
_IDLE_RATE = 20.0  # requests/s at which nothing waits
_IDLE_REQUESTS = 60
_PROMPT = tuple(range(100, 228))
_TICKS_S = 1.0 / os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class Measured:
    what: str  # requests | streams | idle
    summary: Summary
    cpu_s: float  # of the server's process


def router(options: RouterOptions) -> int:
    """Run the command. Raises ConfigError for wrong use."""
    faults = [
        f"--{name.replace('_', '-')} is {value}, must be above 0"
        for name in ("requests", "streams", "tokens", "step_ms")
        if (value := getattr(options, name)) <= 0
    ]
    if faults:
        raise ConfigError(*faults, hint="pd bench router --help")
    model = str(resolve(options.model))
    try:
        with written(options.output) as lines, asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(_run(options, model, lines))
    except OSError as error:
        reason = error.strerror or str(error)
        raise ConfigError(f"cannot write {options.output}: {reason}", hint="--output takes a file") from error


async def _run(options: RouterOptions, model: str, lines: Lines) -> int:
    out, found = console(), environment()
    lines.put("router", format=FORMAT, options=asdict(options), environment=found)
    async with _direct(options) as server:
        direct = await _measure(server, options, lines, "direct")
    async with _routed(options, model) as server:
        routed = await _measure(server, options, lines, "router")
    out.print(in_words(found), soft_wrap=True)
    out.print(_table(direct, routed))
    for one in (*direct, *routed):
        if one.summary.errors:
            out.print(f"failed: {one.what}: {one.summary.errors}")
    return 0


@contextlib.asynccontextmanager
async def _direct(options: RouterOptions) -> AsyncIterator[Running]:
    words = (sys.executable, "-m", "pd.bench.routing.null", "http", "{port}", str(options.step_ms / 1e3))
    async with running(Shape("null", words, _cores()), "") as server:
        yield server


@contextlib.asynccontextmanager
async def _routed(options: RouterOptions, model: str) -> AsyncIterator[Running]:
    """The router, and an instance that waits for it: /ready is 200 when they have met."""
    meeting, parent = f"tcp://127.0.0.1:{free_port()}", os.getpid()
    words = (sys.executable, "-m", "pd", "launch", "--role=router", "--model={model}", "--served-name=null")
    shape = Shape("router", (*words, "--port={port}", f"--router={meeting}"), _cores())
    command = [sys.executable, "-m", "pd.bench.routing.null", "instance", meeting, "null", str(options.step_ms / 1e3)]
    instance = subprocess.Popen(command, stdin=subprocess.DEVNULL, preexec_fn=lambda: die_with(parent))
    try:
        async with running(shape, model) as server:
            yield server
    finally:
        instance.kill()
        instance.wait()


async def _measure(server: Running, options: RouterOptions, lines: Lines, name: str) -> list[Measured]:
    idle = Traffic(arrivals=_asks(_IDLE_REQUESTS, 1, every_s=1 / _IDLE_RATE))
    many = Traffic(arrivals=_asks(options.requests, 1), concurrency=_CONCURRENCY)
    long = Traffic(arrivals=_asks(options.streams, options.tokens), concurrency=options.streams)
    warm = Traffic(arrivals=_asks(50, 2), concurrency=8)
    found = []
    for what, traffic in (("warm", warm), ("idle", idle), ("requests", many), ("streams", long)):
        client, before = Server(server.url), _cpu_s(server.pid)
        drive = Drive(client, Form(model="null", chat=False, ignore_eos=True, extra={}), traffic)
        try:
            seconds = await drive.run()
        finally:
            client.close()
        measured = Measured(what, summarize(drive.live.outcomes, Goals(), seconds=seconds), _cpu_s(server.pid) - before)
        if what != "warm":
            found.append(measured)
            lines.put("load", server=name, what=what, cpu_s=measured.cpu_s, summary=measured.summary.json())
    return found


def _asks(num: int, num_tokens: int, *, every_s: float = 0.0) -> list[tuple[float, Conversation]]:
    return [(index * every_s, Conversation((Ask(_PROMPT, num_tokens),))) for index in range(num)]


def _table(direct: list[Measured], routed: list[Measured]) -> Table:
    table = Table(box=None, pad_edge=False)
    for heading in ("", "direct", "through the router"):
        table.add_column(heading, justify="left" if not heading else "right")
    sides = [{one.what: one for one in side} for side in (direct, routed)]
    table.add_row("requests/s, 64 at once", *(f"{side['requests'].summary.requests_s:.0f}" for side in sides))
    table.add_row("CPU µs a request", *(_each(side["requests"], "num_ok") for side in sides))
    table.add_row("streamed tokens/s", *(f"{side['streams'].summary.answer_tokens_s:.0f}" for side in sides))
    table.add_row("CPU µs a streamed token", *(_each(side["streams"], "answer_tokens") for side in sides))
    table.add_row("ITL p50 / p99 of the streams, ms", *(_pair(side["streams"].summary) for side in sides))
    table.add_row("TTFT p50, idle, ms", *(f"{side['idle'].summary.ttft.p50 * 1e3:.2f}" for side in sides))
    added = sides[1]["idle"].summary.ttft.p50 - sides[0]["idle"].summary.ttft.p50
    table.add_row("  of that added by the router", "", f"{added * 1e3:.2f}")
    return table


def _each(one: Measured, field: str) -> str:
    return f"{one.cpu_s / max(1, getattr(one.summary, field)) * 1e6:.0f}"


def _pair(found: Summary) -> str:
    return f"{found.itl.p50 * 1e3:.1f} / {found.itl.p99 * 1e3:.1f}"


def _cores() -> tuple[int, ...]:
    return tuple(sorted(os.sched_getaffinity(0)))


def _cpu_s(pid: int) -> float:
    """User and system time of a process so far. Linux only, as all that measures here."""
    with open(f"/proc/{pid}/stat") as file:
        fields = file.read().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) * _TICKS_S
