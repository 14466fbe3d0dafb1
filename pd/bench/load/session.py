"""One measured run against one server: is it there, warm-up, the run itself with its progress, results."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import Callable, Sized
from dataclasses import dataclass

import msgspec
from rich.console import Console

from pd.bench.lines import Lines
from pd.bench.load import datasets
from pd.bench.load.asks import Form
from pd.bench.load.drive import Drive, Live, Traffic
from pd.bench.load.goals import Goals
from pd.bench.load.http import Server
from pd.bench.load.metrics import Summary, summarize
from pd.bench.load.outcome import Outcome
from pd.bench.load.plan import Wanted
from pd.bench.load.watch import Watch
from pd.bench.specs import Spec
from pd.runtime.config import ConfigError

_REDRAW_S = 0.25
_PLAIN_S = 10.0  # where standard error is no terminal
_WARM_INPUT, _WARM_OUTPUT = "64", "8"


@dataclass(frozen=True, slots=True)
class Ran:
    summary: Summary
    outcomes: list[Outcome]
    was_interrupted: bool


class Session:
    """A server that was found to serve the model. Close it."""

    def __init__(self, server: Server, model: str) -> None:
        self.server = server
        self.model = model

    def close(self) -> None:
        self.server.close()

    async def warm_up(self, wanted: Wanted) -> None:
        """Raises ConfigError if one fails: then the run would."""
        if not wanted.options.warmup:
            return
        settings = {"input": _WARM_INPUT, "output": _WARM_OUTPUT, "spread": "0", "vocab": str(wanted.vocab)}
        made = datasets.made_up(Spec("random", None, settings), wanted.options.seed + 1)
        arrivals = tuple((0.0, next(made)) for _ in range(wanted.options.warmup))
        traffic = Traffic(arrivals=arrivals, concurrency=min(4, len(arrivals)), timeout_s=wanted.options.timeout)
        drive = Drive(self.server, wanted.form(self.model), traffic)
        await drive.run()
        for outcome in drive.live.outcomes:
            if outcome.error is not None:
                raise ConfigError(
                    f"a warm-up request failed: {outcome.error}: {outcome.detail.strip()}",
                    hint="mend that, or --warmup 0 to run all the same",
                )

    async def run(self, form: Form, traffic: Traffic, goals: Goals, lines: Lines, *, say: Say) -> Ran:
        """Ctrl-C ends it early: what has ended is kept."""
        drive = Drive(self.server, form, traffic, headers=TIMINGS)
        drive.live.on_end = lambda outcome: put(lines, outcome)
        watch = Watch(self.server, drive.now, lambda sample: lines.put("sample", **sample))
        loop = asyncio.get_running_loop()
        was_interrupted = False

        def interrupt() -> None:
            nonlocal was_interrupted
            if was_interrupted:
                os._exit(130)
            was_interrupted = True
            drive.stop()

        loop.add_signal_handler(signal.SIGINT, interrupt)
        others = [asyncio.create_task(watch.run()), asyncio.create_task(_progress(drive, traffic, say))]
        try:
            seconds = await drive.run()
        finally:
            loop.remove_signal_handler(signal.SIGINT)
            for task in others:
                task.cancel()
            await asyncio.gather(*others, return_exceptions=True)
        summary = summarize(drive.live.outcomes, goals, seconds=seconds)
        lines.put("summary", **summary.json(), was_interrupted=was_interrupted)
        return Ran(summary, drive.live.outcomes, was_interrupted)


Say = Callable[[str], None]
TIMINGS = "x-pd-timings: 1\r\n"
"""Asks our router where a request's time went; others do not know it."""


async def connect(url: str, model: str | None) -> Session:
    """Raises ConfigError where no server answers or it does not serve the model (None: its first)."""
    try:
        server = Server(url, key=os.environ.get("OPENAI_API_KEY"))
    except ValueError as error:
        raise ConfigError(str(error), hint="--url is the address before /v1") from error
    answer = await server.fetch("GET", "/v1/models")
    try:
        if answer.fault is not None:
            raise ConfigError(
                f"no server answers at {server.url}: {answer.fault[1]}",
                hint="start one with `pd serve`, or give another --url",
            )
        if answer.status != 200:
            raise ConfigError(
                f"{server.url}/v1/models answers status {answer.status}", hint="--url is the address before /v1"
            )
        served = _models(bytes(answer.body))
        if not served:
            raise ConfigError(f"{server.url} serves no model", hint="wait until it is ready: /v1/models must name one")
        if model is not None and model not in served:
            raise ConfigError(
                f"the model {model!r} is not served at {server.url}; it serves {', '.join(served)}",
                hint=f"--model {served[0]}",
            )
    except ConfigError:
        server.close()
        raise
    return Session(server, model or served[0])


class _Model(msgspec.Struct):
    id: str


class _Models(msgspec.Struct):
    data: list[_Model] = []


def _models(body: bytes) -> list[str]:
    try:
        return [model.id for model in msgspec.json.decode(body, type=_Models).data]
    except (msgspec.DecodeError, msgspec.ValidationError):
        return []


async def _progress(drive: Drive, traffic: Traffic, say: Say) -> None:
    """Rates are of the last moments, so that a stall is seen."""
    marks: list[tuple[float, int, int]] = []
    num_arrivals = f" of {len(traffic.arrivals)}" if isinstance(traffic.arrivals, Sized) else ""
    while True:
        live, now = drive.live, drive.now()
        marks.append((now, live.num_ended, live.num_tokens))
        marks = marks[-12:]
        say(_line(live, now, marks, num_arrivals))
        await asyncio.sleep(_REDRAW_S)


def _line(live: Live, now: float, marks: list[tuple[float, int, int]], num_arrivals: str) -> str:
    since, ended, tokens = marks[0]
    span = max(now - since, 1e-9)
    failed = f", {live.num_failed} failed" if live.num_failed else ""
    late = f", client late {live.late_s * 1e3:.0f} ms" if live.late_s > 0.01 else ""
    requests_s, tokens_s = (live.num_ended - ended) / span, max(0, live.num_tokens - tokens) / span
    return (
        f"{now:5.0f} s  {live.num_ended}{num_arrivals} ended, {len(live.open)} open{failed}  "
        f"{requests_s:.1f} requests/s, {tokens_s:.0f} tokens/s{late}"
    )


def teller(console: Console, prefix: str = "") -> tuple[Say, Callable[[], None]]:
    """Shows one line that changes, on a terminal; elsewhere a line every ten seconds. And what ends it."""
    if console.is_terminal:
        status = console.status(prefix)
        status.start()
        return (lambda line: status.update(prefix + line)), status.stop
    last = time.monotonic()

    def say(line: str) -> None:
        nonlocal last
        if time.monotonic() - last >= _PLAIN_S:
            last = time.monotonic()
            sys.stderr.write(f"{prefix}{line}\n")

    return say, lambda: None


def put(lines: Lines, outcome: Outcome) -> None:
    """A request's line. Times to the microsecond."""
    lines.put(
        "request",
        index=outcome.index,
        conversation=outcome.conversation,
        turn=outcome.turn,
        due_s=round(outcome.due_s, 6),
        sent_s=None if outcome.sent_s is None else round(outcome.sent_s, 6),
        chunks_s=[round(moment, 6) for moment in outcome.chunks_s],
        num_asked=outcome.num_asked,
        num_prompt=outcome.num_prompt,
        num_answer=outcome.num_answer,
        num_text=outcome.num_text,
        num_chars=outcome.num_chars,
        finish=outcome.finish,
        error=outcome.error,
        detail=outcome.detail,
        timings=outcome.timings,
    )
