"""Messages between processes: late, lost, doubled, out of order, or cut off."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable

from pd.runtime.core.events import Peer
from pd.runtime.wire.codec import decode, encode
from pd.runtime.wire.messages import AnyMessage
from tests.cluster.clock import Clock
from tests.cluster.scenario import Odds
from tests.cluster.trace import Trace, short

Deliver = Callable[[str, Peer | None, Peer, AnyMessage], None]
"""To a name, to this life of it alone (None: whoever has the name by then), from a sender."""
SLOW_S = 0.15
"""What a slow process takes to read a message."""


class Network:
    def __init__(self, clock: Clock, rng: random.Random, odds: Odds, *, trace: Trace, deliver: Deliver) -> None:
        self.odds = odds
        self.is_encoded = False
        self.happened: Counter[str] = Counter()
        self._clock = clock
        self._rng = rng
        self._trace = trace
        self._deliver = deliver
        self._latest: dict[tuple[Peer, str], float] = {}  # arrival of the last message of a pair
        self._cut: dict[frozenset[str], float] = {}  # pairs of names, and until when
        self._slow: dict[str, float] = {}  # names, and until when

    def cut(self, one: str, other: str, until: float) -> None:
        pair = frozenset((one, other))
        self._cut[pair] = max(until, self._cut.get(pair, 0.0))

    def slow_down(self, name: str, until: float) -> None:
        self._slow[name] = max(until, self._slow.get(name, 0.0))

    def is_slow(self, name: str) -> bool:
        return self._clock.now < self._slow.get(name, 0.0)

    def is_cut(self, one: str, other: str) -> bool:
        return bool(self._cut) and self._clock.now < self._cut.get(frozenset((one, other)), 0.0)

    def send(self, sender: Peer, to: str, message: AnyMessage, *, life: Peer | None) -> None:
        chance, odds = self._rng.random, self.odds
        if self.is_encoded:
            frame = encode(message)
            message = decode(frame)
        if self.is_cut(sender.name, to) and chance() < 0.7:  # the rest waits in a queue until it heals
            return self._lose(sender, to, message, fate="cut off")
        if odds.drop and chance() < odds.drop:
            return self._lose(sender, to, message, fate="lost")
        target = life if chance() < 0.5 else None
        copies = 1
        if odds.duplicate and chance() < odds.duplicate:
            copies = 2
            self.happened["duplicate"] += 1
        for _ in range(copies):
            self._clock.at(self._arrival(sender, to), self._arrive, sender, to, message, target)

    def _arrival(self, sender: Peer, to: str) -> float:
        rng, odds = self._rng, self.odds
        delay = rng.expovariate(60.0 if odds.reorder else 300.0) + 0.0005
        if odds.spike and rng.random() < odds.spike:
            delay += rng.random()
            self.happened["delay"] += 1
        if self._slow and self.is_slow(to):
            delay += SLOW_S * rng.random()
        arrival = self._clock.now + delay
        latest = self._latest.get((sender, to), 0.0)
        if arrival < latest:
            if odds.reorder:
                self.happened["reorder"] += 1
                return arrival
            arrival = latest
        self._latest[sender, to] = arrival
        return arrival

    def _arrive(self, sender: Peer, to: str, message: AnyMessage, life: Peer | None) -> None:
        if self.is_cut(sender.name, to):
            healed = self._cut[frozenset((sender.name, to))]
            later = self._rng.uniform(0.0, 0.3) if self.odds.reorder else 0.001
            self._clock.at(healed + later, self._arrive, sender, to, message, life)
            return
        self._deliver(to, life, sender, message)

    def _lose(self, sender: Peer, to: str, message: AnyMessage, *, fate: str) -> None:
        self.happened[fate] += 1
        if self._trace.is_kept:
            self._trace.add(self._clock.now, sender.name, f"   … {fate}: to {to} {short(message)}")
