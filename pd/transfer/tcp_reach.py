"""The initiating end: one peer, the lanes (connections) to it, and the jobs on their way.

Rules
1. A byte's lane follows from its destination, so of two jobs that write one byte the later one wins.
2. Jobs broken off are failed only after the peer has confirmed a higher generation of connections, by which it has
   ended the lower ones: then no byte of them can land any more. A peer that does not confirm is lost; bytes that its
   kernel holds may still land until it ends, or severs us.
"""

from __future__ import annotations

import contextlib
import enum
import itertools
import threading
import time
from collections import deque
from dataclasses import dataclass, field

from pd.transfer.tcp_frames import FrameError
from pd.transfer.tcp_lane import Lane, Ours, TcpEndpoint
from pd.transfer.transport import Completion, JobDone, JobFailed, PeerLost, Span

_STRIPE_NBYTES = 1 << 20
"""Neighbouring bytes that share a lane: large beside a system call's cost, small beside a request's pages."""


@dataclass(slots=True, eq=False)
class Job:
    job: int
    spans: tuple[Span, ...]
    is_read: bool
    nbytes: int
    began: float
    open_lanes: set[int] = field(default_factory=set)


class State(enum.Enum):
    CONNECTING = "connecting"
    UP = "up"
    GONE = "gone"


class Peer:
    """Belongs to the loop's thread, but for `give`."""

    def __init__(self, name: str, there: TcpEndpoint, *, me: str, ours: Ours) -> None:
        self.name = name
        self.there = there
        self.state = State.CONNECTING
        self.me = me
        self.generation = time.monotonic_ns()  # above that of any earlier Peer this process had there
        self.ours = ours
        self._lock = threading.Lock()
        self._waiting: deque[Job] = deque()
        self._open: dict[int, Job] = {}
        self._tickets = itertools.count(1)
        self._broken_off: list[Job] = []
        self._why_broken = ""
        self._lanes: list[Lane] = []
        self._deadline: float | None = None
        self._came_back = float("-inf")

    @property
    def is_gone(self) -> bool:
        return self.state is State.GONE

    @property
    def has_deadline(self) -> bool:
        return self.state is State.CONNECTING or bool(self._open)

    def give(self, job: Job) -> bool:
        """From any thread. False: it is gone, or too many wait."""
        with self._lock:
            if self.state is State.GONE or len(self._waiting) + len(self._open) >= self.ours.limits.max_jobs:
                return False
            self._waiting.append(job)
        return True

    def connect(self, now: float) -> None:
        self._deadline = now + self.ours.limits.connect_s
        self._lanes = []
        try:
            for index in range(self.ours.limits.num_lanes):
                self._lanes.append(Lane(index, self))
        except OSError as error:
            self.lose(f"cannot connect to {self.name} at {self.there.host}:{self.there.port}: {error}")

    def flush(self, now: float) -> None:
        """Send what was given."""
        while self.state is State.UP and self._waiting:
            with self._lock:
                job = self._waiting.popleft()
                ticket = next(self._tickets)
                self._open[ticket] = job
            if len(self._open) == 1:
                self.progressed(now)
            shares = _by_lane(job, len(self._lanes))
            job.open_lanes = set(shares)
            for index, spans in shares.items():
                self._lanes[index].carry(ticket, spans, is_read=job.is_read)

    def progressed(self, now: float) -> None:
        if self.state is State.UP:
            self._deadline = now + self.ours.limits.stall_s

    def welcomed(self, now: float) -> None:
        """One more lane is up; with the last one the peer is, and what was broken off has ended for good."""
        if not all(lane.is_up for lane in self._lanes):
            return
        self.state = State.UP
        self._deadline = None
        self._fail_broken_off(may_land=False)
        self.flush(now)

    def landed(self, ticket: int, lane: int) -> None:
        """That lane's share of a job is in place."""
        job = self._open.get(ticket)
        if job is None or lane not in job.open_lanes:
            raise FrameError(f"{self.name} acknowledges what was not asked: ticket {ticket}")
        job.open_lanes.remove(lane)
        if not job.open_lanes:
            with self._lock:
                del self._open[ticket]
            self.ours.outbox.put(JobDone(job.job, job.nbytes, time.monotonic() - job.began))

    def tick(self, now: float) -> None:
        if self._deadline is None or now < self._deadline:
            return
        if self.state is State.CONNECTING:
            self.lose(f"{self.name} did not answer in {self.ours.limits.connect_s:g} s")
        elif self._open:
            self.break_off(f"no progress with {self.name} in {self.ours.limits.stall_s:g} s", now)

    def break_off(self, reason: str, now: float, *, is_told: bool = True) -> None:
        """A lane failed: end all; come back once, which also proves that the old lanes are ended over there.

        `is_told`: the reason is the other end's, or ours. One that answered and then hung up without a word, as who
        is severed while connecting sees it, is asked once more for its reason.
        """
        if self.state is State.GONE:
            return
        is_final = self.state is State.CONNECTING and (is_told or not any(lane.is_answered for lane in self._lanes))
        self._hang_up()
        came_back_lately = now - self._came_back < self.ours.limits.stall_s
        if is_final or came_back_lately:
            self.lose(reason)
            return
        self._came_back = now
        with self._lock:
            self._broken_off += self._open.values()
            self._open.clear()
        self._why_broken = reason
        self.state = State.CONNECTING
        self.generation += 1
        self.connect(now)

    def lose(self, reason: str, *, is_ours: bool = False) -> None:
        """The end of it: fails every job, then tells of the loss unless we wanted it."""
        if self.state is State.GONE:
            return
        self._hang_up()
        with self._lock:
            self.state = State.GONE
            sent, unsent = list(self._open.values()), list(self._waiting)
            self._open.clear()
            self._waiting.clear()
        self._fail_broken_off(may_land=True)
        said: list[Completion] = [JobFailed(job.job, self.name, reason, not job.is_read) for job in sent]
        said += [JobFailed(job.job, self.name, reason) for job in unsent]
        if not is_ours:
            said.append(PeerLost(self.name, reason))
        self.ours.outbox.put(*said)

    def _fail_broken_off(self, *, may_land: bool) -> None:
        why = self._why_broken
        for job in self._broken_off:  # what was read comes through our own hands, and they let go
            self.ours.outbox.put(JobFailed(job.job, self.name, why, may_land and not job.is_read))
        self._broken_off.clear()

    def _hang_up(self) -> None:
        for lane in self._lanes:
            self.ours.mux.detach(lane)
            with contextlib.suppress(OSError):  # it may be broken already; it is closed all the same
                lane.link.abort()
        self._lanes = []


def _by_lane(job: Job, num_lanes: int) -> dict[int, list[Span]]:
    """Each lane's share of the spans, cut where a stripe of the destination ends; lane 0 has one even if empty."""
    if num_lanes == 1:
        return {0: list(job.spans)}
    shares: dict[int, list[Span]] = {}
    for src, dst, nbytes in job.spans:
        while nbytes:
            part = min(nbytes, _STRIPE_NBYTES - dst % _STRIPE_NBYTES)
            shares.setdefault(dst // _STRIPE_NBYTES % num_lanes, []).append(Span(src, dst, part))
            src, dst, nbytes = src + part, dst + part, nbytes - part
    return shares or {0: []}
