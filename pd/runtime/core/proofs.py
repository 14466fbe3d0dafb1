"""Writes of nothing, whose end proves that all writes to a peer before them have landed or never will. Pure.

A peer asks about a write in doubt until it hears Fenced, and cuts us off in the end. The next write that is done would
be the proof; an instance that is idle has none.
"""

from __future__ import annotations

from typing import NamedTuple

from pd.runtime.core.doubts import Doubts
from pd.runtime.core.events import Effect, Order, Peer
from pd.runtime.core.lives import Links
from pd.runtime.wire.plans import Transfer, WriteDone, WriteJob


class Proof(NamedTuple):
    life: Peer
    deadline: float


class Proofs:
    """At most one open to a life, begun because it asks."""

    def __init__(self, links: Links, doubts: Doubts, patience_s: float) -> None:
        """`patience_s`: for one to end, and then for the sever that makes it fail."""
        self._links = links
        self._doubts = doubts
        self._patience_s = patience_s
        self._open: dict[int, Proof] = {}  # by job

    def is_open(self, job: int) -> bool:
        return job in self._open

    def has_open(self, peer: str) -> bool:
        """To any life of `peer`."""
        return any(proof.life.name == peer for proof in self._open.values())

    def begin(self, life: Peer, job: int, *, now: float) -> list[Effect]:
        """Under that number. Nothing, if there is no way to that life just now, or one is open."""
        if self._links.find(life) is None or self.has_open(life.name):
            return []
        self._open[job] = Proof(life, now + self._patience_s)
        return [Order(Transfer((WriteJob(job, life.name, 0, 0, (), ()),)))]

    def end(self, done: WriteDone) -> None:
        """Every rank has ended it, well or not."""
        proof = self._open.pop(done.job)
        if done.error is None:
            self._doubts.trust(proof.life, done.job)

    def sweep(self, now: float) -> list[Effect]:
        """Look at all deadlines."""
        effects: list[Effect] = []
        for job, (life, deadline) in self._open.items():
            if now >= deadline:
                self._open[job] = Proof(life, now + self._patience_s)
                effects += self._links.cut(life)
        return effects
