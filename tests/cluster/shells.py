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
from pd.runtime.wire.messages import AnyMessage, Beat, Reserve, Reserved, Wanted
from pd.runtime.wire.plans import FromRank
from tests.cluster.clock import Clock
from tests.cluster.ranks import Ranks
from tests.cluster.trace import Trace, Violation, short

TICK_S = 0.1
IDLE_TICK_S = 0.2
"""Where nothing but idle talk was heard since the last one: then there are only deadlines of many ticks."""
TICK = Tick()
COUNTED = frozenset(("preempted", "quarantined", "severed", "repeated", "stale", "corrupted"))
"""Stamps that tell what a run went through."""


class Brain(Protocol):
    def on(self, event: Event, now: float) -> list[Effect]: ...
    def check(self) -> None: ...
    def is_idle(self) -> bool: ...


Post = Callable[[Peer, str, AnyMessage], None]
"""From a life, to a name."""
Tell = Callable[[Emit | End], None]


class Shell:
    """One life of one process."""

    def __init__(self, life: Peer, brain: Brain, *, clock: Clock, trace: Trace, post: Post) -> None:
        self.life = life
        self.brain = brain
        self.is_alive = True
        self.ranks: Ranks | None = None
        self.tell: Tell | None = None  # router only
        self.on_exit: Callable[[], None] | None = None
        self.check: Callable[[], None] = brain.check
        self.stamps: Counter[str] = Counter()
        self.happened: Counter[str] = Counter()  # of all processes
        self.repeats: list[str] = []  # why attempts were repeated; router only
        self.clock_offset = 0.0
        self.clock_rate = 1.0
        self.paused_until = 0.0
        self._clock = clock
        self._trace = trace
        self._post = post
        self._inbox: deque[Event] = deque()  # while it is paused
        self._num_heard = 0  # but idle talk
        self._num_ticked = 0  # of those, at the last tick
        self._doom: tuple[int, int, Callable[[], None]] | None = None

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

    def doom(self, event: int, effect: int, fall: Callable[[], None]) -> None:
        """Have it fall in the midst of its so many-th event from now, when so many effects of that are done."""
        self._doom = (self._num_heard + event, effect, fall)

    def die(self) -> None:
        self.is_alive = False
        if self.ranks is not None:
            self.ranks.die()

    def end(self) -> None:
        """It ends by itself."""
        if self.is_alive:
            self.die()
            if self.on_exit is not None:
                self.on_exit()

    def hear_rank(self, rank: int, message: FromRank) -> None:
        self.hear(Received(Peer(str(rank), ""), message))

    def hear(self, event: Event) -> None:
        """Have the brain decide, and do what it says. A paused process hears it all later, in order."""
        if not self.is_alive:
            return
        if self._clock.now < self.paused_until:
            self._inbox.append(event)
            return
        trace, now = self._trace, self._clock.now
        trace.count(now)
        try:
            if event is not TICK and trace.is_kept:
                trace.add(now, self.life.name, f"◄ {short(event)}")
            if self.ranks is not None and isinstance(event, Received) and isinstance(event.message, Reserve):
                self.ranks.expect(event.message)
            effects = self.brain.on(event, now * self.clock_rate + self.clock_offset)
            if is_idle_talk(event) and is_talk(effects):
                for effect in effects:
                    self._perform(effect)
                return
            self._num_heard += 1
            self._perform_all(effects)
            self.check()
        except Violation:
            raise
        except Exception as error:
            raise Violation(f"{self.life} at {short(event)}: {type(error).__name__}: {error}") from error

    def _perform_all(self, effects: list[Effect]) -> None:
        for index, effect in enumerate(effects):
            if self._is_doomed(index):
                return
            if self._trace.is_kept:
                self._trace.add(self._clock.now, self.life.name, f"  ► {short(effect)}")
            self._perform(effect)
        self._is_doomed(None)

    def _is_doomed(self, num_done: int | None) -> bool:
        """It falls here. `num_done`: of the effects; None: all of them."""
        if self._doom is None or not self.is_alive:
            return False
        event, effect, fall = self._doom
        if self._num_heard < event or (num_done is not None and num_done < effect):
            return False
        self._doom = None
        fall()
        return not self.is_alive

    def _perform(self, effect: Effect) -> None:
        match effect:
            case Send(to, message):
                if self.ranks is not None and isinstance(message, Reserved):
                    self.ranks.promise(message.handle, message.ticket.pages)
                self._post(self.life, to, message)
            case Stamp(what=what, detail=detail):
                self.stamps[what] += 1
                if what in COUNTED:
                    self.happened[what] += 1
                if what == "repeated":
                    self.repeats.append(detail)
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
                self.end()

    def _tick(self) -> None:
        if self.is_alive:
            if self._clock.now >= self.paused_until:
                self.hear(TICK)
            is_idle, self._num_ticked = self._num_heard == self._num_ticked, self._num_heard
            self._clock.after(IDLE_TICK_S if is_idle else TICK_S, self._tick)


def is_talk(effects: list[Effect]) -> bool:
    """Only what is said now and then."""
    return all(isinstance(effect, Send) and isinstance(effect.message, Beat | Wanted) for effect in effects)


def is_idle_talk(event: Event) -> bool:
    """Most of what a quiet cluster hears, and nothing that moves a request by itself."""
    return event is TICK or (isinstance(event, Received) and isinstance(event.message, Beat | Wanted))
