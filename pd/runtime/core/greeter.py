"""An instance's part in membership: Hello until welcomed, Beat ever after. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable

from pd.runtime.core.events import ROUTER, Effect, Send, Stamp
from pd.runtime.core.settings import Deadlines
from pd.runtime.wire.messages import Beat, Hello
from pd.runtime.wire.values import Load


class Greeter:
    def __init__(self, hello: Hello, deadlines: Deadlines) -> None:
        self._hello = hello
        self._deadlines = deadlines
        self._is_welcome = False
        self._hello_at: float | None = None  # None: at once
        self._beat_at = -math.inf
        self._complain_at: float | None = None

    def welcome(self) -> list[Effect]:
        if self._is_welcome:
            return []
        self._is_welcome = True
        return [Stamp(self._hello.worker, "welcome", "the router knows this instance")]

    def introduce(self, now: float) -> list[Effect]:
        """The router does not know us: say Hello, and go on until it answers."""
        self._is_welcome = False
        self._hello_at = now + self._deadlines.hello_s
        self._complain_at = now + self._deadlines.unreachable_s
        return [Send(ROUTER, self._hello)]

    def tick(self, load: Callable[[], Load], now: float, *, is_draining: bool) -> list[Effect]:
        if self._hello_at is None:
            return self.introduce(now)
        effects: list[Effect] = []
        if self._is_welcome:
            if now >= self._beat_at:
                self._beat_at = now + self._deadlines.beat_s
                effects.append(Send(ROUTER, Beat(load(), is_draining)))
            return effects
        if now >= self._hello_at:
            self._hello_at = now + self._deadlines.hello_s
            effects.append(Send(ROUTER, self._hello))
        if self._complain_at is not None and now >= self._complain_at:
            self._complain_at = now + self._deadlines.unreachable_s
            effects.append(Stamp(self._hello.worker, "unwelcome", "the router does not answer; trying on"))
        return effects
