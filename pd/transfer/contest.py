"""Which of several ways to a peer works and is fastest: tried before the first job, with real bytes. Pure but for them.

Behind its region each side keeps an area for this:
    pattern      read by peers: it must be what the peer's name makes of it
    proofs       a slot a peer: what it writes there it must read back
    inbox        written by peers for the time it takes; what stands in it means nothing
    scratch      where we read to, and where a proof is made
Rules
1. Ways are tried one after the other, so that none slows another down.
2. A way that fails, answers wrongly or takes longer than WAY_S is out; the fastest of the others wins.
3. Peers that begin at once may have one slot for their proofs: who does not read back his own tries others.
4. A proof is of its way alone: a way that writes nowhere must not read back what the one before it wrote.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol

from pd.transfer.device import Device, Move, Pinned, wait
from pd.transfer.transport import Completion, JobDone, JobFailed, PeerLost, Span, TransferError, Transport

WAY_S = 5.0

_SMALL = 64 << 10
_NUM_SLOTS = 16
_LARGE = 4 << 20
"""Written three times; the best counts. 0.3 ms at 12 GB/s, 4 ms at 1 GB/s."""
_TURNS = 3
_MAX_PROOFS = 4
"""Of eight ranks that meet one, some two have the same of 16 slots in nine cases of ten, though for a moment only."""

PATTERN, PROOFS = 0, _SMALL
INBOX = PROOFS + _NUM_SLOTS * _SMALL
SCRATCH = INBOX + _LARGE
AREA_NBYTES = SCRATCH + _SMALL


def pattern(me: str) -> bytes:
    """What stands in the area of that name."""
    return hashlib.shake_128(me.encode()).digest(_SMALL)


class Access(Protocol):
    """Our region, for whoever looks into it by hand."""

    def get(self, offset: int, nbytes: int) -> bytes: ...

    def put(self, offset: int, content: bytes) -> None: ...


class HostAccess:
    def __init__(self, view: memoryview) -> None:
        self._view = view

    def get(self, offset: int, nbytes: int) -> bytes:
        return bytes(self._view[offset : offset + nbytes])

    def put(self, offset: int, content: bytes) -> None:
        self._view[offset : offset + len(content)] = content


class DeviceAccess:
    """A few times in a peer's life, from any thread: so each time anew."""

    def __init__(self, address: int, device: Callable[[], Device]) -> None:
        self._address = address
        self._device = device

    def get(self, offset: int, nbytes: int) -> bytes:
        with self._staged(nbytes) as (device, pinned):
            wait(device, device.copy([Move(pinned.address, self._address + offset, nbytes)]))
            return bytes(pinned.view)

    def put(self, offset: int, content: bytes) -> None:
        with self._staged(len(content)) as (device, pinned):
            pinned.view[:] = content
            wait(device, device.copy([Move(self._address + offset, pinned.address, len(content))]))

    @contextmanager
    def _staged(self, nbytes: int) -> Iterator[tuple[Device, Pinned]]:
        device = self._device()
        device.enter()
        pinned = device.pin(nbytes)
        try:
            yield device, pinned
        finally:
            device.unpin(pinned)
            device.close()


@dataclass(slots=True)
class Area:
    """Of one side: where it begins in its region, and whose it is."""

    offset: int
    me: str


@dataclass(slots=True)
class _Trial:
    """One way's steps: each is a job; what it must have brought is checked when it is done."""

    name: str
    way: Transport
    steps: Iterator[str]
    began: float
    step: str = ""
    job: int = 0
    best_s: float = float("inf")
    num_proofs: int = 1
    fault: str | None = None

    @property
    def rate(self) -> float:
        """Bytes a second; 0 if it did not work."""
        return 0.0 if self.fault is not None else _LARGE / self.best_s


@dataclass(slots=True)
class Contest:
    peer: str
    ways: Mapping[str, Transport]
    memory: Access  # our whole region with its area
    ours: Area
    theirs: Area
    jobs: Iterator[int]  # numbers that nobody else uses
    _trials: list[_Trial] = field(default_factory=list)

    def start(self, now: float) -> None:
        self._next_way(now)

    @property
    def is_over(self) -> bool:
        return len(self._trials) == len(self.ways) and self._trials[-1].step == "over"

    @property
    def winner(self) -> str | None:
        """Once it is over; None: no way works."""
        best = max(self._trials, key=lambda trial: trial.rate)
        return best.name if best.rate else None

    def told(self) -> str:
        """`nixl at 11.8 GB/s, tcp at 1.1 GB/s`, or what is wrong with a way."""
        return ", ".join(
            f"{trial.name} at {trial.rate / 1e9:.2f} GB/s" if trial.fault is None else f"{trial.name}: {trial.fault}"
            for trial in self._trials
        )

    def hear(self, way: str, end: Completion, now: float) -> None:
        """What ended on a way to this peer while the contest ran."""
        trial = self._trials[-1]
        if trial.name != way or self.is_over:
            return
        match end:
            case JobDone(job=job, seconds=seconds) if job == trial.job:
                self._check(trial, seconds, now)
            case JobFailed(reason=reason) | PeerLost(reason=reason):
                self._out(trial, reason, now)

    def tick(self, now: float) -> None:
        if not self.is_over and now > self._trials[-1].began + WAY_S:
            self._out(self._trials[-1], f"not proven within {WAY_S:g} s", now)

    def _next_way(self, now: float) -> None:
        if len(self._trials) == len(self.ways):
            self._trials[-1].step = "over"
            return
        name = list(self.ways)[len(self._trials)]
        steps = iter(("pattern", *["large"] * _TURNS, "prove", "proof"))
        trial = _Trial(name, self.ways[name], steps, now)
        self._trials.append(trial)
        self._next_step(trial, now)

    def _next_step(self, trial: _Trial, now: float) -> None:
        step = next(trial.steps, None)
        if step is None:
            self._next_way(now)
            return
        trial.step, trial.job = step, next(self.jobs)
        here, there = self.ours.offset, self.theirs.offset
        slot = _slot(self.ours.me, trial.num_proofs)
        spans: Sequence[Span]
        match step:
            case "pattern":
                spans, give = [Span(there + PATTERN, here + SCRATCH, _SMALL)], trial.way.read
            case "large":
                spans, give = [Span(here + INBOX, there + INBOX, _LARGE)], trial.way.write
            case "prove":
                self.memory.put(here + SCRATCH, self._proof(trial))
                spans, give = [Span(here + SCRATCH, there + slot, _SMALL)], trial.way.write
            case _:
                spans, give = [Span(there + slot, here + SCRATCH, _SMALL)], trial.way.read
        if step in ("pattern", "proof"):
            self.memory.put(here + SCRATCH, bytes(_SMALL))
        try:
            give(self.peer, spans, job=trial.job)
        except TransferError as error:
            self._out(trial, str(error), now)

    def _check(self, trial: _Trial, seconds: float, now: float) -> None:
        match trial.step:
            case "large":
                trial.best_s = min(trial.best_s, max(seconds, 1e-9))
            case "pattern" if self._scratch() != pattern(self.theirs.me):
                self._out(trial, "reads wrong bytes", now)
                return
            case "proof" if self._scratch() != self._proof(trial):
                if trial.num_proofs < _MAX_PROOFS:
                    trial.num_proofs += 1
                    trial.steps = iter(("prove", "proof"))
                    self._next_step(trial, now)
                    return
                self._out(trial, "what was written is not what is read back", now)
                return
        self._next_step(trial, now)

    def _out(self, trial: _Trial, fault: str, now: float) -> None:
        trial.fault = fault
        self._next_way(now)

    def _proof(self, trial: _Trial) -> bytes:
        return pattern(f"{self.ours.me} by {trial.name}")

    def _scratch(self) -> bytes:
        return self.memory.get(self.ours.offset + SCRATCH, _SMALL)


def _slot(me: str, turn: int) -> int:
    """Where in a peer's area we prove ourselves: another place each turn, so that two part that meet once."""
    chosen = hashlib.blake2b(f"{me} {turn}".encode(), digest_size=2).digest()
    return PROOFS + int.from_bytes(chosen) % _NUM_SLOTS * _SMALL
