"""From submitted requests to one HTTP answer, whole or as a stream of events.

Rules
1. Every submitted request is ended by the router or abandoned here, whatever happens: `Run` holds them.
2. The status line of a stream waits for the first event, so a refusal still has its own status.
3. One choice that fails ends them all: an answer with a choice missing is none.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from types import TracebackType
from typing import Self

from pd.runtime.core.events import End, Submit, Timings
from pd.runtime.front.answer import Answer, Delta, TokenProb
from pd.runtime.front.asgi import EVENT_STREAM, Exchange, Headers
from pd.runtime.front.door import Door, Stream
from pd.runtime.front.errors import RequestError, from_end
from pd.runtime.front.shapes import DONE, Shape, Usage, error_event


class Choice:
    """One answer being made."""

    __slots__ = ("answer", "cached_tokens", "door", "index", "is_open", "stream", "submit", "timings")

    def __init__(self, door: Door, submit: Submit, *, index: int, answer: Answer) -> None:
        """Submits it."""
        self.door = door
        self.submit = submit
        self.index = index
        self.answer = answer
        self.cached_tokens = 0
        self.timings: Timings | None = None
        self.is_open = True
        self.stream: Stream = door.submit(submit)

    async def next(self) -> Delta:
        """Wait for what comes next. Raises RequestError if the router gave the request up."""
        event = await self.stream.next()
        if isinstance(event, End):
            self.is_open = False
            raise from_end(event)
        if event.cached_tokens is not None:
            self.cached_tokens = event.cached_tokens
        if event.timings is not None:
            self.timings = event.timings
        delta = self.answer.take(event)
        if delta.finish is not None:
            if event.finish is None:
                self.abandon("a stop string was found", ending=delta.finish)
            self.is_open = False
        return delta

    async def whole(self) -> Delta:
        """All of it as one delta."""
        texts: list[str] = []
        probs: list[TokenProb] = []
        ids: list[int] = []
        while True:
            delta = await self.next()
            texts.append(delta.text)
            probs += delta.logprobs
            ids += delta.token_ids or ()
            if delta.finish is not None:
                kept = None if delta.token_ids is None else tuple(ids)
                return Delta("".join(texts), tuple(probs), delta.finish, kept)

    def abandon(self, reason: str, *, ending: str = "abandoned") -> None:
        if self.is_open:
            self.is_open = False
            self.door.abandon(self.submit.request_id, reason, ending=ending)


class Run:
    """The choices of one HTTP request. Leaving the context abandons those still open."""

    def __init__(self, door: Door, *, tells_timings: bool = False) -> None:
        """`tells_timings`: the usage says where the first choice's time went."""
        self._door = door
        self.tells_timings = tells_timings
        self.choices: list[Choice] = []

    def __enter__(self) -> Self:
        return self

    def submit(self, submit: Submit, answer: Answer) -> None:
        """In the order of the choices' indices."""
        self.choices.append(Choice(self._door, submit, index=len(self.choices), answer=answer))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        reason = "the client left" if kind is asyncio.CancelledError else "another choice failed"
        for choice in self.choices:
            choice.abandon(reason)

    def usage(self, num_choices: int) -> Usage:
        """A prompt counts once, however many of its answers (`num_choices`) were asked for."""
        firsts = self.choices[::num_choices]
        return Usage(
            prompt_tokens=sum(len(choice.submit.tokens) for choice in firsts),
            completion_tokens=sum(choice.answer.num_tokens for choice in self.choices),
            cached_tokens=sum(choice.cached_tokens for choice in firsts),
            timings=self.choices[0].timings if self.tells_timings else None,
        )


async def reply_whole(exchange: Exchange, run: Run, shape: Shape, *, num_choices: int, headers: Headers) -> None:
    """Answer when every choice has ended. Raises RequestError if one failed."""
    deltas: list[Delta] = [Delta("", (), None)] * len(run.choices)

    async def collect(choice: Choice) -> None:
        deltas[choice.index] = await choice.whole()

    await _all([collect(choice) for choice in run.choices])
    await exchange.reply(200, shape.whole(deltas, run.usage(num_choices)), headers=headers)


async def reply_stream(
    exchange: Exchange, run: Run, shape: Shape, *, num_choices: int | None, headers: Headers
) -> None:
    """Answer as it comes. `num_choices` None: the client did not ask for usage.

    Raises RequestError only while nothing is sent; later the error is the stream's last event.
    """
    start = EVENT_STREAM + headers
    try:
        await _all([_pump(exchange, choice, shape, start) for choice in run.choices])
    except RequestError as error:
        if exchange.status is None:
            raise
        await exchange.write(error_event(error.error()), more=False)
        return
    last = b"" if num_choices is None else shape.usage(run.usage(num_choices))
    await exchange.write(last + DONE, more=False)


async def _pump(exchange: Exchange, choice: Choice, shape: Shape, start: Headers) -> None:
    """Its first event, then an event for every delta that says something, one write each."""
    opening = shape.opening(choice.index)
    while choice.is_open:
        delta = await choice.next()
        if exchange.status is None:
            await exchange.start_once(200, start)
        event = shape.chunk(choice.index, delta) if delta else b""
        if opening or event:
            await exchange.write(opening + event)
            opening = b""


async def _all(works: Sequence[Coroutine[None, None, None]]) -> None:
    """Run all to their ends, or until one raises RequestError: the others are cancelled and it is raised."""
    if len(works) == 1:
        await works[0]
        return
    try:
        async with asyncio.TaskGroup() as group:
            for work in works:
                group.create_task(work)
    except BaseExceptionGroup as errors:
        refused, others = errors.split(RequestError)
        if refused is None or others is not None:
            raise
        raise refused.exceptions[0] from errors
