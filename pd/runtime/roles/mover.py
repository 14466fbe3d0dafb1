"""A rank's share of the KV transfer: from the leader's jobs to spans on a Transport, and back to WriteDone.

Owned by the rank's I/O thread. Knows peers, pages and jobs; requests are the leader's.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count

from pd.runtime.roles.checking import Checker, Counted
from pd.runtime.roles.packing import Packer, Part
from pd.runtime.roles.paths import Paths, Ways, cut, say
from pd.runtime.roles.streaming import layer_groups
from pd.runtime.wire.plans import (
    Attach,
    Digest,
    FromRank,
    PeerUnreachable,
    RankFailed,
    Sever,
    Severed,
    WriteDone,
    WriteJob,
)
from pd.transfer.digest import total
from pd.transfer.layout import KVLayout, Shard, check_can_meet, check_shards
from pd.transfer.many import plan
from pd.transfer.packed import End, Move, PackedWay
from pd.transfer.pairs import pair_up
from pd.transfer.plan import Route
from pd.transfer.transport import CannotMeet, JobDone, JobFailed, PeerLost, Span, TransferError, Transport

log = logging.getLogger("pd.rank")

_MAX_SAID = 1024


@dataclass(slots=True)
class _Life:
    """One life of a peer instance, and the ways from this rank to its ranks."""

    peer: str
    epoch: str
    routes: Ways
    reads: Ways  # the same the other way: from its pages into ours
    sent: tuple[Counted, ...]  # what a digest of what goes to it is made of
    groups: tuple[Ways, ...]  # `routes` cut into groups of layers
    rank_names: tuple[str, ...]


@dataclass(slots=True)
class _Share:
    """What is still in flight of one WriteJob."""

    job: int
    num_open: int = 1  # until all of it is given to the transport
    nbytes: int = 0
    seconds: float = 0.0
    error: str | None = None
    may_land: bool = False
    digest: int | None = None


@dataclass(slots=True)
class Mover:
    rank: int
    layout: KVLayout
    shards: tuple[Shard, ...]  # of our own instance, one a rank
    transport: Transport
    packer: Packer | None = None  # None: no staging, so that all is moved as it lies
    move: Move = "auto"
    checker: Checker | None = None  # None: digests are not to be had
    stream_layers: int | None = None  # layers of a group that goes ahead of those after it
    _lives: dict[str, _Life] = field(default_factory=dict)
    _owners: dict[str, _Life] = field(default_factory=dict)  # by the peer rank's transport name
    _streams: dict[int, tuple[_Share, _Life | None]] = field(default_factory=dict)  # by job: not all groups are there
    _shares: dict[int, _Share] = field(default_factory=dict)  # by the transport's job number
    _severed: set[tuple[str, str]] = field(default_factory=set)  # lives surely cut off
    _unsaid: set[str] = field(default_factory=set)  # whose way was not logged yet, by transport name
    _said: dict[str, str] = field(default_factory=dict)  # the latest ways, by transport name
    _numbers: Iterator[int] = field(default_factory=lambda: count(1))

    @property
    def is_busy(self) -> bool:
        """`poll` has something to do, whatever the transport says."""
        return self.checker is not None and self.checker.is_busy

    def attach(self, order: Attach) -> list[FromRank]:
        """Learn of a peer's life and begin to connect. An older life of the same name is forgotten."""
        names = tuple(rank_name(order.peer, order.epoch, rank) for rank in range(len(order.shards)))
        mine = self.shards[self.rank]
        try:
            check_can_meet(self.layout, order.layout, peer=order.peer)
            check_shards(order.layout, order.shards, peer=order.peer)
            if len(order.endpoints) != len(names):
                raise CannotMeet(f"{order.peer} has {len(names)} ranks, and tells endpoints of {len(order.endpoints)}")
            slot_nbytes = self.packer.slot_nbytes if self.packer is not None else None
            paths = Paths(End(self.layout, mine), order.layout, order.shards, names, slot_nbytes, self.move)
            own = [pair for pair in pair_up(self.shards, order.shards) if pair.src == self.rank]
            routes = paths.out(own)
            reads = paths.back(pair for pair in pair_up(order.shards, self.shards) if pair.dst == self.rank)
            groups = tuple(paths.out(some) for some in cut(own, layer_groups(mine.layers, self.stream_layers)))
            sent = self.checker.of_sent(own, order.layout.dtype) if self.checker is not None else ()
            for name, endpoint in zip(names, order.endpoints, strict=True):
                self.transport.connect(name, endpoint)
        except (TransferError, ValueError) as error:
            is_final = isinstance(error, CannotMeet | ValueError)  # it follows from what the two are
            return [PeerUnreachable(order.peer, order.epoch, str(error), is_final)]
        life = _Life(order.peer, order.epoch, routes, reads, sent, groups, names)
        known, self._lives[order.peer] = self._lives.get(order.peer), life
        self._owners.update(dict.fromkeys(names, life))
        self._unsaid.update(names)
        if known is None or known.epoch != order.epoch:  # a broken way is tried again and again
            say(order.peer, (*routes, *reads), self.move)
        self._say_ways()
        return []

    def sever(self, order: Sever) -> list[FromRank]:
        """Cut a life off. Asked again, it is looked at again: what was unclean may have died since."""
        names = [name for name, life in self._owners.items() if (life.peer, life.epoch) == (order.peer, order.epoch)]
        unclean = [name for name in names if not self.transport.sever(name)]
        if names and not unclean:
            for name in names:
                del self._owners[name]
            self._severed.add((order.peer, order.epoch))
            if (life := self._lives.get(order.peer)) and life.epoch == order.epoch:
                del self._lives[order.peer]
        is_clean = (order.peer, order.epoch) in self._severed  # of a life we were never told of nobody knows
        if is_clean and self.packer is not None:
            self.packer.settle((order.peer, order.epoch))
        return [Severed(order.peer, order.epoch, is_clean)]

    def start(self, job: WriteJob, *, is_read: bool = False) -> list[FromRank]:
        """Give this rank's share of `job` to the transport. A rank whose heads others send answers at once."""
        life = self._lives.get(job.peer)
        if life is None:
            return [WriteDone(job.job, f"peer {job.peer} is not attached", 0, 0.0)]
        share = _Share(job.job)
        self._give(share, life, job, ways=life.reads if is_read else life.routes, is_read=is_read)
        if job.is_digested:
            self._digest(share, job, of=life.sent)
        return self._given(share)

    def stream(self, job: WriteJob, group: int) -> list[FromRank]:
        """Give one more group of layers of this rank's share to the transport: from 0 on, and each."""
        if not group:
            self._streams[job.job] = (_Share(job.job), self._lives.get(job.peer))
        share, life = self._streams[job.job]
        if life is not None:
            self._give(share, life, job, ways=life.groups[group], is_read=False)
        if group + 1 < len(layer_groups(self.shards[self.rank].layers, self.stream_layers)):
            return self._begin()
        del self._streams[job.job]
        if life is None:
            share.error = f"peer {job.peer} is not attached"
        elif job.is_digested:
            self._digest(share, job, of=life.sent)
        return self._given(share)

    def digest(self, order: Digest) -> list[FromRank]:
        """Have a digest made: of what this rank would send, or (no peer) of all that it holds."""
        job, share = order.job, _Share(order.job.job)
        life = self._lives.get(job.peer)
        if order.is_own:
            of = self.checker.of_all() if self.checker is not None else ()
        elif life is None:
            return [WriteDone(job.job, f"peer {job.peer} is not attached", 0, 0.0)]
        else:
            of = life.sent
        self._digest(share, job, of=of)
        return self._given(share)

    def poll(self) -> list[FromRank]:
        """What the transport has ended since the last call, and digests that are made."""
        answers: list[FromRank] = []
        self._say_ways()
        for end in self.transport.poll():
            match end:
                case JobDone(job=number, nbytes=nbytes, seconds=seconds):
                    self._let_go(number, is_done=True)
                    answers += self._end(number, nbytes, seconds, None)
                case JobFailed(job=number, reason=reason, may_land=may_land):
                    self._let_go(number, is_done=False, may_land=may_land)
                    self._shares[number].may_land |= may_land
                    answers += self._end(number, 0, 0.0, reason)
                case PeerLost(peer=name, reason=reason):
                    if life := self._owners.get(name):
                        answers.append(PeerUnreachable(life.peer, life.epoch, reason))
        for number, digest in self.checker.turn() if self.checker is not None else ():
            self._shares[number].digest = total((self._shares[number].digest or 0, digest))
            answers += self._end(number, 0, 0.0, None)
        return answers + self._begin()

    def _digest(self, share: _Share, job: WriteJob, *, of: tuple[Counted, ...]) -> None:
        """Part of `share` until it is made."""
        share.digest = 0
        if self.checker is None or not of:
            return
        number = next(self._numbers)
        self._shares[number] = share
        share.num_open += 1
        self.checker.give(number, job, job.src_pages, of=of)

    def _give(self, share: _Share, life: _Life, job: WriteJob, *, ways: Ways, is_read: bool) -> None:
        """To the transport, or to staging before that."""
        move = self.transport.read if is_read else self.transport.write
        is_nothing = job.start == job.stop  # moved to know that all before it was
        for name, way in ways:
            if isinstance(way, PackedWay) and not is_nothing:
                self._pack(share, life, name, way=way, job=job)
                continue
            number = next(self._numbers)
            try:
                spans: Sequence[Span] = ()
                if isinstance(way, Route) and not is_nothing:
                    spans = plan(way, job.src_pages, job.dst_pages, job.start, job.stop)
                move(name, spans, job=number)
            except (TransferError, ValueError) as error:
                share.error = share.error or str(error)
            else:
                share.num_open += 1
                self._shares[number] = share

    def _given(self, share: _Share) -> list[FromRank]:
        """All of it was given, and some may have ended already."""
        share.num_open -= 1
        return self._begin() if share.num_open else [_done(share)]

    def _pack(self, share: _Share, life: _Life, name: str, *, way: PackedWay, job: WriteJob) -> None:
        """To staging, in as many parts as it takes."""
        assert self.packer is not None, "a packed way needs staging"
        ours, theirs = (job.dst_pages, job.src_pages) if way.is_read else (job.src_pages, job.dst_pages)
        for tokens in way.parts(job.stop - job.start):
            number = next(self._numbers)
            self._shares[number] = share
            share.num_open += 1
            self.packer.give(Part(number, name, (life.peer, life.epoch), way, tokens, ours, theirs))

    def _begin(self) -> list[FromRank]:
        """Start what staging has room for."""
        if self.packer is None:
            return []
        answers = [answer for number, why in self.packer.begin() for answer in self._end(number, 0, 0.0, why)]
        if self.packer.staging.is_stuck:
            fault = "lost peers may still write to all of staging; a new life of this instance has it free"
            return [*answers, RankFailed(self.rank, fault, "", False)]
        return answers

    def _let_go(self, number: int, *, is_done: bool, may_land: bool = False) -> None:
        if self.packer is not None:
            self.packer.end(number, is_done=is_done, may_land=may_land)

    def _say_ways(self) -> None:
        """Log once how KV goes to each peer rank: a slow way that nobody told of is this field's known wound."""
        for name in list(self._unsaid):
            try:
                way = self.transport.describe(name)
            except TransferError:  # lost or severed meanwhile
                self._unsaid.discard(name)
                continue
            if way is None:
                continue
            self._unsaid.discard(name)
            if self._said.get(name) != way:  # one that died is attached again and again, until the router has lost it
                log.info("KV to %s goes by %s", name, way)
                self._said[name] = way
            if len(self._said) > _MAX_SAID:
                del self._said[next(iter(self._said))]

    def _end(self, number: int, nbytes: int, seconds: float, error: str | None) -> list[FromRank]:
        share = self._shares.pop(number)
        share.num_open -= 1
        share.nbytes += nbytes
        share.seconds = max(share.seconds, seconds)
        share.error = share.error or error
        return [] if share.num_open else [_done(share)]


def rank_name(worker: str, epoch: str, rank: int) -> str:
    """A rank's name among transports: one a process life."""
    return f"{worker}.{epoch}.{rank}"


def _done(share: _Share) -> WriteDone:
    return WriteDone(share.job, share.error, share.nbytes, share.seconds, share.may_land, share.digest)
