"""Synthetic servers of known timing, on a real socket: what they answer, and when, is a script of the test's."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Say:
    """Wait, then send one event of so many tokens."""

    after_s: float
    num_tokens: int = 1


@dataclass(frozen=True)
class Script:
    """One answer."""

    says: Sequence[Say] = ()
    status: int = 200
    break_off: bool = False  # close the connection after the last
    error: str | None = None  # an error event after the last
    usage: bool = True
    raw: bytes | None = None  # in place of the answer
    prompt_tokens: int = 7


@dataclass
class Synthetic:
    """Answers the n-th completion by `script(n, body)`."""

    script: Callable[[int, dict[str, object]], Script]
    models: Sequence[str] = ("synthetic",)
    port: int = 0
    bodies: list[dict[str, object]] = field(default_factory=list)
    wrote: list[list[float]] = field(default_factory=list)  # of each answer, time.perf_counter at each event of tokens
    num_left: int = 0  # clients that went before their answer was whole

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            while head := await reader.readuntil(b"\r\n\r\n"):
                lines = [line.lower() for line in head.split(b"\r\n")]
                lengths = [int(line.split(b":")[1]) for line in lines if line.startswith(b"content-length")]
                body = await reader.readexactly(sum(lengths))
                if not await self._answer(head.split()[1].decode(), body, writer):
                    break
        writer.close()

    async def _answer(self, path: str, body: bytes, writer: asyncio.StreamWriter) -> bool:
        if not path.endswith("completions"):
            known = path == "/v1/models"
            listed = {"data": [{"id": name} for name in self.models]} if known else {}
            writer.write(_whole(200 if known else 404, json.dumps(listed).encode()))
            return True
        self.bodies.append(json.loads(body))
        self.wrote.append([])
        script = self.script(len(self.bodies) - 1, self.bodies[-1])
        if script.raw is not None:
            writer.write(script.raw)
            return False
        if script.status != 200:
            writer.write(_whole(script.status, b'{"error": {"message": "as the test wants it"}}'))
            return True
        try:
            await self._stream(script, writer, is_chat="chat" in path)
        except ConnectionError:
            self.num_left += 1
            return False
        if script.break_off:
            writer.transport.abort()
        return not script.break_off

    async def _stream(self, script: Script, writer: asyncio.StreamWriter, *, is_chat: bool) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")
        due = time.perf_counter()
        wrote = self.wrote[-1]
        if is_chat:
            _event(writer, {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]})
        for number, say in enumerate(script.says):
            due += say.after_s
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
            last = number == len(script.says) - 1 and not script.break_off and script.error is None
            text = " word" * say.num_tokens
            choice = {"delta": {"content": text}} if is_chat else {"text": text}
            wrote.append(time.perf_counter())
            _event(writer, {"choices": [{"index": 0, **choice, "finish_reason": "length" if last else None}]})
            await writer.drain()
        if script.break_off:
            return
        if script.error is not None:
            _event(writer, {"error": {"message": script.error}})
        elif script.usage:
            num_tokens = sum(say.num_tokens for say in script.says)
            usage = {"prompt_tokens": script.prompt_tokens, "completion_tokens": num_tokens}
            _event(writer, {"choices": [], "usage": usage})
        _chunk(writer, b"data: [DONE]\n\n")
        writer.write(b"0\r\n\r\n")
        await writer.drain()


@contextlib.asynccontextmanager
async def serving(script: Callable[[int, dict[str, object]], Script] | Script) -> AsyncIterator[Synthetic]:
    synthetic = Synthetic(script if callable(script) else lambda number, body: script)
    server = await asyncio.start_server(synthetic.serve, "127.0.0.1", 0, limit=1 << 22)
    synthetic.port = server.sockets[0].getsockname()[1]
    async with server:
        yield synthetic
        server.close()


def _event(writer: asyncio.StreamWriter, value: dict[str, object]) -> None:
    _chunk(writer, b"data: " + json.dumps(value).encode() + b"\n\n")


def _chunk(writer: asyncio.StreamWriter, data: bytes) -> None:
    writer.write(b"%x\r\n%b\r\n" % (len(data), data))


def _whole(status: int, body: bytes) -> bytes:
    return b"HTTP/1.1 %d X\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % (status, len(body)) + body


async def _alone(port: int, num_slots: int, answer_s: float) -> None:
    """A server of `num_slots`, each of which takes `answer_s` for an answer of five tokens; others wait."""
    slots = asyncio.Semaphore(num_slots)

    class Slotted(Synthetic):
        async def _stream(self, script: Script, writer: asyncio.StreamWriter, *, is_chat: bool) -> None:
            async with slots:
                await super()._stream(script, writer, is_chat=is_chat)

    synthetic = Slotted(lambda number, body: Script([Say(answer_s / 5)] * 5))
    server = await asyncio.start_server(synthetic.serve, "127.0.0.1", port)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(_alone(int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])))
