"""Moves nothing and says it did, by a seeded schedule: for simulations and control-plane benches."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from pd.transfer.outbox import Outbox
from pd.transfer.transport import Completion, JobDone, JobFailed, PeerLost, Span, TransferError

MAX_JOBS = 4096


@dataclass(slots=True)
class _Waiting:
    job: int
    nbytes: int
    num_polls: int  # still to come before it ends
    fails: bool


class FakeTransport:
    """See `Transport`. A job ends after 0..max_polls polls and fails with probability `fail_rate`; one peer's
    jobs stay in order. The same seed and calls give the same completions, all after 0 seconds."""

    name = "fake"
    spare_nbytes = 0

    def __init__(self, *, me: str, seed: int, max_polls: int = 4, fail_rate: float = 0.0) -> None:
        self.me = me
        self._rng = random.Random(seed)
        self._max_polls = max_polls
        self._fail_rate = fail_rate
        self._outbox = Outbox()
        self.wake_fd = self._outbox.wake_fd
        self._peers: dict[str, deque[_Waiting]] = {}
        self._is_open = True

    def allocate(self, nbytes: int) -> memoryview:
        return memoryview(bytearray(nbytes))

    def register(self, address: int, nbytes: int, device: int | None = None) -> None:
        pass

    def endpoint(self) -> bytes:
        return b"fake:" + self.me.encode()

    def connect(self, peer: str, endpoint: bytes) -> None:
        if not endpoint.startswith(b"fake:"):
            raise TransferError(f"{peer} sent no fake endpoint: {endpoint[:32]!r}")
        self._peers.setdefault(peer, deque())

    def describe(self, peer: str) -> str | None:
        return self.name

    def write(self, peer: str, spans: Sequence[Span], *, job: int) -> None:
        if peer not in self._peers or not self._is_open:
            raise TransferError(f"unknown peer {peer}")
        if len(self._peers[peer]) >= MAX_JOBS:
            raise TransferError(f"{MAX_JOBS} jobs wait for {peer} already")
        num_polls = self._rng.randint(0, self._max_polls)
        fails = self._rng.random() < self._fail_rate
        nbytes = sum(span.nbytes for span in spans)
        self._peers[peer].append(_Waiting(job, nbytes, num_polls, fails))
        self._outbox.ring()

    def read(self, peer: str, spans: Sequence[Span], *, job: int) -> None:
        self.write(peer, spans, job=job)

    def poll(self) -> list[Completion]:
        for peer, jobs in self._peers.items():
            while jobs and jobs[0].num_polls == 0:
                ended = jobs.popleft()
                if ended.fails:
                    self._outbox.put(JobFailed(ended.job, peer, "by the schedule"))
                else:
                    self._outbox.put(JobDone(ended.job, ended.nbytes, 0.0))
            if jobs:
                jobs[0].num_polls -= 1
        drained = self._outbox.drain()
        if any(self._peers.values()):
            self._outbox.ring()
        return drained

    def lose(self, peer: str, reason: str) -> None:
        """The simulation's word: this peer died."""
        self._drop(peer, reason)
        self._outbox.put(PeerLost(peer, reason))

    def sever(self, peer: str) -> bool:
        self._drop(peer, "severed here")
        return True

    def close(self) -> None:
        for peer in list(self._peers):
            self._drop(peer, "transport closed")
        self._is_open = False
        self._outbox.close()

    def _drop(self, peer: str, reason: str) -> None:
        jobs = self._peers.pop(peer, deque())
        self._outbox.put(*(JobFailed(waiting.job, peer, reason) for waiting in jobs))
