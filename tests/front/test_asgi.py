"""The app against a server that does as the test says: who waits for whom."""

from __future__ import annotations

import asyncio
import json
from collections.abc import MutableMapping
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry

from pd.runtime.front.http import make_app
from pd.runtime.front.settings import FrontSettings
from tests.front.fakes import WAIT_S, FakeDoor, emits, tiny_text, tokens


class Wire:
    """One request's connection. Every `send` waits until the test lets it through."""

    def __init__(self, body: dict[str, object]) -> None:
        self.incoming: asyncio.Queue[dict[str, object]] = asyncio.Queue()
        self.incoming.put_nowait({"type": "http.request", "body": json.dumps(body).encode()})
        self.asked: asyncio.Queue[MutableMapping[str, Any]] = asyncio.Queue()
        self.passes = asyncio.Semaphore(0)

    async def receive(self) -> dict[str, object]:
        return await self.incoming.get()

    async def send(self, message: MutableMapping[str, Any]) -> None:
        self.asked.put_nowait(message)
        await self.passes.acquire()

    async def next(self) -> MutableMapping[str, Any]:
        """The next message that was tried to be sent."""
        return await asyncio.wait_for(self.asked.get(), WAIT_S)


def begin(door: FakeDoor, wire: Wire, directory: Path) -> asyncio.Task[None]:
    app = make_app(
        door,
        tiny_text(directory),
        settings=FrontSettings(),
        metrics_text=lambda: b"",
        registry=CollectorRegistry(),
    )
    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": []}
    return asyncio.ensure_future(app(scope, wire.receive, wire.send))


async def test_client_that_does_not_read_stops_the_reading_of_its_stream(tmp_path: Path) -> None:
    door, wire = FakeDoor(lambda submit: emits(tokens("abcdefgh"))), Wire({"prompt": "x", "stream": True})
    running = begin(door, wire, tmp_path)
    assert (await wire.next())["type"] == "http.response.start"
    stream = door.streams[door.submits[0].request_id]
    assert stream.num_waiting == 7
    wire.passes.release()
    assert b'"text":"a"' in (await wire.next())["body"]
    assert stream.num_waiting == 7
    for _ in range(20):
        wire.passes.release()
    await asyncio.wait_for(running, WAIT_S)
    assert stream.num_waiting == 0
    assert door.abandons == {}


async def test_client_that_leaves_while_a_write_waits_is_abandoned(tmp_path: Path) -> None:
    door, wire = FakeDoor(lambda submit: emits(tokens("abc"))), Wire({"prompt": "x", "stream": True})
    running = begin(door, wire, tmp_path)
    await wire.next()
    wire.incoming.put_nowait({"type": "http.disconnect"})
    await asyncio.wait_for(running, WAIT_S)
    assert door.abandons == {door.submits[0].request_id: "the client left"}


async def test_no_choice_writes_before_the_answer_is_started(tmp_path: Path) -> None:
    door = FakeDoor(lambda submit: emits(tokens("a")))
    wire = Wire({"prompt": "x", "stream": True, "n": 4})
    running = begin(door, wire, tmp_path)
    assert (await wire.next())["type"] == "http.response.start"
    for _ in range(50):  # turns of the loop, in which a choice that did not wait would write
        await asyncio.sleep(0)
    assert wire.asked.empty()
    for _ in range(20):
        wire.passes.release()
    await asyncio.wait_for(running, WAIT_S)
    kinds = [wire.asked.get_nowait()["type"] for _ in range(wire.asked.qsize())]
    assert kinds == ["http.response.body"] * 5


async def test_server_that_goes_down_abandons_what_runs(tmp_path: Path) -> None:
    door, wire = FakeDoor(), Wire({"prompt": "x"})
    running = begin(door, wire, tmp_path)
    submit = await door.arrived()
    running.cancel()
    await asyncio.wait({running}, timeout=WAIT_S)
    assert running.cancelled()
    assert list(door.abandons) == [submit.request_id]


async def test_client_that_leaves_within_its_body_hears_nothing(tmp_path: Path) -> None:
    door, wire = FakeDoor(), Wire({"prompt": "x"})
    whole = wire.incoming.get_nowait()
    wire.incoming.put_nowait(whole | {"more_body": True})
    wire.incoming.put_nowait({"type": "http.disconnect"})
    await asyncio.wait_for(begin(door, wire, tmp_path), WAIT_S)
    assert wire.asked.empty()
    assert door.submits == []
