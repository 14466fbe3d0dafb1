"""Messages between processes: late, lost, doubled, out of order, or cut off."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial

from pd.runtime.core.events import Peer
from pd.runtime.wire.messages import AnyMessage
from tests.cluster.clock import Clock
from tests.cluster.scenario import Odds
from tests.cluster.trace import Trace, short

Deliver = Callable[[str, Peer | None, Peer, AnyMessage], None]
"""To a name, to this life of it alone (None: whoever has the name by then), from a sender."""


class Network:
    def __init__(self, clock: Clock, rng: random.Random, odds: Odds, *, trace: Trace, deliver: Deliver) -> None:
        self.odds = odds
        self._clock = clock
        self._rng = rng
        self._trace = trace
        self._deliver = deliver
        self._latest: dict[tuple[Peer, str], float] = {}  # arrival of the last message of a pair
        self._cut: dict[frozenset[str], float] = {}  # pairs of names, and until when

    def cut(self, one: str, other: str, until: float) -> None:
        pair = frozenset((one, other))
        self._cut[pair] = max(until, self._cut.get(pair, 0.0))

    def send(self, sender: Peer, to: str, message: AnyMessage, *, life: Peer | None) -> None:
        rng, odds = self._rng, self.odds
        if self._is_cut(sender.name, to) and rng.random() < 0.7:  # the rest waits in a queue until it heals
            return self._note(sender, to, message, "cut off")
        if rng.random() < odds.drop:
            return self._note(sender, to, message, "lost")
        target = life if rng.random() < 0.5 else None
        for _ in range(2 if rng.random() < odds.duplicate else 1):
            arrival = self._arrival(sender, to)
            self._clock.at(arrival, partial(self._arrive, sender, to, message, target))

    def _arrival(self, sender: Peer, to: str) -> float:
        delay = self._rng.expovariate(300.0) + 0.0005
        if self._rng.random() < self.odds.spike:
            delay += self._rng.uniform(0.0, 1.0)
        arrival = self._clock.now + delay
        if not self.odds.reorder:
            arrival = max(arrival, self._latest.get((sender, to), 0.0))
            self._latest[sender, to] = arrival
        return arrival

    def _arrive(self, sender: Peer, to: str, message: AnyMessage, life: Peer | None) -> None:
        if self._is_cut(sender.name, to):
            healed = self._cut[frozenset((sender.name, to))]
            self._clock.at(healed + 0.001, partial(self._arrive, sender, to, message, life))
            return
        self._deliver(to, life, sender, message)

    def _is_cut(self, one: str, other: str) -> bool:
        return self._clock.now < self._cut.get(frozenset((one, other)), 0.0)

    def _note(self, sender: Peer, to: str, message: AnyMessage, fate: str) -> None:
        self._trace.add(self._clock.now, sender.name, lambda: f"   … {fate}: to {to} {short(message)}")
