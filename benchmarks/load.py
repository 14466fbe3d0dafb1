"""Whether `pd bench`'s client can be the bottleneck: `python -m benchmarks.load [--requests 4000] [--tokens 1]`.

A server of another process answers every completion at once with prepared bytes, so what is measured is the client:
requests a second of one token, and streamed tokens a second of long answers, each in a chunk of its own. Beside them
stands how late the client was when it sent, at a rate of half of what it can.
"""

from __future__ import annotations

import argparse
import asyncio
import socket
import subprocess
import sys
from typing import cast

import httptools
import uvloop

from pd.bench.load.asks import Ask, Conversation, Form
from pd.bench.load.drive import Drive, Traffic, allow_connections
from pd.bench.load.goals import Goals
from pd.bench.load.http import Server
from pd.bench.load.metrics import Summary, summarize

STREAMS = 256
LONG = 200  # tokens of a long answer
PIECE_S = 0.005


class Null(asyncio.Protocol):
    """Says a token at once; of a long answer the others in turns, so that chunks come singly."""

    def __init__(self) -> None:
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
        num_tokens = int(self._body.partition(b'"max_tokens":')[2].partition(b",")[0] or 1)
        self._transport.write(HEAD + TOKEN)
        self._more(num_tokens - 1, num_tokens)

    def _more(self, num_left: int, num_tokens: int) -> None:
        if num_left:
            self._transport.write(TOKEN)
            asyncio.get_running_loop().call_later(PIECE_S, self._more, num_left - 1, num_tokens)
        else:
            usage = b'data: {"choices":[],"usage":{"prompt_tokens":8,"completion_tokens":%d}}\n\n' % num_tokens
            self._transport.write(chunk(usage + b"data: [DONE]\n\n") + b"0\r\n\r\n")


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
TOKEN = chunk(
    b'data: {"id":"cmpl-0123456789","object":"text_completion","created":1700000000,"model":"null",'
    b'"choices":[{"index":0,"text":" word","logprobs":null,"finish_reason":null}],"usage":null}\n\n'
)


async def be_null(descriptor: int) -> None:
    server = await asyncio.get_running_loop().create_server(Null, sock=socket.socket(fileno=descriptor))
    await server.serve_forever()


async def measure(url: str, num: int, num_tokens: int, *, rate: float | None) -> Summary:
    server = Server(url)
    asks = ((index / (rate or 1.0), Conversation((Ask((1, 2, 3), num_tokens),))) for index in range(num))
    concurrency = None if rate else STREAMS
    form = Form(model="null", chat=False, ignore_eos=True, extra={})
    drive = Drive(server, form, Traffic(arrivals=asks, concurrency=concurrency))
    seconds = await drive.run()
    server.close()
    return summarize(drive.live.outcomes, Goals(), seconds=seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--streams", type=int, default=1_000)
    parser.add_argument("--serve", type=int, help="be the null server on this descriptor")
    asked = parser.parse_args()
    allow_connections()
    if asked.serve is not None:
        uvloop.run(be_null(asked.serve))
        return
    listener = socket.create_server(("127.0.0.1", 0), backlog=4096)
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    command = [sys.executable, "-m", "benchmarks.load", "--serve", str(listener.fileno())]
    null = subprocess.Popen(command, pass_fds=[listener.fileno()])
    try:
        short = uvloop.run(measure(url, asked.requests, 1, rate=None))
        tell("requests of one token, as fast as it goes", short)
        tell("answers of 200 tokens, 5 ms apart", uvloop.run(measure(url, asked.streams, LONG, rate=None)))
        half = short.requests_s / 2
        tell(f"open loop at {half:.0f} requests/s", uvloop.run(measure(url, int(half * 3), 1, rate=half)))
    finally:
        null.terminate()
        null.wait()


def tell(name: str, found: Summary) -> None:
    late = f"late p50 {found.late.p50 * 1e3:.2f} p99 {found.late.p99 * 1e3:.2f} ms"
    errors = f" {found.errors}" if found.errors else ""
    rates = f"{found.requests_s:8.0f} requests/s {found.answer_tokens_s:8.0f} tokens/s"
    sys.stdout.write(f"{name:45}{rates}  TTFT p50 {found.ttft.p50 * 1e3:.2f} ms  {late}{errors}\n")


if __name__ == "__main__":
    main()
