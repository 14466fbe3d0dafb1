"""What the HTTP front costs a streamed token: `python -m benchmarks.front [--streams 64] [--step-ms 10]`.

A real uvicorn server with uvloop streams to clients of another process; behind it stands a door that gives every
stream one token a step, as decode does. Told are CPU microseconds of the server's process a token, the best window
of 50 steps, since other processes share the machine; a loop of a million turns beside them says how fast this
machine is now. Taken apart: the same with an ASGI server that sends nothing, the pure part (detokenizing and writing
the event) alone, and the door alone (making the token, waking its reader), which is not the front's.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import socket
import sys
import time
from collections.abc import Iterator

import aiohttp
import uvicorn
import uvloop
from prometheus_client import CollectorRegistry
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from pd.runtime.core.events import Emit, End, Submit
from pd.runtime.front.answer import Answer
from pd.runtime.front.http import App, make_app
from pd.runtime.front.settings import FrontSettings
from pd.runtime.front.shapes import CompletionShape, Head
from pd.runtime.front.text import Text
from pd.runtime.wire.values import Finish, ModelCard, Role, Sampling, Token

WINDOW = 50
"""Steps; the first window is for warming up."""


class PacedStream:
    def __init__(self) -> None:
        self.events: asyncio.Queue[Emit | End] = asyncio.Queue()

    async def next(self) -> Emit | End:
        return await self.events.get()


class PacedDoor:
    """Gives every stream a token a step, once all have come."""

    def __init__(self, num_streams: int) -> None:
        self.streams: dict[str, PacedStream] = {}
        self.all_here = asyncio.Event()
        self._num_streams = num_streams

    def submit(self, request: Submit) -> PacedStream:
        stream = self.streams[request.request_id] = PacedStream()
        if len(self.streams) == self._num_streams:
            self.all_here.set()
        return stream

    def abandon(self, request_id: str, reason: str) -> None:
        raise AssertionError(f"{request_id} was abandoned: {reason}")

    def missing(self) -> tuple[Role, ...]:
        return ()

    def card(self) -> ModelCard | None:
        return ModelCard("bench", "", 256, 1 << 20)

    def state(self) -> dict[str, object]:
        return {}

    def step(self, step: int, finish: Finish | None) -> None:
        for name, stream in self.streams.items():
            stream.events.put_nowait(Emit(name, step, (Token(step % 94),), finish))


class Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def byte_text() -> Text:
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: index for index, letter in enumerate(letters)}, merges=[]))
    tokenizer.decoder = decoders.ByteLevel()
    return Text(tokenizer, eos_token_ids=(), template=None)


async def run_steps(door: PacedDoor, num_steps: int, *, step_s: float) -> float:
    """The least CPU microseconds a token of any window but the first."""
    await door.all_here.wait()
    spent: list[float] = []
    for first in range(0, num_steps, WINDOW):
        begun = time.process_time()
        for step in range(first, first + WINDOW):
            door.step(step, Finish.LENGTH if step == num_steps - 1 else None)
            await asyncio.sleep(step_s)
        spent.append(time.process_time() - begun)
    return min(spent[1:]) / (WINDOW * len(door.streams)) * 1e6


async def served_us(num_streams: int, num_steps: int, *, step_s: float, stop: bool) -> float:
    """Over HTTP."""
    door = PacedDoor(num_streams)
    listener = socket.create_server(("127.0.0.1", 0), backlog=num_streams)
    server = Server(uvicorn.Config(app(door), lifespan="off", ws="none", access_log=False, log_config=None))
    serving = asyncio.create_task(server.serve([listener]))
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    arguments = [sys.executable, "-m", "benchmarks.front", "--client", url, "--streams", str(num_streams)]
    clients = await asyncio.create_subprocess_exec(*arguments, *(["--stop"] if stop else []))
    best = await run_steps(door, num_steps, step_s=step_s)
    assert await clients.wait() == 0
    server.should_exit = True
    await serving
    return best


async def unsent_us(num_streams: int, num_steps: int, *, step_s: float, stop: bool) -> float:
    """With a server that sends nothing."""
    door = PacedDoor(num_streams)
    served = app(door)

    async def client() -> None:
        requests = [{"type": "http.request", "body": body(stop=stop)}]

        async def receive() -> dict[str, object]:
            return requests.pop() if requests else await asyncio.get_running_loop().create_future()

        async def send(message: object) -> None:
            pass

        await served({"type": "http", "method": "POST", "path": "/v1/completions", "headers": []}, receive, send)

    clients = [asyncio.create_task(client()) for _ in range(num_streams)]
    best = await run_steps(door, num_steps, step_s=step_s)
    await asyncio.gather(*clients)
    return best


async def door_us(num_streams: int, num_steps: int, *, step_s: float) -> float:
    """With readers that do nothing."""
    door = PacedDoor(num_streams)

    async def read(stream: PacedStream) -> None:
        while not isinstance(event := await stream.next(), End) and event.finish is None:
            pass

    streams = [door.submit(Submit(str(index), (1,), Sampling(1), 1.0)) for index in range(num_streams)]
    readers = [asyncio.create_task(read(stream)) for stream in streams]
    best = await run_steps(door, num_steps, step_s=step_s)
    await asyncio.gather(*readers)
    return best


def app(door: PacedDoor) -> App:
    registry = CollectorRegistry()
    return make_app(door, byte_text(), settings=FrontSettings(), metrics_text=lambda: b"", registry=registry)


def body(*, stop: bool) -> bytes:
    asked = {"prompt": [1], "stream": True, "max_tokens": 100_000}
    return json.dumps(asked | ({"stop": ["\n\n", "END."]} if stop else {})).encode()


async def read_streams(url: str, num_streams: int, *, stop: bool) -> None:
    async def read(client: aiohttp.ClientSession) -> None:
        headers = {"content-type": "application/json"}
        async with client.post("/v1/completions", data=body(stop=stop), headers=headers) as reply:
            last = b""
            async for part in reply.content.iter_any():
                last = part
            assert last.endswith(b"[DONE]\n\n")

    async with aiohttp.ClientSession(url, connector=aiohttp.TCPConnector(limit=0)) as client:
        await asyncio.gather(*(read(client) for _ in range(num_streams)))


def pure_us(*, stop: bool) -> float:
    """Answer and Shape alone."""
    text = byte_text()
    answer = Answer(text.detokenizer((1,), skip_special_tokens=True), stop=("\n\n", "END.") if stop else ())
    shape = CompletionShape(Head("cmpl-0", 0, "bench"), text.spell, echoes=[""])
    emits = [Emit("", step, (Token(step % 94),), None) for step in range(3000)]
    spent: list[float] = []
    for _ in range(30):
        begun = time.process_time()
        for emit in emits:
            shape.chunk(0, answer.take(emit))
        spent.append(time.process_time() - begun)
    return min(spent) / len(emits) * 1e6


def million_turns_ms() -> float:
    begun = time.process_time()
    for _ in range(1_000_000):
        pass
    return (time.process_time() - begun) * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--step-ms", type=float, default=10.0)
    parser.add_argument("--stop", action="store_true", help="with two stop strings")
    parser.add_argument("--client", help="be the clients of this address")
    asked = parser.parse_args()
    if asked.client:
        uvloop.run(read_streams(asked.client, asked.streams, stop=asked.stop))
        return
    num_steps = max(2, asked.steps // WINDOW) * WINDOW
    step_s = asked.step_ms / 1000
    door = uvloop.run(door_us(asked.streams, num_steps, step_s=step_s))
    served = uvloop.run(served_us(asked.streams, num_steps, step_s=step_s, stop=asked.stop))
    unsent = uvloop.run(unsent_us(asked.streams, num_steps, step_s=step_s, stop=asked.stop))
    for name, value in (
        ("front over HTTP, without the door", served - door),
        ("  of that before the server's send", unsent - door),
        ("    of that detokenizing and writing the event", pure_us(stop=asked.stop)),
        ("the door alone", door),
    ):
        print(f"{value:6.1f} us  {name}")  # noqa: T201
    print(f"{million_turns_ms():6.1f} ms  a million turns of an empty loop")  # noqa: T201


if __name__ == "__main__":
    main()
