"""Processes: a brain with its clock and its effects performed, as the real shells do it."""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Callable
from typing import Protocol

from pd.runtime.core.events import (
    Effect,
    Emit,
    End,
    Event,
    Exit,
    Launch,
    Order,
    Peer,
    Received,
    Send,
    Stamp,
    Tick,
)
from pd.runtime.wire.messages import AnyMessage, Beat, FromRank, Reserve, Reserved
from tests.cluster.clock import Clock
from tests.cluster.ranks import Ranks
from tests.cluster.trace import Trace, Violation, short

TICK_S = 0.1


class Brain(Protocol):
    def on(self, event: Event, now: float) -> list[Effect]: ...
    def check(self) -> None: ...
    def is_idle(self) -> bool: ...


Post = Callable[[Peer, str, AnyMessage], None]
"""From a life, to a name."""
Tell = Callable[[Emit | End], None]


class Shell:
    """One life of one process."""

    def __init__(
        self,
        life: Peer,
        brain: Brain,
        *,
        clock: Clock,
        trace: Trace,
        clock_offset: float,
        post: Post,
    ) -> None:
        self.life = life
        self.brain = brain
        self.is_alive = True
        self.ranks: Ranks | None = None
        self.tell: Tell | None = None  # router only
        self.on_exit: Callable[[], None] | None = None
        self.stamps: Counter[str] = Counter()
        self._clock = clock
        self._trace = trace
        self._clock_offset = clock_offset
        self._post = post
        self.paused_until = 0.0
        self._inbox: deque[Event] = deque()  # while it is paused

    def start(self, rng: random.Random) -> None:
        self._clock.after(rng.uniform(0.0, TICK_S), self._tick)

    @property
    def is_paused(self) -> bool:
        return self._clock.now < self.paused_until

    def pause(self, until: float) -> None:
        self.paused_until = max(until, self.paused_until)
        self._clock.at(until, self._wake)

    def _wake(self) -> None:
        while self._inbox and not self.is_paused:
            self.hear(self._inbox.popleft())

    def die(self) -> None:
        self.is_alive = False
        if self.ranks is not None:
            self.ranks.die()

    def hear_rank(self, rank: int, message: FromRank) -> None:
        self.hear(Received(Peer(str(rank), ""), message))

    def hear(self, event: Event) -> None:
        """Have the brain decide, and do what it says. A paused process hears it all later, in order."""
        if not self.is_alive:
            return
        if self.is_paused:
            self._inbox.append(event)
            return
        try:
            if not isinstance(event, Tick):
                self._trace.add(self._clock.now, self.life.name, lambda: f"◄ {short(event, 200)}")
            if isinstance(event, Received) and isinstance(event.message, Reserve) and self.ranks is not None:
                self.ranks.expect(event.message)
            effects = self.brain.on(event, self._clock.now + self._clock_offset)
            for effect in effects:
                self._trace.add(self._clock.now, self.life.name, lambda effect=effect: f"  ► {short(effect, 200)}")  # type: ignore[misc]
                self._perform(effect)
            if not (is_idle_talk(event) and all(map(is_beat, effects))):
                self.brain.check()
        except Violation:
            raise
        except Exception as error:
            raise Violation(f"{self.life} at {short(event)}: {type(error).__name__}: {error}") from error

    def _perform(self, effect: Effect) -> None:
        match effect:
            case Send(to, message):
                if isinstance(message, Reserved) and self.ranks is not None:
                    self.ranks.promise(message.handle, message.ticket.pages)
                self._post(self.life, to, message)
            case Launch(plan):
                assert self.ranks is not None
                self.ranks.launch(plan)
            case Order(message):
                assert self.ranks is not None
                self.ranks.order(message)
            case Emit() | End():
                assert self.tell is not None, f"{self.life} tells a client {effect}"
                self.tell(effect)
            case Exit():
                self.die()
                if self.on_exit is not None:
                    self.on_exit()
            case Stamp(what=what):
                self.stamps[what] += 1

    def _tick(self) -> None:
        if self.is_alive:
            if not self.is_paused:
                self.hear(Tick())
            self._clock.after(TICK_S, self._tick)


def is_beat(effect: Effect) -> bool:
    return isinstance(effect, Send) and isinstance(effect.message, Beat)


def is_idle_talk(event: Event) -> bool:
    """Most of what a quiet cluster hears, and nothing that moves a request by itself."""
    return isinstance(event, Tick) or (isinstance(event, Received) and isinstance(event.message, Beat))
