"""The one thread that owns every socket of a `TcpTransport`."""

from __future__ import annotations

import contextlib
import logging
import os
import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Callable

from pd.transfer.tcp_lane import Ours
from pd.transfer.tcp_link import Session
from pd.transfer.tcp_reach import Peer
from pd.transfer.tcp_serve import Served
from pd.transfer.transport import TransferError

log = logging.getLogger(__name__)

_TICK_S = 0.25
"""How late a deadline may be noticed."""

_TELL_EVERY_S = 1.0
"""A line for each refused connection would let strangers fill a disk."""

_MAX_LANES_OF_ONE = 16


class TcpLoop:
    """Other threads call `do`; everything else happens here. A `House` to its served connections."""

    def __init__(self, listener: socket.socket, secret: bytes, ours: Ours) -> None:
        self.secret = secret
        self.region = ours.region
        self.ends = ours.ends
        self.mux = ours.mux
        self.limits = ours.limits
        self.peers: list[Peer] = []
        self.severed: set[str] = set()
        self._listener = listener
        self._served: set[Served] = set()
        self._generations: dict[str, tuple[int, set[Served]]] = {}
        self._orders: deque[Callable[[float], None]] = deque()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._is_ending = False
        self._num_refused = 0
        self._tell_at = float("-inf")
        self._rests_until: float | None = None  # accepting, after the process ran out of descriptors
        self.mux.selector.register(self._wake, selectors.EVENT_READ)
        self.mux.selector.register(listener, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._run, name="pd-transfer-tcp", daemon=True)
        self._thread.start()

    def do(self, order: Callable[[float], None]) -> None:
        """From any thread: call `order(now)` on this one, soon. Raises TransferError if this one failed."""
        if not self._thread.is_alive():
            raise TransferError("the transfer thread failed")
        self._orders.append(order)
        os.eventfd_write(self._wake, 1)

    def stop(self) -> None:
        """From the transport's thread: end all connections, fail all jobs, and wait for the thread."""
        with contextlib.suppress(TransferError):  # it failed: all is ended already
            self.do(self._end)
        self._thread.join()
        os.close(self._wake)

    def cut(self, names: set[str]) -> None:
        """End everything that these peers have here."""
        for served in [s for s in self._served if s.name in names]:
            served.broken("severed", time.monotonic())

    def admit(self, served: Served, generation: int) -> str | None:
        assert served.name is not None
        if served.name in self.severed:
            return f"{served.name} was severed here"
        known, lanes = self._generations.get(served.name, (generation, set()))
        if generation < known:
            return f"generation {generation} of {served.name} is past, {known} is here"
        if generation > known:
            for old in list(lanes):
                old.broken("a newer generation is here", time.monotonic())
            lanes = set()
        if len(lanes) >= _MAX_LANES_OF_ONE:
            return f"{served.name} has {len(lanes)} connections already"
        lanes.add(served)
        self._generations[served.name] = (generation, lanes)
        return None

    def forget(self, served: Served) -> None:
        if served not in self.mux:
            self._served.discard(served)
        if served.name is None or served.name not in self._generations:
            return
        lanes = self._generations[served.name][1]
        lanes.discard(served)
        if not lanes:
            del self._generations[served.name]

    def refused(self, who: str, reason: str, now: float) -> None:
        self._num_refused += 1
        if now >= self._tell_at:
            self._tell_at = now + _TELL_EVERY_S
            log.warning("refused a transfer connection of %s (%d so far): %s", who, self._num_refused, reason)

    def _run(self) -> None:
        try:
            while not self._is_ending:
                self._turn()
        finally:  # an error ends the thread, but nobody waits for it in vain
            reason = "transport closed" if self._is_ending else "the transfer thread failed"
            for peer in self.peers:
                peer.lose(reason, is_ours=self._is_ending)
            for served in list(self._served):
                served.broken(reason, 0.0)
            self._listener.close()
            self.mux.selector.close()

    def _turn(self) -> None:
        self.mux.settle()
        ready = self.mux.selector.select(_TICK_S if self._has_deadlines() else None)
        now = time.monotonic()
        for key, events in ready:
            if key.fd == self._wake:
                os.eventfd_read(self._wake)
            elif key.fileobj is self._listener:
                self._accept(now)
            elif key.data in self.mux:  # not ended by another of this turn
                _serve(key.data, events, now)
        while self._orders:
            self._orders.popleft()(now)
        self._tick(now)

    def _has_deadlines(self) -> bool:
        pending = any(served.deadline is not None for served in self._served)
        return pending or self._rests_until is not None or any(peer.has_deadline for peer in self.peers)

    def _tick(self, now: float) -> None:
        for peer in self.peers:
            peer.tick(now)
        self.peers = [peer for peer in self.peers if not peer.is_gone]
        for served in [s for s in self._served if s.deadline is not None and now >= s.deadline]:
            served.broken("out of time", now)
        if self._rests_until is not None and now >= self._rests_until:
            self._rests_until = None
            self.mux.selector.register(self._listener, selectors.EVENT_READ)

    def _accept(self, now: float) -> None:
        try:
            sock, address = self._listener.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return
        except OSError as error:
            log.warning("cannot accept transfer connections for 1 s: %s", error)
            self._rests_until = now + 1.0
            self.mux.selector.unregister(self._listener)
            return
        if len(self._served) >= self.limits.max_inbound:
            self.refused("{}:{}".format(*address[:2]), f"{len(self._served)} are open", now)
            sock.close()
            return
        try:
            served = Served(sock, self, deadline=now + self.limits.connect_s)
        except OSError:  # it ended between coming and being taken
            sock.close()
            return
        self._served.add(served)
        self.mux.attach(served)

    def _end(self, now: float) -> None:
        self._is_ending = True


def _serve(session: Session, events: int, now: float) -> None:
    try:
        if session.link.is_connecting:
            session.link.finish_connecting()
            session.connected()
        num_moved = 0
        if events & selectors.EVENT_READ:
            num_moved += session.link.receive()
        if events & selectors.EVENT_WRITE:
            num_moved += session.link.send()
        if num_moved:
            session.progressed(now)
    except TransferError as error:
        session.misspoke(str(error), now)
    except OSError as error:
        session.broken(str(error), now)
