"""Looks at our router's /state while a run goes on: queues, batches, free pages. Other servers have none of it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import msgspec

from pd.bench.load.http import Server

_EVERY_S = 0.25
_ANSWER_S = 2.0


class _Instance(msgspec.Struct):
    name: str
    role: str
    num_assigned: int | None = None
    num_running: int | None = None
    num_waiting: int | None = None
    num_free_pages: int | None = None
    num_pages: int | None = None


class _State(msgspec.Struct):
    instances: list[_Instance]
    requests: dict[str, int]


class Watch:
    def __init__(self, server: Server, now: Callable[[], float], put: Callable[[dict[str, object]], None]) -> None:
        self._server = server
        self._now = now
        self._put = put

    async def run(self) -> None:
        """Until cancelled, or until the server turns out to have no such page."""
        while True:
            answer = await self._server.fetch("GET", "/state", timeout_s=_ANSWER_S)
            if answer.fault is None:
                try:
                    state = msgspec.json.decode(bytes(answer.body), type=_State)
                except (msgspec.DecodeError, msgspec.ValidationError):
                    return
                instances = [msgspec.to_builtins(instance) for instance in state.instances]
                self._put({"at_s": round(self._now(), 3), "instances": instances, "requests": state.requests})
            await asyncio.sleep(_EVERY_S)
