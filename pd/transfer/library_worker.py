"""The one thread that calls a library: libraries are not to be called from two, and some wait inside a call.

It never waits for a peer: what is not done is asked again, at first at once, then every 50 µs, as a sleep costs the
end of a small job more than a few calls cost the processor.
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
from pd.transfer.library_peer import DOOR_NBYTES, Peer, Slate
from pd.transfer.transport import TransferError

MAX_PEERS = 2048
"""At once; each has a line of the slate."""

_SPINS = 20
_NAP_S = 50e-6
_WARM_S = 1.0
_COLD = 10
"""After something moved, peers' writes are tended as often as the library wants; a second later that many times less
often. Measured on a busy machine, of a core: 5 % at 1 ms, 2 % at 10 ms."""
_TENDED_S = 500e-6
"""Of the processor: a call that finds nothing takes 4 to 20 µs, of a hundred one up to 200."""
_FINISH_S = 0.2
"""UCX over TCP once aborted the process, in hundreds of ends, when one end went while a read was on its way."""
_SETTLE_S = 0.05
"""What a dead process left in this host's network buffers is there within microseconds; then it must be taken in."""


class LibraryWorker:
    def __init__(self, library: Library, slate: memoryview, slate_address: int) -> None:
        """`slate` is registered memory of MAX_PEERS × DOOR_NBYTES."""
        self._library = library
        self._slate, self._slate_address = slate, slate_address
        self._free_lines = list(range(MAX_PEERS))
        self._lines: dict[Peer, int] = {}
        self._errands: deque[Callable[[], None]] = deque()
        self._peers: list[Peer] = []
        self._warm_until = time.monotonic() + _WARM_S
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._epoll = select.epoll()
        self._epoll.register(self._wake, select.EPOLLIN)
        self._stop_reason: str | None = None
        self._thread = threading.Thread(target=self._run, name=f"pd-transfer-{library.name}", daemon=True)
        self._thread.start()

    def add(self, peer: Peer) -> None:
        """Raises TransferError if the thread failed."""
        if not self._thread.is_alive():
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
        os.eventfd_write(self._wake, 1)

    def stop(self, reason: str) -> None:
        """Fail everything and end the thread; nobody may call anything after."""
        self._stop_reason = reason
        self.ring()
        self._thread.join()
        self._slate.release()
        self._epoll.close()
        os.close(self._wake)

    def _run(self) -> None:
        num_idle = 0
        try:
            while self._stop_reason is None:
                num_idle = 0 if self._turn() else num_idle + 1
                self._rest(num_idle)
        finally:  # an error ends the thread, but nobody waits for it in vain
            reason = self._stop_reason or f"the thread of {self._library.name} failed"
            while self._errands:
                self._errands.popleft()()
            self._finish()
            for peer in list(self._peers):
                self._lose(peer, reason, is_ours=self._stop_reason is not None)

    def _finish(self) -> None:
        """Let end what is on its way, for a short while."""
        until = time.monotonic() + _FINISH_S
        while sum(peer.finish() for peer in self._peers) and time.monotonic() < until:
            if self._library.tend_s is not None:
                self._library.tend()
            time.sleep(_NAP_S)

    def _turn(self) -> bool:
        """Whether anything moved."""
        while self._errands:
            self._errands.popleft()()
        began = time.monotonic()
        moved = False
        for peer in list(self._peers):
            moved |= self._look_after(peer)
        if self._library.tend_s is not None:
            before = time.thread_time()  # not the clock: on a busy machine every call may take a millisecond
            self._library.tend()
            if time.thread_time() - before > _TENDED_S:
                self._warm_until = began + _WARM_S
        if any(peer.is_waiting for peer in self._peers):
            self._warm_until = began + _WARM_S
        return moved

    def _rest(self, num_idle: int) -> None:
        """Until it is worth looking again."""
        if num_idle == 0:
            return
        if any(peer.is_waiting for peer in self._peers):
            time.sleep(_NAP_S if num_idle > _SPINS else 0)
            return
        timeout_s = min((peer.limits.look_s for peer in self._peers), default=None)
        if self._library.tend_s is not None:
            timeout_s = self._library.tend_s * (1 if time.monotonic() < self._warm_until else _COLD)
        self._epoll.poll(timeout_s)
        with contextlib.suppress(BlockingIOError):  # it was a pidfd, or the time
            os.eventfd_read(self._wake)

    def _admit(self, peer: Peer) -> None:
        self._peers.append(peer)
        try:
            self._watch(peer)
            if not self._free_lines:
                raise TransferError(f"{MAX_PEERS} peers are connected already")
            line = self._lines[peer] = self._free_lines.pop()
            view = self._slate[line * DOOR_NBYTES : (line + 1) * DOOR_NBYTES]
            peer.meet(Slate(self._slate_address + line * DOOR_NBYTES, view), time.monotonic())
        except TransferError as error:
            self._lose(peer, str(error))

    def _watch(self, peer: Peer) -> None:
        """On one host its end is seen at once, whatever the library notices."""
        if not peer.is_near:
            return
        try:
            peer.pidfd = watch(peer.there.life)
        except OSError as error:
            raise TransferError(f"cannot watch the process of {peer.name}: {error}") from error
        if peer.pidfd is None:
            raise TransferError(f"process {peer.there.life.pid} of {peer.name} ended")
        self._epoll.register(peer.pidfd, select.EPOLLIN)

    def _look_after(self, peer: Peer) -> bool:
        if peer.cut_reason is not None:
            self._lose(peer, peer.cut_reason, is_ours=True)
            return True
        if peer.pidfd is not None and has_ended(peer.pidfd):
            self._lose(peer, f"process {peer.there.life.pid} of {peer.name} ended")
            return True
        try:
            return peer.advance(time.monotonic())
        except TransferError as error:
            self._lose(peer, str(error))
            return True

    def _lose(self, peer: Peer, reason: str, *, is_ours: bool = False) -> None:
        self._peers.remove(peer)
        if peer.pidfd is not None:
            self._epoll.unregister(peer.pidfd)
            os.close(peer.pidfd)
            peer.pidfd = None
        line = self._lines.pop(peer, None)
        if line is not None and not peer.is_looking:  # else a late answer would be read as another peer's
            self._free_lines.append(line)
        peer.lose(reason, is_ours=is_ours)
        if peer.slate is not None:
            peer.slate.view.release()
