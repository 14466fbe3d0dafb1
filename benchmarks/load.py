"""Whether `pd bench`'s client can be the bottleneck: `python -m benchmarks.load [--requests 4000] [--tokens 1]`.

A server of another process answers every completion at once with prepared bytes, so what is measured is the client:
requests a second of one token, and streamed tokens a second of long answers, each in a chunk of its own. Beside them
stands how late the client was when it sent, at a rate of half of what it can.
"""

from __future__ import annotations

import argparse
import os
import sys

import uvloop

from pd.bench.compare.shape import Shape, running
from pd.bench.load.asks import Ask, Conversation, Form
from pd.bench.load.drive import Drive, Traffic, allow_connections
from pd.bench.load.goals import Goals
from pd.bench.load.http import Server
from pd.bench.load.metrics import Summary, summarize

STREAMS = 256
LONG = 200  # tokens of a long answer
PIECE_S = 0.005


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
    asked = parser.parse_args()
    allow_connections()
    uvloop.run(measure_all(asked.requests, asked.streams))


async def measure_all(num_requests: int, num_streams: int) -> None:
    words = (sys.executable, "-m", "pd.bench.routing.null", "http", "{port}", str(PIECE_S))
    async with running(Shape("null", words, tuple(os.sched_getaffinity(0))), "") as null:
        short = await measure(null.url, num_requests, 1, rate=None)
        tell("requests of one token, as fast as it goes", short)
        tell("answers of 200 tokens, 5 ms apart", await measure(null.url, num_streams, LONG, rate=None))
        half = short.requests_s / 2
        tell(f"open loop at {half:.0f} requests/s", await measure(null.url, int(half * 3), 1, rate=half))


def tell(name: str, found: Summary) -> None:
    late = f"late p50 {found.late.p50 * 1e3:.2f} p99 {found.late.p99 * 1e3:.2f} ms"
    errors = f" {found.errors}" if found.errors else ""
    rates = f"{found.requests_s:8.0f} requests/s {found.answer_tokens_s:8.0f} tokens/s"
    sys.stdout.write(f"{name:45}{rates}  TTFT p50 {found.ttft.p50 * 1e3:.2f} ms  {late}{errors}\n")


if __name__ == "__main__":
    main()
