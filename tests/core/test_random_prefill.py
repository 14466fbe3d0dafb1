"""A prefill brain under random schedules: its ranks, peers and router do anything, in any order."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from brains import PAGE, Instance, answer, chains, hello, prefill_for, said, ticket_of

from pd.runtime.core.events import Effect, Peer
from pd.runtime.wire.messages import (
    Cancel,
    Cancelled,
    Failed,
    Fenced,
    FirstToken,
    Hello,
    Landed,
    Prefill,
    Refused,
    Stop,
)
from pd.runtime.wire.plans import Attach, PeerUnreachable, Sever, WriteJob
from pd.runtime.wire.values import Handle, Role


@pytest.mark.parametrize("seed", range(30))
def test_its_word_to_a_peer_is_true_and_all_pages_come_back(seed: int) -> None:
    world = World(seed)
    for _ in range(350):
        world.turn()
    for _ in range(20):
        world.settle()
        world.me.wait(5.0)
    assert world.me.brain.is_idle(), f"seed {seed}: {world.me.brain.load()}"
    assert max(world.num_endings.values()) == 1, f"seed {seed}: {world.num_endings.most_common(3)}"
    assert world.num_landed > 10, f"seed {seed}: only {world.num_landed} landed"
    for handle, request in world.requests.items():
        assert world.num_endings[handle] or handle in world.cancelled or handle in world.landed, (
            f"seed {seed}: nobody heard of {request.handle} again"
        )


class World:
    """Two decode instances, which die and return; a router; ranks that write when told."""

    def __init__(self, seed: int) -> None:
        self.dice = random.Random(seed)
        self.me = Instance(
            Role.PREFILL,
            num_pages=self.dice.choice((12, 24)),
            num_ranks=self.dice.choice((1, 2)),
            max_waiting=6,
        )
        self.me.watch = self.watch
        self.num_lives = 0
        self.peers = {name: self.new_life(name) for name in ("d0", "d1")}
        self.requests: dict[Handle, Prefill] = {}
        self.owners: dict[int, Handle] = {}  # of pages promised by the peers; each page is promised once
        self.attached: dict[str, str] = {}  # what the ranks hold: peer -> epoch
        self.cells: dict[tuple[int, int], int] = {}  # the peers' pools
        self.quiet: set[Handle] = set()  # it was said that no write comes
        self.landed: set[Handle] = set()
        self.cancelled: set[Handle] = set()
        self.num_endings: Counter[Handle] = Counter()
        self.me.meet(*self.peers.values())

    @property
    def num_landed(self) -> int:
        return len(self.landed)

    def new_life(self, name: str) -> Hello:
        self.num_lives += 1
        return hello(name, Role.DECODE, epoch=f"e{self.num_lives}")

    def turn(self) -> None:
        dice, me = self.dice, self.me
        match dice.choice(("new", "new", "step", "step", "step", "write", "write", "write", "cancel", "odd")):
            case "new":
                self.submit()
            case "step" if me.flying:
                me.step()
            case "write" if me.jobs:
                self.end_job(dice.choice(me.jobs))
            case "cancel" if self.requests and dice.random() < 0.3:
                handle = dice.choice(list(self.requests))
                self.cancelled.add(handle)
                assert said(me.router(Cancel(handle, "left")), Cancelled) == [Cancelled(handle)]
            case "odd" if dice.random() < 0.3:
                self.odd()
            case "odd":
                self.restart_severed()
        me.wait(dice.choice((0.0, 0.1, 0.1, 1.0)))

    def settle(self) -> None:
        while self.me.flying or self.me.jobs:
            if self.me.flying:
                self.me.step()
            else:
                self.end_job(self.me.jobs[0])

    def submit(self) -> None:
        dice = self.dice
        if self.requests and dice.random() < 0.1:  # a repeated message
            self.me.router(self.requests[dice.choice(list(self.requests))])
            return
        num_tokens = dice.choice((1, 3, 4, 5, 7, 8, 9, 16, 17, 30))
        ticket = None
        if dice.random() < 0.9:
            peer = dice.choice(list(self.peers.values()))
            ticket = ticket_of(peer, num_tokens, first_page=1 + max(self.owners, default=0))
        request = prefill_for(
            f"{'x' * dice.randrange(3)}{len(self.requests)}",
            num_tokens,
            ticket=ticket,
            max_tokens=8 if ticket else 1,
            stop_token_ids=(1, 2, 3),
        )
        self.requests[request.handle] = request
        self.owners.update(dict.fromkeys(ticket.pages if ticket else (), request.handle))
        self.me.router(request)

    def restart_severed(self) -> None:
        for name, peer in self.peers.items():
            if self.attached.get(name) != peer.epoch:
                self.peers[name] = self.new_life(name)
        self.me.meet(*self.peers.values())

    def odd(self) -> None:
        dice, me = self.dice, self.me
        name = dice.choice(("d0", "d1"))
        match dice.choice(("replaced", "vanished", "broken", "unknown", "stop")):
            case "replaced":
                self.peers[name] = self.new_life(name)
                me.meet(*self.peers.values())
            case "vanished":
                me.meet(*(peer for peer in self.peers.values() if peer.worker != name))
                me.wait(dice.choice((1.0, 4.0)))
                me.meet(*self.peers.values())
            case "broken":
                me.rank(PeerUnreachable(name, self.peers[name].epoch, "broken"))
            case "unknown":
                handle = Handle(f"unknown{dice.randrange(99)}", 1)
                answers = me.peer(Peer(name, self.peers[name].epoch), Stop(handle))
                assert [each.handle for each in said(answers, Fenced)] == [handle]
            case "stop" if self.owners:
                handle = dice.choice(list(self.owners.values()))
                ticket = self.requests[handle].ticket
                me.peer(Peer(ticket.decode, ticket.epoch), Stop(handle))

    def end_job(self, job: WriteJob) -> None:
        """As a rank's Mover: it writes to the life it is attached to, whichever the brain meant."""
        handle = self.owners[job.dst_pages[0]]
        epoch = self.attached.get(job.peer)
        assert epoch in (None, self.requests[handle].ticket.epoch), f"{handle} is written to another life"
        error = None if epoch and self.dice.random() > 0.05 else "broken"
        if error is None:
            for position in range(job.start, job.stop):
                source = self.me.ranks.cell(job.src_pages, position - job.start)
                page = job.dst_pages[(position - job.start) // PAGE]
                self.cells[page, position % PAGE] = self.me.ranks.cells[source]
        self.me.end_job(job, error)

    def watch(self, effects: list[Effect]) -> None:
        for order in said(effects, Sever):
            if self.attached.get(order.peer) == order.epoch:
                del self.attached[order.peer]
        for order in said(effects, Attach):
            self.attached[order.peer] = order.epoch
        for first in said(effects, FirstToken):
            request = self.requests[first.handle]
            assert (first.position, first.token.id) == (len(request.tokens), answer(request, 64)[0][0])
            self.num_endings[first.handle] += first.finish is not None
        self.num_endings.update(failed.handle for failed in said(effects, Failed))
        self.num_endings.update(refused.handle for refused in said(effects, Refused))
        for word in [*said(effects, Landed), *said(effects, Fenced)]:
            self.quiet.add(word.handle)
        for word in said(effects, Landed):
            self.check_landed(word)
        for job in [*self.me.jobs, *(job for plan in self.me.flying for job in plan.writes)]:
            assert self.owners[job.dst_pages[0]] not in self.quiet, f"{job} comes after the word that none will"

    def check_landed(self, word: Landed) -> None:
        request = self.requests[word.handle]
        self.landed.add(word.handle)
        assert (word.position, word.token.id) == (len(request.tokens), answer(request, 64)[0][0])
        for position, expected in enumerate(chains(request.tokens)):
            found = self.cells.get((request.ticket.pages[position // PAGE], position % PAGE))
            assert found == expected, f"{word.handle} landed without position {position}"
