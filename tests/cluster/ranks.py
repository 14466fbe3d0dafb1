"""The ranks of one instance: they run plans over a pool of hash chains, move pages, and answer late."""

from __future__ import annotations

import itertools
import random
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from pd.runtime.core.events import Peer
from pd.runtime.core.ranks import DIGESTS
from pd.runtime.wire.messages import Reserve
from pd.runtime.wire.plans import (
    Attach,
    Chunk,
    Digest,
    FromRank,
    PeerUnreachable,
    Sever,
    Severed,
    StepDone,
    StepPlan,
    Transfer,
    WriteDone,
    WriteJob,
)
from pd.runtime.wire.values import Handle, Sampling, Token
from tests.cluster.clock import Clock
from tests.cluster.model import kv_value, sample, token_at
from tests.cluster.packing import Packing
from tests.cluster.scenario import Instance
from tests.cluster.trace import Violation
from tests.cluster.writes import Claim, DataPlane, Ended, Write

Hear = Callable[[int, FromRank], None]


@dataclass(slots=True)
class Pieces:
    """Of a share that is streamed or packed: it ends with the last of them, and fails if one did."""

    ended: Ended
    num_left: int
    error: str | None = None
    may_land: bool = False

    def end(self, error: str | None, may_land: bool) -> None:
        self.num_left -= 1
        self.error, self.may_land = self.error or error, self.may_land or may_land
        if not self.num_left:
            self.ended(self.error, self.may_land)


@dataclass(eq=False, slots=True)
class Slot:
    tokens: list[int]
    pages: list[int]
    sampling: Sampling


class Ranks:
    """One pool for all ranks, in which each rank owns its heads. Steps are taken by all at once, answers come apart."""

    def __init__(
        self,
        spec: Instance,
        life: Peer,
        *,
        clock: Clock,
        rng: random.Random,
        plane: DataPlane,
        hear: Hear,
        num_heads: int,
        streams: bool = False,
        staging: tuple[int, int] | None = None,
        misfit: str | None = None,
    ) -> None:
        """`staging`: slots, and tokens of each; None: all is moved as it lies. `misfit`: a peer that can never be
        reached from here."""
        self.life = life
        self.page_size = spec.page_size
        self.is_alive = True
        self.num_heads = num_heads
        self._streams = streams
        self._misfit = misfit
        self._barred: set[tuple[int, Peer]] = set()  # which rank has said of whom that it can never reach it
        slots = (
            [(*staging, num_heads // spec.num_ranks, self._start, self._stick)] * spec.num_ranks
            if staging is not None
            else []
        )
        self.packings = [Packing(*each) for each in slots]
        garbage = itertools.count(rng.getrandbits(32))
        self.pool = [
            [list(itertools.islice(garbage, spec.page_size)) for _ in range(spec.num_pages)] for _ in range(num_heads)
        ]
        self.owners: dict[int, Claim | int] = {}  # page -> the ticket or the slot it was last given to
        self.severed: list[set[Peer]] = [set() for _ in range(spec.num_ranks)]
        self._num_ranks = spec.num_ranks
        self._clock = clock
        self._rng = rng
        self._plane = plane
        self._hear = hear
        self.happened: Counter[str] = Counter()
        self.attach_error: Callable[[], float] = lambda: 0.0  # chance that a rank cannot connect to a peer, by now
        self.slowness: Callable[[], float] = lambda: 1.0  # how many times as long as usual all takes, by now
        self.fail: Callable[[], None] = lambda: None  # the instance is to be started again
        self._slots: dict[int, Slot] = {}
        self._plans: deque[tuple[StepPlan, list[Write]]] = deque()
        self._peers: list[dict[str, Peer]] = [{} for _ in range(spec.num_ranks)]  # attached lives, of each rank
        self._known: list[set[Peer]] = [set() for _ in range(spec.num_ranks)]  # lives that it could sever
        self._cut: list[set[Peer]] = [set() for _ in range(spec.num_ranks)]  # told to sever
        self._writers: dict[Handle, Peer] = {}
        self._num_due = 0
        self._answer_at = [0.0] * spec.num_ranks

    def heads_of(self, rank: int) -> range:
        share = self.num_heads // self._num_ranks
        return range(rank * share, (rank + 1) * share)

    def rank_of(self, head: int) -> int:
        return head * self._num_ranks // self.num_heads

    def peer_of(self, rank: int, peer: str) -> Ranks | None:
        """The attached life of that name, dead or alive; None if none is."""
        life = self._peers[rank].get(peer)
        return self._plane.find(life) if life is not None else None

    def launch(self, plan: StepPlan) -> None:
        for init in plan.admits:
            self._take(init.pages, init.slot)
        for chunk in plan.chunks:
            self._take(chunk.pages, chunk.slot)
        writes = [write for job in plan.writes for rank in range(self._num_ranks) for write in self._writes(job, rank)]
        for write in writes:
            self._plane.plan(write)
        self._plans.append((plan, writes))
        if len(self._plans) == 1:
            self._begin()

    def order(self, message: Attach | Sever | Transfer | Digest) -> None:
        match message:
            case Digest(job=job):
                self._num_due += self._num_ranks
                for rank in range(self._num_ranks):
                    is_late = self._rng.random() < self._plane.odds.lost_completion
                    soon_s = self._rng.expovariate(500.0) * self.slowness()
                    seconds = self._rng.uniform(0.0, 2.0) if is_late else soon_s
                    self._clock.after(seconds, self._tell_digest, rank, job)
            case Transfer(jobs=jobs, is_read=is_read):
                for job in jobs:
                    for rank in range(self._num_ranks):
                        self._move(job, rank, is_read=is_read)
            case Attach(peer=peer, epoch=epoch):
                for rank in range(self._num_ranks):
                    self._attach(rank, Peer(peer, epoch))
            case Sever(peer=peer, epoch=epoch):
                self._num_due += self._num_ranks
                for rank in range(self._num_ranks):
                    self._clock.after(self._rng.expovariate(100.0), self._sever, rank, Peer(peer, epoch))

    def expect(self, reserve: Reserve) -> None:
        """The leader is asked for pages: now it is known who would write them."""
        self._writers[reserve.handle] = Peer(reserve.prefill, reserve.prefill_epoch)

    def promise(self, handle: Handle, pages: tuple[int, ...]) -> None:
        """The leader gave these pages to a peer's writes."""
        self._assert_out_of_reach(pages, f"promised to {handle}")
        for page in pages:
            self.owners[page] = Claim(handle, self._writers[handle])

    def say_unreachable(self, rank: int, peer: Peer, is_final: bool = False) -> None:
        if not self.is_alive:
            return
        if self._peers[rank].get(peer.name) == peer:
            del self._peers[rank][peer.name]  # until it is attached again
        self._answer(rank, PeerUnreachable(*peer, reason="injected", is_final=is_final))

    @property
    def num_held(self) -> int:
        """Slots, plans, answers on their way, and staging."""
        staged = sum(packing.num_held for packing in self.packings)
        return len(self._slots) + len(self._plans) + self._num_due + staged

    def die(self) -> None:
        self.is_alive = False
        self._plane.lose_process(self)

    def reachable(self) -> list[int]:
        """Pages that writes of others may still reach."""
        return [page for write in self._plane.reaching(self) for page in write.job.dst_pages]

    def _move(self, job: WriteJob, rank: int, *, is_read: bool) -> None:
        for write in self._writes(job, rank, is_read=is_read):
            self._plane.plan(write)
            self._clock.after(self._rng.expovariate(500.0), self._go, write)

    def _go(self, write: Write) -> None:
        """Let its bytes move, as soon as there is staging for them."""
        if not self.packings:
            self._start(write)
        elif self.is_alive:
            self.packings[write.rank].give(write)

    def _start(self, write: Write) -> None:
        self._plane.start(write)

    def _take(self, pages: tuple[int, ...], slot: int) -> None:
        self._assert_out_of_reach(pages, f"given to slot {slot}")
        for page in pages:
            self.owners[page] = slot

    def _assert_out_of_reach(self, pages: tuple[int, ...], what: str) -> None:
        for write in self._plane.reaching(self):
            for page in set(pages).intersection(write.job.dst_pages):
                raise Violation(
                    f"page {page} of {self.life} {what}; job {write.job.job} of {write.mover.life} may write it"
                )

    def _stick(self) -> None:
        if self.is_alive:
            self.happened["staging stuck"] += 1
            self.fail()

    def _writes(self, job: WriteJob, rank: int, *, is_read: bool = False) -> list[Write]:
        """A rank's share of a job: one write, or where it is streamed or packed some, the last of which ends it."""
        halves: tuple[int | None, ...] = (0, 1) if self._streams and not is_read else (None,)
        parts = self.packings[rank].cut(range(job.start, job.stop)) if self.packings else [None]
        self.happened["streamed"] += len(halves) > 1
        self.happened["packed"] += len(parts) > 1
        pieces = Pieces(partial(self._ended, rank, job), len(halves) * len(parts))
        writes = []
        for half, part in itertools.product(halves, parts):
            write = Write(job, rank, self, self.peer_of(rank, job.peer), pieces.end, is_read, half=half, part=part)
            if self.packings:
                write.ended = partial(self._unstage, write, pieces.end)
            writes.append(write)
        return writes

    def _unstage(self, write: Write, ended: Ended, error: str | None, may_land: bool) -> None:
        if not self.is_alive:
            return
        self.packings[write.rank].end(write, is_done=error is None, may_land=may_land)
        ended(error, may_land)

    def _begin(self) -> None:
        seconds = self._rng.uniform(0.004, 0.03) * self.slowness()
        if self._streams:
            self._clock.after(seconds * self._rng.random(), self._compute_all)
        self._clock.after(seconds, self._complete, seconds)

    def _complete(self, seconds: float) -> None:
        if not self.is_alive:
            return
        if not self._streams:
            self._compute_all()
        plan, writes = self._plans.popleft()
        tokens = [token for chunk in plan.chunks if (token := self._sample(chunk)) is not None]
        for rank in range(self._num_ranks):
            sampled = tuple(tokens) if rank == 0 else ()
            self._answer(rank, StepDone(plan.step, sampled, seconds))
        for write in writes:
            if write.half is None:
                self._clock.after(self._rng.expovariate(500.0), self._go, write)
        if self._plans:
            self._begin()

    def _compute_all(self) -> None:
        """All but the sampling of the step that runs; what of its writes is streamed begins."""
        if not self.is_alive:
            return
        plan, writes = self._plans[0]
        for slot in plan.retire:
            if self._slots.pop(slot, None) is None:
                raise Violation(f"step {plan.step} of {self.life} retires slot {slot}, which is empty")
        for init in plan.admits:
            if init.slot in self._slots:
                raise Violation(f"step {plan.step} of {self.life} admits to slot {init.slot}, which is taken")
            self._slots[init.slot] = Slot(list(init.tokens), list(init.pages), init.sampling)
        for chunk in plan.chunks:
            self._compute(chunk)
        for write in writes:
            if write.half is not None:  # the second may come before the step's end, or after it
                self._clock.after(self._rng.expovariate((500.0, 100.0)[write.half]), self._go, write)

    def _compute(self, chunk: Chunk) -> None:
        slot, size = self._slots[chunk.slot], self.page_size
        slot.pages += chunk.pages
        if len(slot.tokens) < chunk.stop or len(slot.pages) * size < chunk.stop:
            raise Violation(f"{self.life}: {chunk} of {len(slot.tokens)} tokens in {len(slot.pages)} pages")
        for position in range(chunk.start, chunk.stop):
            page = slot.pages[position // size]
            if isinstance(self.owners.get(page), Claim):
                raise Violation(f"{self.life}: {chunk} writes page {page}, which is {self.owners[page]}")
            for head, pool in enumerate(self.pool):
                before = pool[slot.pages[(position - 1) // size]][(position - 1) % size] if position else 0
                pool[page][position % size] = kv_value(position, slot.tokens[position], before, head)

    def _sample(self, chunk: Chunk) -> Token | None:
        slot = self._slots[chunk.slot]
        if not chunk.sample:
            return None
        if len(slot.tokens) != chunk.stop:
            raise Violation(f"{self.life}: {chunk} samples for a position that has a token")
        slot.tokens.append(sample([self._read(pool, slot.pages, chunk.stop) for pool in self.pool], slot.sampling.seed))
        return token_at(chunk.stop, slot.tokens[-1], slot.sampling.logprobs)

    def _read(self, pool: list[list[int]], pages: list[int], stop: int) -> list[int]:
        values: list[int] = []
        for page in pages[: -(-stop // self.page_size)]:
            values += pool[page]
        return values[:stop]

    def _attach(self, rank: int, peer: Peer) -> None:
        if peer in self._cut[rank]:  # for good
            self._answer(rank, PeerUnreachable(*peer, reason="was severed"))
            return
        self._known[rank].add(peer)
        if peer.name == self._misfit:
            if (rank, peer) in self._barred:
                raise Violation(f"rank {rank} of {self.life} is to attach {peer}, and has said that it never can")
            self._barred.add((rank, peer))
            self.happened["barred"] += 1
            self._clock.after(self._rng.uniform(0.0, 0.1), self.say_unreachable, rank, peer, True)
            return
        self._peers[rank][peer.name] = peer
        if (chance := self.attach_error()) and self._rng.random() < chance:
            self.happened["attach error"] += 1
            self._clock.after(self._rng.uniform(0.0, 0.1), self.say_unreachable, rank, peer)

    def _sever(self, rank: int, peer: Peer) -> None:
        self._num_due -= 1
        if not self.is_alive:
            return
        clean = False  # a rank that was never attached knows no name to sever
        if peer in self._known[rank]:
            self._cut[rank].add(peer)
            self._plane.sever_outward(self, rank, peer)
            if self._plane.can_sever:
                self.severed[rank].add(peer)
            clean = self._plane.sever_inward(self, peer)
        if clean and self.packings:
            self.packings[rank].staging.settle(peer)
            self.packings[rank].begin()
        if clean and self._peers[rank].get(peer.name) == peer:
            del self._peers[rank][peer.name]
        self._answer(rank, Severed(*peer, clean=clean))

    def _ended(self, rank: int, job: WriteJob, error: str | None, may_land: bool) -> None:
        if not self.is_alive:
            return
        digest = self._digest(rank, job) if job.is_digested else None
        self._answer(rank, WriteDone(job.job, error, nbytes=0, seconds=0.0, may_land=may_land, digest=digest))

    def _tell_digest(self, rank: int, job: WriteJob) -> None:
        self._num_due -= 1
        if self.is_alive:
            self._answer(rank, WriteDone(job.job, None, nbytes=0, seconds=0.0, digest=self._digest(rank, job)))

    def _digest(self, rank: int, job: WriteJob) -> int:
        """Of the rank's heads of the job's tokens, which are on its source pages here."""
        digest = 0
        for token in range(job.start, job.stop):
            page = job.src_pages[(token - job.start) // self.page_size]
            for head in self.heads_of(rank):
                digest += hash((token, head, self.pool[head][page][token % self.page_size])) ** 2  # else +1, -1 cancel
        return digest % DIGESTS

    def _answer(self, rank: int, message: FromRank) -> None:
        """To the leader: late, but in order."""
        arrival = max(self._answer_at[rank], self._clock.now + self._rng.expovariate(1000.0))
        self._answer_at[rank] = arrival
        self._num_due += 1
        self._clock.at(arrival, self._answered, rank, message)

    def _answered(self, rank: int, message: FromRank) -> None:
        self._num_due -= 1
        self._hear(rank, message)
