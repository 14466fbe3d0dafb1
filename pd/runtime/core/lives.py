"""The other role's instances as the router lists them, and the ways to those we write to. Pure."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from pd.runtime.core.events import Effect, Order, Peer, Stamp
from pd.runtime.wire.messages import Attach, Hello, Sever

MAX_SEVERED = 4096
"""Severed lives remembered. Only the latest could still be asked for."""


def life_of(hello: Hello) -> Peer:
    return Peer(hello.worker, hello.epoch)


class Lives:
    """Who lives.

    A life that another epoch of its name replaces is over at once. One that only vanishes from the list has
    `vanished_s` to return: a restarted router hears of its instances one after the other.
    A severed life stays severed, whatever is said of it later: the transfer cannot undo it.
    """

    def __init__(self, vanished_s: float) -> None:
        self._vanished_s = vanished_s
        self._listed: dict[str, Hello] = {}
        self._vanished: dict[str, tuple[Hello, float]] = {}  # and until when it may return
        self._severed: OrderedDict[Peer, None] = OrderedDict()

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

    def is_severed(self, life: Peer) -> bool:
        return life in self._severed

    def sever(self, life: Peer) -> None:
        self._severed[life] = None
        self._severed.move_to_end(life)
        if len(self._severed) > MAX_SEVERED:
            self._severed.popitem(last=False)


@dataclass(slots=True)
class Link:
    """Our ranks' way to one life of a peer."""

    hello: Hello
    is_attached: bool
    attach_at: float  # not before


class Links:
    """Attached peers by name.

    A write job names its peer and not its epoch, and starts only after its step. So a new life of a name is attached
    when no job to an older life of it is open: such a job would land in the new one's pages.
    """

    def __init__(self, attach_s: float, has_open_jobs: Callable[[str], bool]) -> None:
        self._attach_s = attach_s
        self._has_open_jobs = has_open_jobs
        self._links: dict[str, Link] = {}

    def find(self, life: Peer) -> Hello | None:
        """The peer, if this very life of it can be written to."""
        link = self._links.get(life.name)
        return link.hello if link and link.is_attached and link.hello.epoch == life.epoch else None

    def meet(self, hello: Hello, now: float) -> None:
        self._links[hello.worker] = Link(hello, is_attached=False, attach_at=now)

    def part(self, life: Peer) -> list[Effect]:
        """That life is over: cut it off, so that open jobs fail and nothing is kept for it."""
        link = self._links.get(life.name)
        if link and link.hello.epoch == life.epoch:
            del self._links[life.name]
        return [Order(Sever(*life)), Stamp(life.name, "lost", f"epoch {life.epoch}")]

    def break_off(self, life: Peer, reason: str, *, now: float) -> list[Effect]:
        """The way to that life is broken; try again soon. Nothing, if that is known already."""
        if self.find(life) is None:
            return []
        link = self._links[life.name]
        link.is_attached = False
        link.attach_at = now + self._attach_s
        return [Stamp(life.name, "unreachable", reason)]

    def sweep(self, now: float) -> list[Effect]:
        """Attach what can be attached."""
        effects: list[Effect] = []
        for name, link in self._links.items():
            if link.is_attached or now < link.attach_at or self._has_open_jobs(name):
                continue
            link.is_attached = True
            peer = link.hello
            effects.append(Order(Attach(name, peer.epoch, peer.layout, peer.shards, peer.endpoints)))
            effects.append(Stamp(name, "attached", f"epoch {peer.epoch}"))
        return effects
