"""One-sided writes between pools: they read when they land, they land late, and only severing stops them.

A read is the same the other way: who begins it is who is written to. It ends with its process, and when it fails; but
where nobody can be severed and its peer has died, what the network has of it may come late.

Packed, a part lands out of the slot that it is in, or (read) in that slot.

The watch over pages is here too: a page that a write may still reach must not be given to anybody else.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pd.runtime.core.events import Peer
from pd.runtime.wire.plans import WriteJob
from pd.runtime.wire.values import Handle
from tests.cluster.clock import Clock
from tests.cluster.scenario import Odds
from tests.cluster.trace import Violation

if TYPE_CHECKING:
    from tests.cluster.ranks import Ranks

Ended = Callable[[str | None, bool], None]
"""Told to the leader: why the write failed, or None; and whether bytes of it may land all the same."""


@dataclass(frozen=True, slots=True)
class Claim:
    """A page promised by a ticket."""

    handle: Handle
    writer: Peer


@dataclass(eq=False)
class Write:
    """One rank's share of a job: its heads of the job's tokens. Planned, then under way, then over."""

    job: WriteJob
    rank: int
    mover: Ranks  # whose rank it is
    peer: Ranks | None  # None: no life of that name was attached
    ended: Ended
    is_read: bool = False
    half: int | None = None  # of a job that is streamed: its even tokens, or its odd ones
    part: range | None = None  # of a job that is packed: what fits a slot
    number: int | None = None  # among its rank's parts, from when it waits for a slot
    image: list[list[int]] | None = None  # its slot, by head and token
    has_started: bool = False
    is_orphan: bool = False  # its end was told, or nobody is left to tell; the network still has it
    is_over: bool = False
    heads: tuple[int, ...] = field(default=())

    def __post_init__(self) -> None:
        self.heads = tuple(self.mover.heads_of(self.rank))

    @property
    def tokens(self) -> range:
        return self.part or range(self.job.start, self.job.stop)

    def has(self, token: int) -> bool:
        return self.half is None or token % 2 == self.half

    def page_of(self, token: int, ranks: Ranks) -> int:
        """Of the source, or of the target."""
        pages = self.job.src_pages if ranks is self.source else self.job.dst_pages
        return pages[(token - self.job.start) // ranks.page_size]

    def check_claim(self, page: int) -> None:
        """Raises Violation if that page of the target was not promised to this write."""
        source, target = self.source, self.target
        assert source is not None and target is not None
        claim = target.owners.get(page)
        if not isinstance(claim, Claim) or claim.writer != source.life:
            raise Violation(f"job {self.job.job} of {source.life} lands in page {page} of {target.life}: {claim}")

    @property
    def source(self) -> Ranks | None:
        return self.peer if self.is_read else self.mover

    @property
    def target(self) -> Ranks | None:
        return self.mover if self.is_read else self.peer


class DataPlane:
    def __init__(
        self,
        clock: Clock,
        rng: random.Random,
        odds: Odds,
        *,
        can_sever: bool,
        find: Callable[[Peer], Ranks],
    ) -> None:
        """`find`: the ranks of a life, dead or alive."""
        self.odds = odds
        self.can_sever = can_sever
        self.find = find
        self.happened: Counter[str] = Counter()
        self.is_cut: Callable[[str, str], bool] = lambda one, other: False  # by a partition, now
        self._clock = clock
        self._rng = rng
        self._open: list[Write] = []

    def plan(self, write: Write) -> None:
        """The leader has launched the plan that the write rides on: from now on it may come."""
        self._open.append(write)

    def start(self, write: Write) -> None:
        """The step before it is done: let the bytes move."""
        rng = self._rng
        if write.is_over:
            return
        write.has_started = True
        write.peer = write.mover.peer_of(write.rank, write.job.peer)
        if write.peer is None:
            return self._end(write, f"{write.job.peer} is not attached")
        if not write.peer.is_alive:
            return self._fail_or_hang(write, "the peer is dead")
        if self._is_severed(write):
            return self._fail_or_hang(write, "cut off by the peer")
        if self.is_cut(write.mover.life.name, write.job.peer):
            self.happened["write cut off"] += 1
            return self._fail_or_hang(write, "no way to the peer")
        self._renew(write)
        if rng.random() < self.odds.write_error:
            self.happened["write error"] += 1
            return self._clock.after(rng.uniform(0.0, 0.05), self._break, write)
        seconds = rng.expovariate(1.0 / self.odds.write_s) * write.mover.slowness()
        if rng.random() < self.odds.spike:
            seconds += rng.uniform(0.0, 0.6)
        tokens = write.tokens
        middle = tokens[rng.randrange(len(tokens) + 1) :] if len(tokens) > 1 else tokens
        first = range(tokens.start, middle.start if middle else tokens.stop)
        self._clock.after(seconds * 0.5, self._land, write, first)
        if rng.random() < self.odds.lost_completion:  # it lands, soon or late, and nobody is told
            self.happened["lost completion"] += 1
            return self._clock.after(seconds + rng.uniform(0.0, 2.5), self._land, write, middle)
        self._clock.after(seconds, self._finish, write, middle)

    def sever_outward(self, source: Ranks, rank: int, peer: Peer) -> None:
        """A rank cuts a peer off: its own jobs with it fail, and move no more."""
        for write in [w for w in self._open if w.mover is source and w.rank == rank and w.has_started]:
            if write.peer is not None and write.peer.life == peer:
                self._lose(write, "severed here")

    def sever_inward(self, target: Ranks, peer: Peer) -> bool:
        """Whether nothing of `peer` can write into these pools any more."""
        if self.can_sever:
            return True
        writers = (w.source for w in self._open if w.target is target and (w.has_started or not w.is_read))
        return not self.find(peer).is_alive and all(each is None or each.life != peer for each in writers)

    def lose_process(self, ranks: Ranks) -> None:
        """A process dies. What its network card has begun may land all the same, for a while."""
        for write in [w for w in self._open if w.mover is ranks]:
            if write.is_read or not write.has_started or self._rng.random() < 0.2:
                self._end(write, None)
            else:
                write.is_orphan = True
                self._clock.after(self._rng.uniform(0.0, 2.5), self._land_last, write)
        for write in [w for w in self._open if w.peer is ranks and w.has_started]:
            if write.is_read:
                self._lose(write, "the peer died")
            else:
                self._fail_or_hang(write, "the peer died")

    def reaching(self, target: Ranks) -> Iterator[Write]:
        """Writes that may still reach pages of it."""
        for write in self._open:
            if write.target is target and (write.is_read or not self._is_severed(write)):
                yield write

    def is_moving(self, ranks: Ranks) -> bool:
        """Bytes are under way from or to these."""
        return any(write.has_started and ranks in (write.mover, write.peer) for write in self._open)

    def num_open(self) -> int:
        return len(self._open)

    def _land(self, write: Write, tokens: range) -> None:
        target, source = write.target, write.source
        if write.is_over or target is None or source is None or not target.is_alive or self._is_severed(write):
            return
        if write.is_read and not source.is_alive and not write.is_orphan:
            return
        for token in tokens:
            if write.has(token):
                self._land_one(write, token, source, target=target)
        if tokens and self.odds.corrupt and self._rng.random() < self.odds.corrupt:
            token, head = self._rng.choice(tokens), self._rng.choice(write.heads)
            target.pool[head][write.page_of(token, target)][token % target.page_size] ^= 1

    def _land_one(self, write: Write, token: int, source: Ranks, *, target: Ranks) -> None:
        at, to_page, from_page = token - write.tokens.start, write.page_of(token, target), write.page_of(token, source)
        if write.image is None or not write.is_read:
            write.check_claim(to_page)
        for index, head in enumerate(write.heads):
            value = source.pool[head][from_page][token % source.page_size]
            if write.image is None:
                target.pool[head][to_page][token % target.page_size] = value
            elif write.is_read:
                write.image[index][at] = value
            else:
                target.pool[head][to_page][token % target.page_size] = write.image[index][at]

    def _finish(self, write: Write, tokens: range) -> None:
        if write.is_over or write.is_orphan:
            return
        if write.peer is not None and (not write.peer.is_alive or self._is_severed(write)):
            return self._fail_or_hang(write, "cut off by the peer")
        self._land(write, tokens)
        self._end(write, None)

    def _land_last(self, write: Write) -> None:
        """What a dead process had begun comes to its end, whoever owns the pages by now."""
        if not write.is_over:
            self.happened["late write"] += 1
            self._land(write, write.tokens)
            self._end(write, None)

    def _break(self, write: Write) -> None:
        if write.is_over or write.is_orphan:
            return
        if self._rng.random() < self.odds.unreachable and write.peer is not None:
            self._lose(write, "injected: peer lost")
            write.mover.say_unreachable(write.rank, write.peer.life)
        else:
            self._end(write, "injected")

    def _lose(self, write: Write, error: str) -> None:
        """It fails, and what the network has of it may land or not: nobody confirmed that it ended.

        What cannot be severed is shared memory, where there is no network and no such doubt of a write; or a library,
        which has of a read what its dead peer has sent.
        """
        if write.is_orphan:
            return
        is_doubtful = self.can_sever
        if write.is_read:
            is_doubtful = not self.can_sever and write.source is not None and not write.source.is_alive
        if not is_doubtful or self._rng.random() < 0.3:
            self._end(write, error)
            return
        self.happened["read in doubt" if write.is_read else "write in doubt"] += 1
        write.is_orphan = True
        write.ended(error, True)
        last_s = self._rng.uniform(0.0, 2.5)
        if write.image is not None and write.is_read:  # bit by bit, whoever has that slot by then
            for _ in range(8):
                self._clock.after(last_s * self._rng.random(), self._land, write, write.tokens)
        self._clock.after(last_s, self._land_last, write)

    def _renew(self, write: Write) -> None:
        """The peer has confirmed a connection before the first byte moves: what lower ones had is over."""
        for other in [w for w in self._open if w.is_orphan and w.mover is write.mover]:
            if other.peer is write.peer and other.rank == write.rank:
                self._end(other, None)

    def _fail_or_hang(self, write: Write, why: str) -> None:
        if self._rng.random() < 0.7:
            self._clock.after(self._rng.uniform(0.0, 0.3), self._end, write, why)

    def _end(self, write: Write, error: str | None) -> None:
        if write.is_over:
            return
        write.is_over = True
        self._open.remove(write)
        if not write.is_orphan:
            write.ended(error, False)

    def _is_severed(self, write: Write) -> bool:
        peer = write.peer
        return peer is not None and any(write.mover.life in peer.severed[peer.rank_of(head)] for head in write.heads)
