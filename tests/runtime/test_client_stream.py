"""What waits for a client: read in order, whole, and together."""

from __future__ import annotations

import asyncio
import random

from pd.runtime.core.events import Emit, End, Timings
from pd.runtime.roles.router import ClientStream
from pd.runtime.wire.values import Finish, Token


async def test_tokens_that_wait_together_are_read_together() -> None:
    stream = ClientStream(100)
    stream.put(Emit("r", 3, (Token(1), Token(2)), None, cached_tokens=16))
    stream.put(Emit("r", 5, (Token(3),), None))
    timings = Timings(0.1, 0.2, 0.3)
    stream.put(Emit("r", 6, (Token(4),), Finish.LENGTH, timings=timings))
    read = await stream.next()
    assert read == Emit("r", 3, (Token(1), Token(2), Token(3), Token(4)), Finish.LENGTH, cached_tokens=16)
    assert isinstance(read, Emit) and read.timings == timings


async def test_an_end_comes_after_the_tokens_before_it() -> None:
    stream = ClientStream(100)
    emit, end = Emit("r", 0, (Token(1),), None), End("r", 503, "why")
    stream.put(emit)
    stream.put(end)
    assert [await stream.next(), await stream.next()] == [emit, end]


async def test_every_token_is_read_once_in_order_whoever_is_faster() -> None:
    seed = random.randrange(1 << 30)
    dice = random.Random(seed)
    stream = ClientStream(1000)

    async def write() -> None:
        for position in range(300):
            stream.put(Emit("r", position, (Token(position),), Finish.STOP if position == 299 else None))
            for _ in range(dice.choice((0, 0, 1, 2))):
                await asyncio.sleep(0)

    writing = asyncio.create_task(write())
    read: list[int] = []
    while True:
        item = await stream.next()
        assert isinstance(item, Emit) and item.position == len(read), f"seed {seed}"
        read += [token.id for token in item.tokens]
        if item.finish is not None:
            break
        for _ in range(dice.choice((0, 1, 5))):
            await asyncio.sleep(0)
    await writing
    assert read == list(range(300)), f"seed {seed}"


async def test_what_lies_too_far_behind_is_full_until_it_is_read() -> None:
    stream = ClientStream(2)
    for position in range(3):
        assert not stream.is_full
        stream.put(Emit("r", position, (Token(position),), None))
    assert stream.is_full
    await stream.next()
    assert not stream.is_full
