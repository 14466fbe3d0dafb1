"""The other role's instances as the router lists them, and our ranks' ways to them. Pure."""

from __future__ import annotations

import enum
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from pd.runtime.core.events import Effect, Order, Peer, Stamp
from pd.runtime.wire.messages import Hello
from pd.runtime.wire.plans import Attach, Sever

MAX_SEVERED = 4096
"""Severed lives remembered. Only the latest could still be asked for."""
SETTLED_S = 3.0
"""A way that stays open this long is mended. Until then, trying again every second is not told again."""


def life_of(hello: Hello) -> Peer:
    return Peer(hello.worker, hello.epoch)


class Lives:
    """Who lives.

    A life that another epoch of its name replaces is over at once. One that only vanishes from the list has
    `vanished_s` to return: a restarted router hears of its instances one after the other.
    """

    def __init__(self, vanished_s: float) -> None:
        self._vanished_s = vanished_s
        self._listed: dict[str, Hello] = {}
        self._vanished: dict[str, tuple[Hello, float]] = {}  # and until when it may return

    def update(self, peers: Iterable[Hello], now: float) -> tuple[list[Hello], list[Peer]]:
        """Take the router's whole list. Returns the lives that are new on it, and those that are over."""
        listed = {hello.worker: hello for hello in peers}
        until = now + self._vanished_s
        known = {name: hello for name, (hello, _) in self._vanished.items()} | self._listed
        self._vanished = {
            name: self._vanished.get(name, (hello, until)) for name, hello in known.items() if name not in listed
        }
        self._listed = listed
        new = [hello for name, hello in listed.items() if name not in known or known[name].epoch != hello.epoch]
        lost = [life_of(known[hello.worker]) for hello in new if hello.worker in known]
        return new, lost

    def sweep(self, now: float) -> list[Peer]:
        """Lives that are over because they vanished and did not return."""
        lost = [life_of(hello) for hello, until in self._vanished.values() if now >= until]
        for life in lost:
            del self._vanished[life.name]
        return lost


class Way(enum.Enum):
    """To one life of a peer."""

    CLOSED = enum.auto()  # to be attached as soon as it can be
    OPEN = enum.auto()
    CUT = enum.auto()  # for good: a transfer cannot take back a Sever
    BARRED = enum.auto()  # for good: from what the two are it follows that nothing can be moved between them


@dataclass(slots=True)
class Link:
    hello: Hello
    way: Way
    attach_at: float  # not before
    is_broken: bool = False  # said so, and not yet mended for SETTLED_S
    fault: str | None = None  # why it is BARRED


class Links:
    """Which lives our ranks are attached to. Who writes must be, to write; who promises pages must be, to sever.

    A write job names its peer and not its epoch, and starts only after its step. So a new life of a name is attached
    when no job to an older life of it is open: such a job would land in the new one's pages.
    """

    def __init__(self, attach_s: float) -> None:
        self._attach_s = attach_s
        self._links: dict[str, Link] = {}  # by name, each listed peer once
        self._severed: OrderedDict[Peer, None] = OrderedDict()
        self._asked: set[Peer] = set()  # ordered to be severed, and not answered yet

    @property
    def is_isolated(self) -> bool:
        """Every peer that lives and can be reached at all was cut off. Only a new life of ours can reach them."""
        return {link.way for link in self._links.values()} - {Way.BARRED} == {Way.CUT}

    def find(self, life: Peer) -> Hello | None:
        """The peer, if our ranks are attached to this very life of it."""
        link = self._links.get(life.name)
        return link.hello if link and link.way is Way.OPEN and link.hello.epoch == life.epoch else None

    def meet(self, hello: Hello, now: float) -> None:
        way = Way.CUT if life_of(hello) in self._severed else Way.CLOSED
        self._links[hello.worker] = Link(hello, way, now)

    def part(self, life: Peer) -> None:
        """That life is over."""
        link = self._links.get(life.name)
        if link and link.hello.epoch == life.epoch:
            del self._links[life.name]

    def cut(self, life: Peer) -> list[Effect]:
        """Have that life severed, and know it as such from now on. Nothing is ordered while an answer is due."""
        link = self._links.get(life.name)
        if link and link.hello.epoch == life.epoch and link.way is not Way.BARRED:
            link.way = Way.CUT
        effects: list[Effect] = [] if life in self._severed else [Stamp(life.name, "severed", f"epoch {life.epoch}")]
        self._severed[life] = None
        self._severed.move_to_end(life)
        if len(self._severed) > MAX_SEVERED:
            self._severed.popitem(last=False)
        if life not in self._asked:
            self._asked.add(life)
            effects.append(Order(Sever(*life)))
        return effects

    def is_cut(self, life: Peer) -> bool:
        """For good: whoever pairs it with us should do so no more."""
        return life in self._severed

    def why_barred(self, life: Peer) -> str | None:
        """Why nothing can be moved to or from that life, or to a new one that is like it; None where that is not so."""
        link = self._links.get(life.name)
        return link.fault if link and link.hello.epoch == life.epoch else None

    def is_asked(self, life: Peer) -> bool:
        """The ranks were ordered to sever it, and not all have answered."""
        return life in self._asked

    def answered(self, life: Peer) -> None:
        self._asked.discard(life)

    def break_off(self, life: Peer, reason: str, *, now: float) -> list[Effect]:
        """The way to that life is broken; try again soon. Nothing, if it was not open."""
        if self.find(life) is None:
            return []
        link = self._links[life.name]
        link.way = Way.CLOSED
        link.attach_at = now + self._attach_s
        if link.is_broken:
            return []
        link.is_broken = True
        return [Stamp(life.name, "unreachable", f"{reason}; trying on")]

    def bar(self, life: Peer, reason: str) -> list[Effect]:
        """A rank has found that it can never reach that life: nobody tries again. Nothing, if that is known."""
        link = self._links.get(life.name)
        if link is None or link.hello.epoch != life.epoch or link.way in (Way.CUT, Way.BARRED):
            return []
        link.way, link.fault = Way.BARRED, reason
        return [Stamp(life.name, "barred", f"{reason}; a new life of it may do better")]

    def attach(self, has_open_jobs: Callable[[str], bool], now: float) -> list[Effect]:
        """Attach what can be attached. `has_open_jobs`: to any life of that name."""
        effects: list[Effect] = []
        for name, link in self._links.items():
            peer = link.hello
            if link.way is Way.OPEN and link.is_broken and now >= link.attach_at + SETTLED_S:
                link.is_broken = False
                effects.append(Stamp(name, "attached", f"epoch {peer.epoch}, again"))
            if link.way is not Way.CLOSED or now < link.attach_at or has_open_jobs(name):
                continue
            link.way = Way.OPEN
            effects.append(Order(Attach(name, peer.epoch, peer.layout, peer.shards, peer.endpoints)))
            if not link.is_broken:
                effects.append(Stamp(name, "attached", f"epoch {peer.epoch}"))
        return effects
