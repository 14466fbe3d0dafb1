"""Decode and colocated brains under random schedules: their ranks, peers and router do anything, in any order."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field

import pytest
from brains import Instance, answer, hello, prefill_for, reserve_for, said, sample

from pd.runtime.core.events import Effect, Exit, Peer
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
    Reserve,
    Reserved,
    Stop,
    Tokens,
)
from pd.runtime.wire.plans import Sever, Severed
from pd.runtime.wire.values import Finish, Handle, Role, Ticket, Token

LENGTHS = (1, 3, 4, 5, 7, 8, 9, 16, 17, 30)


@dataclass
class Told:
    """What the router heard of each attempt."""

    tokens: dict[Handle, list[int]] = field(default_factory=dict)
    finish: dict[Handle, Finish] = field(default_factory=dict)
    failed: dict[Handle, str] = field(default_factory=dict)
    num_endings: Counter[Handle] = field(default_factory=Counter)

    def hear(self, effects: list[Effect], start: dict[Handle, int]) -> None:
        for first in said(effects, FirstToken):
            self._take(first.handle, first.position, (first.token,), first.finish, start)
        for message in said(effects, Tokens):
            for each in message.progress:
                self._take(each.handle, each.position, each.tokens, each.finish, start)
        for failed in said(effects, Failed):
            self.failed[failed.handle] = failed.reason
            self.num_endings[failed.handle] += 1

    def _take(
        self,
        handle: Handle,
        position: int,
        tokens: tuple[Token, ...],
        finish: Finish | None,
        start: dict[Handle, int],
    ) -> None:
        got = self.tokens.setdefault(handle, [])
        assert position == start[handle] + len(got), f"{handle} is at {position} after {len(got)} tokens"
        assert not self.num_endings[handle], f"{handle} goes on after its end"
        got += [token.id for token in tokens]
        if finish is not None:
            self.finish[handle] = finish
            self.num_endings[handle] += 1


@pytest.mark.parametrize("seed", range(30))
def test_a_decode_brain_answers_right_and_gives_back_no_page_that_a_peer_may_write(seed: int) -> None:
    world = DecodeWorld(seed)
    while world.num_turns < 300 and not world.exits:
        world.turn()
    if world.exits:  # more than half of the pool: an instance that cannot serve starts again
        assert "quarantined" in world.exits[0].reason and len(world.exits) == 1
        return
    world.is_calm = True
    for _ in range(20):
        for handle in list(world.promised):
            world.end_promise(handle)
        world.me.settle()
        world.answer_severs()
        world.me.wait(5.0)
    assert world.me.brain.is_idle(), f"seed {seed}: {world.me.brain.load()}"
    assert max(world.told.num_endings.values()) == 1, f"seed {seed}: {world.told.num_endings.most_common(3)}"
    finished = [handle for handle in world.told.finish if world.told.finish[handle]]
    assert len(finished) > 4, f"seed {seed}: only {len(finished)} finished"
    for handle in finished:
        tokens, finish = answer(world.requests[handle], 64)
        assert (tuple(world.told.tokens[handle]), world.told.finish[handle]) == (tokens[1:], finish), f"seed {seed}"
    for handle in world.landed:
        assert world.told.num_endings[handle] or handle in world.cancelled, f"seed {seed}: {handle} is forgotten"


class DecodeWorld:
    """Two prefill instances, which write what was promised to them, die, and are severed; and a router."""

    def __init__(self, seed: int) -> None:
        self.dice = random.Random(seed)
        self.me = Instance(
            Role.DECODE,
            num_pages=self.dice.choice((12, 24)),
            num_ranks=self.dice.choice((1, 2)),
            max_running=self.dice.choice((2, 8)),
        )
        self.me.watch = self.watch
        self.num_turns = 0
        self.is_calm = False
        self.num_lives = 0
        self.peers = {name: self.new_life(name) for name in ("p0", "p1")}
        self.requests: dict[Handle, Reserve] = {}
        self.promised: dict[Handle, Ticket] = {}  # the peer may write these pages
        self.landed: set[Handle] = set()
        self.cancelled: set[Handle] = set()
        self.severs: list[tuple[Sever, int]] = []  # and the rank that has not answered
        self.told = Told()
        self.exits: list[Exit] = []
        self.me.meet(*self.peers.values())

    def new_life(self, name: str) -> Hello:
        self.num_lives += 1
        return hello(name, Role.PREFILL, epoch=f"e{self.num_lives}")

    def turn(self) -> None:
        self.num_turns += 1
        dice, me = self.dice, self.me
        acts = ("new", "new", "step", "step", "step", "write", "end", "end", "cancel", "odd", "sever")
        match dice.choice(acts):
            case "new":
                self.reserve()
            case "step" if me.flying:
                me.step()
            case "write" if self.promised:
                self.write(dice.choice(list(self.promised)))
            case "end" if self.promised:
                self.end_promise(dice.choice(list(self.promised)))
            case "cancel" if self.requests and dice.random() < 0.3:
                handle = dice.choice(list(self.requests))
                self.cancelled.add(handle)
                assert said(me.router(Cancel(handle, "left")), Cancelled) == [Cancelled(handle)]
            case "sever":
                self.answer_severs()
            case "odd" if dice.random() < 0.2:
                name = dice.choice(("p0", "p1"))
                self.peers[name] = self.new_life(name)
                me.meet(*self.peers.values())
        me.wait(dice.choice((0.0, 0.1, 0.1, 1.0)))

    def reserve(self) -> None:
        dice = self.dice
        if self.requests and dice.random() < 0.1:  # a repeated message
            self.me.router(self.requests[dice.choice(list(self.requests))])
            return
        peer = dice.choice(list(self.peers.values()))
        request = reserve_for(
            f"{'x' * dice.randrange(3)}{len(self.requests)}",
            dice.choice(LENGTHS),
            life=Peer(peer.worker, peer.epoch),
            deadline_s=dice.choice((5.0, 30.0)),
            max_tokens=dice.choice((2, 9, 16)),
            stop_token_ids=(1, 2),
        )
        self.requests[request.handle] = request
        self.me.router(request)

    def write(self, handle: Handle) -> None:
        """All of it, at any moment while the promise holds: also after the router gave up."""
        request, ticket = self.requests[handle], self.promised[handle]
        self.me.ranks.receive(request.tokens, ticket)

    def end_promise(self, handle: Handle) -> None:
        """The writer says its last word, or is dead; a late or lost one is said again."""
        request = self.requests[handle]
        life = Peer(request.prefill, request.prefill_epoch)
        self.write(handle)
        is_dead = self.peers[life.name].epoch != life.epoch
        if is_dead or (self.dice.random() < 0.2 and not self.is_calm):
            return
        num_pages = len(self.promised.pop(handle).pages)
        first = sample(request.tokens)
        if first in request.sampling.stop_token_ids or self.dice.random() < 0.2:
            self.me.peer(life, Fenced(handle, "it ended there"))
            return
        self.landed.add(handle)
        for _ in range(self.dice.choice((1, 2))):
            self.me.peer(life, Landed(handle, len(request.tokens), Token(first), num_pages))

    def answer_severs(self) -> None:
        """Each rank, in any order; a dead peer's are clean some time, a living one's never."""
        while self.severs:
            order, rank = self.severs.pop(self.dice.randrange(len(self.severs)))
            is_dead = self.peers[order.peer].epoch != order.epoch
            is_clean = is_dead and (self.is_calm or self.dice.random() < 0.7)
            if is_clean and not any((order.peer, order.epoch) == (each.peer, each.epoch) for each, _ in self.severs):
                for handle in list(self.promised):
                    request = self.requests[handle]
                    if (request.prefill, request.prefill_epoch) == (order.peer, order.epoch):
                        del self.promised[handle]
            self.me.rank(Severed(order.peer, order.epoch, is_clean), rank)

    def watch(self, effects: list[Effect]) -> None:
        self.exits += said(effects, Exit)
        self.severs += [(order, rank) for order in said(effects, Sever) for rank in range(self.me.settings.num_ranks)]
        self.told.hear(effects, {handle: len(request.tokens) + 1 for handle, request in self.requests.items()})
        for reserved in said(effects, Reserved):
            taken = {page for ticket in self.promised.values() for page in ticket.pages}
            assert not taken & set(reserved.ticket.pages), f"{reserved} are pages that a peer may write"
            self.promised[reserved.handle] = reserved.ticket
        for refused in said(effects, Refused):
            assert refused.retry_after_s is not None, f"{refused}"
        for stop in said(effects, Stop):
            assert stop.handle in self.requests


@pytest.mark.parametrize("seed", range(30))
def test_a_colocated_brain_answers_right_with_any_prefix_cached_and_any_preempted(seed: int) -> None:
    dice = random.Random(seed)
    me = Instance(
        Role.COLOCATED,
        num_pages=dice.choice((12, 16, 40)),
        num_ranks=dice.choice((1, 2)),
        max_running=dice.choice((3, 8)),
        max_prefill_tokens=dice.choice((1, 4, 9)),
    )
    requests: dict[Handle, Prefill] = {}
    cancelled: set[Handle] = set()
    told = Told()
    me.watch = lambda effects: told.hear(effects, {handle: len(each.tokens) for handle, each in requests.items()})
    for _ in range(400):
        act = dice.choice(("new", "step", "step", "step", "cancel"))
        if act == "new":
            request = prefill_for(
                f"{'x' * dice.randrange(2)}{len(requests):03}",
                dice.choice(LENGTHS),
                max_tokens=dice.choice((1, 2, 9, 16)),
                stop_token_ids=(1, 2),
            )
            requests[request.handle] = request
            me.router(request)
        elif act == "step" and me.flying:
            me.step()
        elif act == "cancel" and requests and dice.random() < 0.3:
            cancelled.add(handle := dice.choice(list(requests)))
            me.router(Cancel(handle, "left"))
        me.wait(dice.choice((0.0, 0.1)))
    me.settle()
    assert me.brain.is_idle(), f"seed {seed}: {me.brain.load()}"
    assert len(told.finish) > 20, f"seed {seed}: only {len(told.finish)} finished"
    for handle, request in requests.items():
        assert told.num_endings[handle] == 1 or handle in cancelled, f"seed {seed}: {handle} has no ending"
        if handle in told.finish:
            expected = answer(request, 64)
            assert (tuple(told.tokens[handle]), told.finish[handle]) == expected, f"seed {seed}: {handle}"
