"""The one thread that calls a library: libraries are not to be called from two, and some wait inside a call.

It never waits for a peer: what is not done is asked again, at first at once, then every 50 µs, as a sleep costs the
end of a small job more than a few calls cost the processor. A library that can tell the end of a batch is asked then.

What is still on its way to a peer that was let go is looked after until it ends. The library is closed by this thread,
and only then: a library that is closed, or told to forget a peer, under a write of its own reads memory it has freed.
"""

from __future__ import annotations

import contextlib
import os
import select
import threading
import time
from collections import deque
from collections.abc import Callable

from pd.transfer.host import has_ended, watch
from pd.transfer.library import Library
from pd.transfer.library_left import Leftovers
from pd.transfer.library_peer import DOOR_NBYTES, Peer, Slate
from pd.transfer.transport import TransferError

MAX_PEERS = 2048
"""At once; each has a line of the slate."""

_SPINS = 20
_NAP_S = 50e-6
_LONG_NAP_S = 1e-3
_TOLD_S = 50e-3
"""While something is on its way through a library that tells its end: for deadlines."""
_WARM_S = 1.0
_COLD = 10
"""After something moved, peers' writes are tended as often as the library wants; a second later that many times less
often. Measured on a busy machine, of a core: 5 % at 1 ms, 2 % at 10 ms."""
_TENDED_S = 500e-6
"""Of the processor: a call that finds nothing takes 4 to 20 µs, of a hundred one up to 200."""
_FINISH_S = 0.2
"""UCX over TCP once aborted the process, in hundreds of ends, when one end went while a read was on its way."""
_JOIN_S = 2.0
"""For the library to close, which takes Mooncake a second."""
_SETTLE_S = 0.05
"""What a dead process left in this host's network buffers is there within microseconds; then it must be taken in."""


class LibraryWorker:
    def __init__(
        self,
        library: Library,
        slate: memoryview,
        slate_address: int,
        *,
        keeps: object,
        enter: Callable[[], None] | None = None,
    ) -> None:
        """`slate` is registered memory of MAX_PEERS × DOOR_NBYTES. `keeps` holds all that is registered. `enter` makes
        the thread one of a GPU: in a thread without, UCX leaves out its way from GPU to GPU and says nothing.

        From here on the library is the worker's, who closes it.
        """
        self._library = library
        self._slate, self._slate_address = slate, slate_address
        self._keeps = keeps
        self._enter = enter
        self._free_lines = list(range(MAX_PEERS))
        self._lines: dict[Peer, int] = {}
        self._errands: deque[Callable[[], None]] = deque()
        self._peers: list[Peer] = []
        self._left = Leftovers()
        self._is_tend_due = False
        self._has_said = threading.Event()  # all that will be
        self._warm_until = time.monotonic() + _WARM_S
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._wake_lock = threading.Lock()
        self._can_ring = True
        self._epoll = select.epoll()
        self._epoll.register(self._wake, select.EPOLLIN)
        self._is_told = library.tell(self.ring)
        self._stop_reason: str | None = None
        self._thread = threading.Thread(target=self._run, name=f"pd-transfer-{library.name}", daemon=True)
        self._thread.start()

    def add(self, peer: Peer) -> None:
        """Raises TransferError if the thread failed."""
        if self._has_said.is_set():
            raise TransferError(f"the thread of {self._library.name} failed")
        self._errands.append(lambda: self._admit(peer))
        self.ring()

    def cut(self, peer: Peer, reason: str) -> None:
        """Begin to let go of `peer`; its `has_left` is set once nothing of ours touches its region."""
        peer.cut_reason = reason
        self.ring()

    def settle(self, timeout_s: float) -> bool:
        """Take in what dead peers left on this host's side of the network. False: not within that time."""
        if self._library.tend_s is None:  # its own threads do
            time.sleep(_SETTLE_S)
            return True
        done = threading.Event()

        def take_in() -> None:
            until = time.monotonic() + _SETTLE_S
            while time.monotonic() < until:
                self._library.tend()
            done.set()

        self._errands.append(take_in)
        self.ring()
        return done.wait(timeout_s)

    def ring(self) -> None:
        """Have the thread look. From any thread, also after `stop`."""
        with self._wake_lock:
            if self._can_ring:
                os.eventfd_write(self._wake, 1)

    def stop(self, reason: str) -> None:
        """Fail everything and end the thread; nobody may call anything after.

        Where the library has something on its way to a peer that does not answer, the thread outlasts this call by as
        long as that takes.
        """
        self._stop_reason = reason
        self.ring()
        while not self._has_said.wait(_FINISH_S) and self._thread.is_alive():
            pass  # a call into the library takes as long as a batch does
        self._epoll.close()
        with self._wake_lock:
            self._can_ring = False
            os.close(self._wake)
        self._thread.join(_JOIN_S)

    def _run(self) -> None:
        num_idle = 0
        try:
            if self._enter is not None:
                self._enter()
            while self._stop_reason is None:
                num_idle = 0 if self._turn() else num_idle + 1
                if num_idle > 0:
                    self._rest(num_idle)
        finally:  # an error ends the thread, but nobody waits for it in vain
            reason = self._stop_reason or f"the thread of {self._library.name} failed"
            while self._errands:
                self._errands.popleft()()
            self._finish()
            for peer in list(self._peers):
                self._lose(peer, reason, is_ours=self._stop_reason is not None)
            self._has_said.set()
            self._outlast()

    def _finish(self) -> None:
        """Let end what is on its way, for a short while."""
        until = time.monotonic() + _FINISH_S
        while sum(peer.finish() for peer in self._peers) and time.monotonic() < until:
            if self._library.tend_s is not None:
                self._library.tend()
            time.sleep(_NAP_S)

    def _outlast(self) -> None:
        """Close the library once nothing of ours is on its way any more."""
        while self._left:
            self._free_lines += self._left.clear(time.monotonic())
            if self._library.tend_s is not None:
                self._library.tend()
            time.sleep(self._library.tend_s or _NAP_S)
        self._library.close()
        self._slate.release()
        self._keeps = None

    def _turn(self) -> bool:
        """Whether there may be more to do at once."""
        while self._errands:
            self._errands.popleft()()
        began = time.monotonic()
        moved = False
        self._free_lines += self._left.clear(began)
        for peer in list(self._peers):
            moved |= self._look_after(peer)
        if moved and not self._is_tend_due and all(peer.is_idle for peer in self._peers):
            self._is_tend_due = True
            return False  # whoever was told of its end waits for the interpreter: tending first took 60 µs more
        self._is_tend_due = False
        if self._library.tend_s is not None:
            before = time.thread_time()  # not the clock: on a busy machine every call may take a millisecond
            self._library.tend()
            if time.thread_time() - before > _TENDED_S:
                self._warm_until = began + _WARM_S
        if self._left or any(peer.is_waiting for peer in self._peers):
            self._warm_until = began + _WARM_S
        return moved

    def _rest(self, num_idle: int) -> None:
        """Until it is worth looking again."""
        timeout_s = min((peer.limits.look_s for peer in self._peers), default=None)
        if any(peer.is_waiting for peer in self._peers):
            if not self._is_told:
                time.sleep(self._nap_s(num_idle))
                return
            timeout_s = _TOLD_S
        if self._library.tend_s is not None:
            timeout_s = self._library.tend_s * (1 if time.monotonic() < self._warm_until else _COLD)
        self._epoll.poll(timeout_s)
        with contextlib.suppress(BlockingIOError):  # it was a pidfd, or the time
            os.eventfd_read(self._wake)

    def _nap_s(self, num_idle: int) -> float:
        """While something is on its way: a library without threads of its own moves on when it is asked only."""
        if num_idle <= _SPINS:
            return 0.0
        return _NAP_S if self._library.tend_s is not None else min(_NAP_S * num_idle / _SPINS, _LONG_NAP_S)

    def _admit(self, peer: Peer) -> None:
        self._peers.append(peer)
        peer.meet_by = time.monotonic() + peer.limits.connect_s
        try:
            if (pidfd := _watched(peer)) is not None:
                peer.pidfd = pidfd
                self._epoll.register(pidfd, select.EPOLLIN)
            self._meet(peer, time.monotonic())
        except TransferError as error:
            self._lose(peer, str(error))

    def _meet(self, peer: Peer, now: float) -> bool:
        """Whether it was met: not while something is left of an earlier acquaintance. Raises TransferError."""
        if self._left.has(peer.there.contact):
            if now > peer.meet_by:
                raise TransferError(f"what was on its way to {peer.name} has not ended in {peer.limits.connect_s:g} s")
            return False
        if not self._free_lines:
            raise TransferError(f"{MAX_PEERS} peers are connected already")
        line = self._lines[peer] = self._free_lines.pop()
        view = self._slate[line * DOOR_NBYTES : (line + 1) * DOOR_NBYTES]
        peer.meet(Slate(self._slate_address + line * DOOR_NBYTES, view), now)
        return True

    def _look_after(self, peer: Peer) -> bool:
        if peer.cut_reason is not None:
            self._lose(peer, peer.cut_reason, is_ours=True)
            return True
        if peer.pidfd is not None and has_ended(peer.pidfd):
            self._lose(peer, f"process {peer.there.life.pid} of {peer.name} ended")
            return True
        try:
            now = time.monotonic()
            return self._meet(peer, now) if peer.slate is None else peer.advance(now)
        except TransferError as error:
            self._lose(peer, str(error))
            return True

    def _lose(self, peer: Peer, reason: str, *, is_ours: bool = False) -> None:
        self._peers.remove(peer)
        if peer.pidfd is not None:
            self._epoll.unregister(peer.pidfd)
            os.close(peer.pidfd)
            peer.pidfd = None
        now = time.monotonic()
        left = peer.lose(reason, is_ours=is_ours, now=now)
        self._left.add(left, line=self._lines.pop(peer, None), contact=peer.there.contact)
        if peer.slate is not None:
            peer.slate.view.release()
        self._free_lines += self._left.clear(now)


def _watched(peer: Peer) -> int | None:
    """A pidfd: on one host a peer's end is seen at once, whatever the library notices. Raises TransferError."""
    if not peer.is_near:
        return None
    try:
        pidfd = watch(peer.there.life)
    except OSError as error:
        raise TransferError(f"cannot watch the process of {peer.name}: {error}") from error
    if pidfd is None:
        raise TransferError(f"process {peer.there.life.pid} of {peer.name} ended")
    return pidfd
