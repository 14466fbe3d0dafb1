"""One peer of a `LibraryTransport`: its jobs in order, each ended by a look at the peer's door.

    waiting ─► batches, up to four on their way ─► door read: open, and the same life ─► JobDone
Rules
1. Belongs to the worker's thread, but for `give`.
2. The door is read after a job's last byte is in place: so a job is done only if the region still had its owner,
   whatever the library answered for memory that nobody keeps any more.
3. Of a peer whose own process sends what is read of it one piece is read at a time: see `Library.is_owner_asked`.
4. The next job begins when the last one is done, as no library promises the order of two.
5. A peer that is let go leaves behind what is still on its way. Only when that has ended is the library told to forget
   the peer: before, it would free what it still reads.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from pd.transfer.library import MAX_PIECES, Copies, Library, LibraryEndpoint, LibraryLimits, Memory, Spans, batches
from pd.transfer.library_left import Leftover
from pd.transfer.outbox import Outbox
from pd.transfer.transport import Completion, JobDone, JobFailed, PeerLost, TransferError

_WINDOW = 4
"""Batches on their way at once, of one job: enough that the wire never waits for us."""


class Task(NamedTuple):
    job: int
    spans: Spans
    is_read: bool
    nbytes: int
    began: float


class Slate(NamedTuple):
    """Where this peer's door is read to."""

    address: int
    view: memoryview


@dataclass(slots=True)
class _Begun:
    task: Task
    rest: Iterator[Spans]
    window: int  # batches
    batch: Spans | None  # the next; None: every one was posted


@dataclass(slots=True, eq=False)
class Peer:
    name: str
    there: LibraryEndpoint
    ours: Memory
    library: Library
    limits: LibraryLimits
    outbox: Outbox
    lock: threading.Lock = field(default_factory=threading.Lock)
    has_left: threading.Event = field(default_factory=threading.Event)
    is_near: bool = False  # its process can be watched from here
    is_asked: bool = False  # its process sends what is read, one piece at a time
    cut_reason: str | None = None
    is_gone: bool = False
    pidfd: int | None = None
    meet_by: float = 0.0
    slate: Slate | None = None  # None: not met yet
    _waiting: deque[Task] = field(default_factory=deque)
    _contact: object = None
    _is_up: bool = False
    _begun: _Begun | None = None
    _open: list[object] = field(default_factory=list)  # batches
    _spent: list[object] = field(default_factory=list)  # batches that are done, to be released
    _is_posting: bool = False  # a batch; still after a turn: that failed, perhaps halfway
    _door: object = None  # a batch that reads it, over and over
    _is_looking: bool = False
    _next_look: float = 0.0
    _deadline: float = 0.0
    _is_turn_spent: bool = False  # it has begun a batch, or ended a job

    @property
    def is_waiting(self) -> bool:
        """For something that a job needs."""
        return self._begun is not None or not self._is_up

    @property
    def is_idle(self) -> bool:
        """Nothing is to be done but what it has yet to be given."""
        return self._is_up and self._begun is None and not self._waiting

    def give(self, task: Task) -> bool:
        """From any thread. False: it is gone, or too many wait."""
        with self.lock:
            if self.is_gone or len(self._waiting) >= self.limits.max_jobs:
                return False
            self._waiting.append(task)
        return True

    def meet(self, slate: Slate, now: float) -> None:
        """Begin to reach it. Raises TransferError."""
        self.slate = slate
        self._deadline = now + self.limits.connect_s
        self._contact = self.library.meet(self.there.contact, self.there.memory, self.there.nbytes)
        self._read_door()

    def advance(self, now: float) -> bool:
        """Take every step that can be taken without waiting; whether one was. Raises TransferError: it is lost.

        A turn begins one batch, which may last as long as its copy, but goes on until that job's door is read, as far
        as the library has done it at once: four turns for it took 60 µs more, while other ranks waited for a core.
        """
        self._is_turn_spent = moved = False
        while self._step(now):
            moved = True
        self._release_spent()
        if moved or not (self._begun or self._waiting or not self._is_up):
            self._deadline = now + self.limits.stall_s
        elif now > self._deadline:
            what, limit = (
                ("no progress with", self.limits.stall_s) if self._is_up else ("no answer from", self.limits.connect_s)
            )
            raise TransferError(f"{what} {self.name} in {limit:g} s")
        return moved

    def finish(self) -> bool:
        """Begin nothing more; whether something is still on its way."""
        try:
            self._reap()
        except TransferError:
            return False
        return bool(self._open) or self._is_looking

    def lose(self, reason: str, *, is_ours: bool, now: float) -> Leftover:
        """Fail every job, then tell of the loss unless we wanted it. Nothing of it is posted any more."""
        with self.lock:
            self.is_gone = True
            waiting = list(self._waiting)
            self._waiting.clear()
        left, may_land = self._abandon(now)
        said: list[Completion] = []
        if self._begun is not None:
            said.append(JobFailed(self._begun.task.job, self.name, reason, may_land))
        said += [JobFailed(task.job, self.name, reason) for task in waiting]
        if not is_ours:
            said.append(PeerLost(self.name, reason))
        self._begun = None
        self.outbox.put(*said)
        self.has_left.set()
        return left

    def _abandon(self, now: float) -> tuple[Leftover, bool]:
        """What it leaves behind, and whether bytes of what was on its way may still move."""
        self._release_spent()
        may_land = self._is_posting
        for batch in self._open:
            try:
                may_land |= not self.library.is_done(batch)
            except TransferError:
                may_land = True  # it failed, which says nothing of the bytes that the network has
        if self._is_looking:
            self._open.append(self._door)
        elif self._door is not None:
            self.library.release(self._door)
        left = Leftover(self.library, self._contact, self._open, now, has_failed=self._is_posting)
        self._open, self._door, self._contact, self._is_looking = [], None, None, False
        return left, may_land

    def _step(self, now: float) -> bool:
        moved = self._reap()
        if not self._is_looking and self._is_up:
            moved |= self._post(now)
        return moved

    def _reap(self) -> bool:
        moved = False
        for batch in tuple(self._open):
            if self.library.is_done(batch):
                self._open.remove(batch)
                self._spent.append(batch)
                moved = True
        if self._is_looking and self.library.is_done(self._door):
            self._is_looking = False
            self._seen()
            moved = True
        return moved

    def _release_spent(self) -> None:
        """Once nobody waits for what they moved: it takes 40 µs out of cold caches."""
        while self._spent:
            self.library.release(self._spent.pop())

    def _seen(self) -> None:
        """The door was read."""
        assert self.slate is not None
        reason = read_door(self.slate.view, self.there.nonce)
        if reason is not None:
            raise TransferError(f"{self.name} {reason}")
        self._is_up = True
        self._next_look = time.monotonic() + self.limits.look_s
        if self._begun is not None:
            task, self._begun = self._begun.task, None
            self._is_turn_spent = True
            self.outbox.put(JobDone(task.job, task.nbytes, time.monotonic() - task.began))

    def _post(self, now: float) -> bool:
        if self._begun is None and self._waiting and not self._is_turn_spent:
            with self.lock:
                task = self._waiting.popleft()
            is_asking = task.is_read and self.is_asked
            max_pieces, window = (1, 1) if is_asking else (MAX_PIECES, _WINDOW)
            rest = batches(task.spans, task.nbytes, max_pieces=max_pieces)
            self._begun = _Begun(task, rest, window=window, batch=next(rest, None))
        if self._begun is None:
            if now < self._next_look:
                return False
            self._read_door()
            return False  # it is no news that we look
        spans = self._begun.batch
        if spans is None:
            if self._open:
                return False
            self._read_door()
            return True
        if self._is_turn_spent or len(self._open) >= self._begun.window:
            return False
        self._is_turn_spent = True
        copies = Copies(self.ours, self.there.memory, spans, self._begun.task.is_read)
        self._is_posting = True
        self._open.append(self.library.post(self._contact, copies))
        self._is_posting = False
        self._begun.batch = next(self._begun.rest, None)
        return True

    def _read_door(self) -> None:
        assert self.slate is not None
        if self._door is None:
            copies = Copies(Memory(self.slate.address), Memory(self.there.door), _WHOLE_DOOR, is_read=True)
            self._door = self.library.post(self._contact, copies)
        else:
            self.library.repeat(self._door)
        self._is_looking = True


DOOR_NBYTES = 32
_WHOLE_DOOR: Spans = np.array([[0, 0, DOOR_NBYTES]])
_OPEN, _CLOSED = 1, 2


def write_door(view: memoryview, nonce: bytes, *, is_open: bool) -> None:
    view[: len(nonce)] = nonce
    view[len(nonce)] = _OPEN if is_open else _CLOSED


def read_door(view: memoryview, nonce: bytes) -> str | None:
    """What is wrong with the peer behind that door, if anything is."""
    if view[: len(nonce)] != nonce:
        return "is another life than the one we were told of"
    return None if view[len(nonce)] == _OPEN else "closed its region"
