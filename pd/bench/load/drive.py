"""Sends the traffic and notes what comes back.

Rules
1. Open loop: what is due is sent, however many answers are still open; latencies count from when it was due.
2. Closed loop: so many conversations at once, the next when one has ended.
3. Stopped, it sends nothing more, leaves what is open, and what has ended is kept.
"""

from __future__ import annotations

import asyncio
import gc
import resource
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from pd.bench.load.asks import Ask, Conversation, Form, Prompt
from pd.bench.load.http import Exchange, Server
from pd.bench.load.outcome import INTERRUPTED, Outcome
from pd.bench.load.reading import Reading

Count = Callable[[str], int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """`arrivals` in order, a conversation each; or `concurrency`, and then the times are not looked at. One run's."""

    arrivals: Iterable[tuple[float, Conversation]]
    concurrency: int | None = None
    timeout_s: float = 600.0
    duration_s: float | None = None  # of sending, in a closed loop
    count: Count | None = None  # a tokenizer of our own, to check the server's counts


class Live:
    """Counts for who looks on."""

    def __init__(self) -> None:
        self.outcomes: list[Outcome] = []  # in the order they were sent
        self.num_ended = 0
        self.num_failed = 0
        self.late_s = 0.0  # the largest so far
        self.open: set[Reading] = set()
        self.on_end: Callable[[Outcome], None] | None = None
        self._num_tokens = 0

    @property
    def num_tokens(self) -> int:
        """Chunks so far; of ended answers the server's count."""
        return self._num_tokens + sum(len(reading.chunks) for reading in self.open)

    def begin(self, outcome: Outcome, reading: Reading) -> None:
        self.outcomes.append(outcome)
        self.open.add(reading)
        self.late_s = max(self.late_s, outcome.late_s or 0.0)

    def end(self, outcome: Outcome, reading: Reading) -> None:
        self.open.discard(reading)
        self.num_ended += 1
        self.num_failed += outcome.error not in (None, INTERRUPTED)
        self._num_tokens += outcome.num_tokens
        if self.on_end is not None:
            self.on_end(outcome)


class Drive:
    """One run against one server."""

    def __init__(self, server: Server, form: Form, traffic: Traffic, *, headers: str = "") -> None:
        """`headers`: further ones of every request, ended by CRLF each."""
        self.live = Live()
        self.start = 0.0  # of the run's clock, in seconds of time.perf_counter
        self._server = server
        self._form = form
        self._traffic = traffic
        self._headers = headers
        self._stopped = asyncio.Event()

    def stop(self) -> None:
        self._stopped.set()

    def now(self) -> float:
        return time.perf_counter() - self.start

    async def run(self) -> float:
        """Send everything and wait for all answers, or until stopped. Returns the run's seconds."""
        allow_connections()
        gc.collect()
        gc.freeze()  # prompts are many and live on: a collection that walks them all would make us late
        self.start = time.perf_counter()
        sending = asyncio.create_task(self._closed() if self._traffic.concurrency else self._open())
        stopped = asyncio.create_task(self._stopped.wait())
        try:
            await asyncio.wait((sending, stopped), return_when=asyncio.FIRST_COMPLETED)
            if sending.done():
                sending.result()
            return self.now()
        finally:
            for task in (sending, stopped):
                task.cancel()
            await asyncio.gather(sending, stopped, return_exceptions=True)
            gc.unfreeze()

    async def _open(self) -> None:
        async with asyncio.TaskGroup() as group:
            for number, (due_s, conversation) in enumerate(self._traffic.arrivals):
                first = self._payload(conversation.asks[0])  # made before it is due
                if (wait_s := due_s - self.now()) > 0:
                    await asyncio.sleep(wait_s)
                group.create_task(self._converse(number, conversation, due_s, first))

    async def _closed(self) -> None:
        waiting = enumerate(conversation for _, conversation in self._traffic.arrivals)
        until_s = self._traffic.duration_s

        async def user() -> None:
            for number, conversation in waiting:
                if until_s is not None and self.now() >= until_s:
                    return
                await self._converse(number, conversation, self.now(), self._payload(conversation.asks[0]))

        async with asyncio.TaskGroup() as group:
            for _ in range(self._traffic.concurrency or 1):
                group.create_task(user())

    async def _converse(self, number: int, conversation: Conversation, due_s: float, first: bytes) -> None:
        """All turns; a failed one ends the conversation."""
        said: list[tuple[Prompt, str]] = []
        for turn, ask in enumerate(conversation.asks):
            if turn:
                due_s = self.now() + ask.think_s
                await asyncio.sleep(ask.think_s)
            outcome = Outcome(len(self.live.outcomes), due_s, conversation=number, turn=turn, num_asked=ask.num_answer)
            text = await self._ask(outcome, self._payload(ask, said) if turn else first)
            if outcome.error is not None:
                return
            said.append((ask.prompt, text))

    async def _ask(self, outcome: Outcome, payload: bytes) -> str:
        """Send, and fill `outcome` in. Returns the answer's text."""
        reading = Reading()
        exchange = Exchange(reading)
        outcome.sent_s = self.now()
        outcome.error = INTERRUPTED  # until it has ended
        self.live.begin(outcome, reading)
        try:
            await self._server.send(payload, exchange, timeout_s=self._traffic.timeout_s)
            outcome.error, outcome.detail = _verdict(exchange, reading)
        finally:
            self._fill(outcome, reading)
            self.live.end(outcome, reading)
        return "".join(reading.texts)

    def _fill(self, outcome: Outcome, reading: Reading) -> None:
        outcome.chunks_s = [moment - self.start for moment in reading.chunks]
        outcome.num_prompt, outcome.num_answer = reading.num_prompt, reading.num_answer
        outcome.num_chars = sum(map(len, reading.texts))
        outcome.finish = reading.finish
        outcome.timings = reading.timings
        if self._traffic.count is not None and reading.texts:
            outcome.num_text = self._traffic.count("".join(reading.texts))

    def _payload(self, ask: Ask, said: Sequence[tuple[Prompt, str]] = ()) -> bytes:
        return self._server.payload("POST", self._form.path, self._form.body(ask, said), self._headers)


def _verdict(exchange: Exchange, reading: Reading) -> tuple[str | None, str]:
    """The kind of error and its detail; None for an answer that is whole."""
    if exchange.fault is not None:
        return exchange.fault
    if exchange.status != 200:
        return f"status {exchange.status}", bytes(exchange.body[:300]).decode(errors="replace")
    if reading.fault is not None:
        return reading.fault
    if not reading.chunks:
        return "empty answer", "the stream ended without a token"
    if not reading.has_end and reading.finish is None:
        return "cut short", "the stream ended without finish_reason or [DONE]"
    return None, ""


def allow_connections() -> None:
    """Raise this process's limit of open files as far as it may: a stream is a socket."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
