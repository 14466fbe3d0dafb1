"""Servers that compute nothing: an instance as the router knows it, and a plain HTTP server that answers at once.

Each answers a request at its next step with its first token, and then every open request with a token a step, in one
message, as a decode instance does.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Sequence
from typing import cast

import httptools
import msgspec
import uvloop
import zmq

from pd.bench.load.drive import allow_connections
from pd.runtime.core.events import ROUTER, Peer
from pd.runtime.wire.link import Spoke
from pd.runtime.wire.messages import Beat, Cancel, FirstToken, Hello, Prefill, Progress, Tokens, WhoAreYou
from pd.runtime.wire.values import WIRE_VERSION, Finish, Handle, Load, ModelCard, Role, Token
from pd.transfer.layout import KVLayout, tp_shards

_BEAT_S = 0.4
_NUM_PAGES = 1 << 20
_ME = Peer("null-0", "bench")


class NullInstance:
    """A colocated instance of one process. `run` until its parent ends it."""

    def __init__(self, router: str, model: str, *, step_s: float) -> None:
        self._context = zmq.Context[zmq.Socket[bytes]]()
        self._link = Spoke(self._context, router, me=_ME, hub=Peer(ROUTER, ""), queue=True)
        self._step_s = step_s
        self._hello = _hello(model)
        self._new: list[Prefill] = []
        self._open: dict[Handle, tuple[int, int]] = {}  # the next position, and where it ends

    def run(self) -> None:
        self._link.send(self._hello)
        poller = zmq.Poller()
        poller.register(self._link.socket, zmq.POLLIN)
        step_at, beat_at = time.monotonic(), 0.0
        while True:
            now = time.monotonic()
            poller.poll(max(0, int((step_at - now) * 1e3)) if self._open or self._new else 50)
            self._hear()
            now = time.monotonic()
            if now >= beat_at:
                self._beat()
                beat_at = now + _BEAT_S
            if now >= step_at and (self._open or self._new):
                self._step()
                step_at = max(step_at + self._step_s, now)

    def _hear(self) -> None:
        while (received := self._link.receive()) is not None:
            match received.message:
                case Prefill() as asked:
                    self._new.append(asked)
                case Cancel(handle=handle):
                    self._open.pop(handle, None)
                case WhoAreYou():
                    self._link.send(self._hello)
                case _:
                    pass  # Welcome, Peers: nothing to do

    def _step(self) -> None:
        progress = []
        for handle, (position, stop) in list(self._open.items()):
            is_last = position + 1 >= stop
            finish = Finish.LENGTH if is_last else None
            progress.append(Progress(handle, position, (Token(65 + position % 26),), finish))
            if is_last:
                del self._open[handle]
            else:
                self._open[handle] = position + 1, stop
        if progress:
            self._link.send(Tokens(tuple(progress)))
        for asked in self._new:
            start, stop = len(asked.tokens), asked.num_prompt + asked.sampling.max_tokens
            is_last = start + 1 >= stop
            self._link.send(FirstToken(asked.handle, start, Token(65), Finish.LENGTH if is_last else None, 0))
            if not is_last:
                self._open[asked.handle] = start + 1, stop
        self._new.clear()

    def _beat(self) -> None:
        self._link.send(Beat(Load(len(self._open), len(self._new), _NUM_PAGES, _NUM_PAGES, 0)))


def _hello(model: str) -> Hello:
    layout = KVLayout(num_layers=1, num_kv_heads=1, head_dim=8, page_size=16, dtype="float32")
    shards = tp_shards(layout, 1, 1, _NUM_PAGES)
    return Hello(
        worker=_ME.name,
        role=Role.COLOCATED,
        epoch=_ME.epoch,
        wire_version=WIRE_VERSION,
        model=ModelCard(model, "null", 32_000, 1 << 20),
        layout=layout,
        shards=shards,
        transfer="memory",
        endpoints=(b"",),
        peer_address="",
        max_running=100_000,
    )


class _Body(msgspec.Struct):
    max_tokens: int = 1
    stream: bool = False


_decode = msgspec.json.Decoder(_Body).decode


class NullHttp(asyncio.Protocol):
    """The same over HTTP, without a router: a token at once, the others a step apart. Whatever has no body is answered
    with the list of models, which other routers take for a sign of health as well."""

    def __init__(self, step_s: float) -> None:
        self._step_s = step_s
        self._parser = httptools.HttpRequestParser(self)
        self._body = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's own is of no such class

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_message_begin(self) -> None:
        self._body = b""

    def on_body(self, body: bytes) -> None:
        self._body += body

    def on_message_complete(self) -> None:
        if not self._body:
            self._transport.write(_MODELS)
            return
        asked = _decode(self._body)
        if not asked.stream:  # as P/D proxies ask prefill
            self._transport.write(_whole(_ANSWER % (asked.max_tokens, 8 + asked.max_tokens)))
            return
        self._transport.write(_HEAD + _TOKEN)
        self._more(asked.max_tokens - 1, asked.max_tokens)

    def _more(self, num_left: int, num_tokens: int) -> None:
        if self._transport.is_closing():
            return
        if num_left:
            self._transport.write(_TOKEN)
            asyncio.get_running_loop().call_later(self._step_s, self._more, num_left - 1, num_tokens)
            return
        usage = b'data: {"choices":[],"usage":{"prompt_tokens":8,"completion_tokens":%d}}\n\n' % num_tokens
        self._transport.write(_chunk(usage + b"data: [DONE]\n\n") + b"0\r\n\r\n")


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def _whole(data: bytes) -> bytes:
    return b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%b" % (len(data), data)


_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
_TOKEN = _chunk(
    b'data: {"id":"cmpl-0123456789","object":"text_completion","created":1700000000,"model":"null",'
    b'"choices":[{"index":0,"text":" word","logprobs":null,"finish_reason":null}],"usage":null}\n\n'
)
_ANSWER = (
    b'{"id":"cmpl-0123456789","object":"text_completion","created":1700000000,"model":"null","choices":[{"index":0,'
    b'"text":" word","logprobs":null,"finish_reason":"length"}],"kv_transfer_params":{},'
    b'"usage":{"prompt_tokens":8,"completion_tokens":%d,"total_tokens":%d}}'
)
_MODELS = _whole(b'{"object":"list","data":[{"id":"null","object":"model"}]}')


async def _serve_http(port: int, step_s: float) -> None:
    server = await asyncio.get_running_loop().create_server(lambda: NullHttp(step_s), "127.0.0.1", port, backlog=4096)
    await server.serve_forever()


def main(arguments: Sequence[str]) -> None:
    """`instance ROUTER MODEL STEP_S` or `http PORT STEP_S`."""
    allow_connections()
    match arguments:
        case ["instance", router, model, step_s]:
            NullInstance(router, model, step_s=float(step_s)).run()
        case ["http", port, step_s]:
            uvloop.run(_serve_http(int(port), float(step_s)))
        case _:
            raise SystemExit(f"not {arguments}")


if __name__ == "__main__":
    main(sys.argv[1:])
