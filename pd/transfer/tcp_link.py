"""One non-blocking connection, and the selector that watches many of them.

Rules
1. All of it belongs to one thread; no call waits.
2. Bytes go from and to the caller's memory without a copy of ours: `sendmsg` and `recvmsg_into` take its pieces.
3. A turn moves a bounded amount, so that one fast peer does not keep the others waiting.
"""

from __future__ import annotations

import itertools
import os
import selectors
import socket
import struct
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Protocol

from pd.transfer.tcp_ends import Ends, Piece

_PIECES = 256
_CALL_NBYTES = 4 << 20
"""Offered to one system call, at most so many pieces of so many bytes: a call moves what the kernel's socket buffer
holds, some hundred KiB, and what is offered beyond that costs it as much as what is moved."""
_CALLS = 4
"""System calls of one turn."""
_NEAR_NBYTES = 1 << 20
"""Of the buffer for what a host sends to itself, of which the kernel grants twice as much if net.core.wmem_max lets it
(twice that, if it is less, was neither faster nor slower than none): what is on its way is then still in a cache when
it is read. Measured with 189 MB, the sender took 60 ms of a processor, and 100 with the 4 MB that the kernel lets it
grow to. To another host the path decides, and the kernel."""
_AWAITED_NBYTES = 512 << 10
"""Of a long message from this host itself, the kernel wakes a reader for so much at once. Woken for each segment it
took 65 ms of a processor for 189 MB, so 45; one raw stream 42. From other hosts it is left to the kernel: there a
path's window begins small, and kernels before 5.12 could wait for more than their memory had room for."""


class Link:
    """A connected or connecting socket. What comes in is asked for by `expect`, what goes out is queued."""

    def __init__(self, sock: socket.socket, ends: Ends, *, is_connecting: bool, checks_reset: bool) -> None:
        """`ends` are the link's, which closes them. `checks_reset`: once the other end has aborted, take nothing more
        from the kernel's buffer either."""
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for option, value in ((socket.TCP_KEEPIDLE, 10), (socket.TCP_KEEPINTVL, 5), (socket.TCP_KEEPCNT, 3)):
            sock.setsockopt(socket.IPPROTO_TCP, option, value)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        self.sock = sock
        self.is_near = not is_connecting and _kept_near(sock)
        self.ends = ends
        self._max_window = min(_PIECES, ends.window or _PIECES)
        self.is_connecting = is_connecting
        self._checks_reset = checks_reset
        self._queue: deque[Iterator[memoryview]] = deque()
        self._window: deque[memoryview] = deque()  # taken from the queue, not yet with the kernel
        self._wanted: deque[memoryview] = deque()
        self._num_wanted = 0  # bytes
        self._num_awaited = 1
        self._then: Callable[[], None] = _nothing

    @property
    def num_queued(self) -> int:
        """Messages not yet wholly with the kernel."""
        return len(self._queue)

    @property
    def events(self) -> int:
        """What to wait for; reading rests while many answers wait to be written."""
        if self.is_connecting:
            return selectors.EVENT_WRITE
        reads = selectors.EVENT_READ if self.num_queued < 64 else 0
        return reads | (selectors.EVENT_WRITE if self.has_output else 0)

    @property
    def has_output(self) -> bool:
        return bool(self._queue or self._window)

    def queue(self, pieces: Iterable[memoryview | bytes]) -> None:
        """Send these after all queued before; pieces are taken only when there is room for them."""
        self._queue.append(memoryview(piece) for piece in pieces)

    def expect(self, pieces: Iterable[memoryview], then: Callable[[], None]) -> None:
        """Fill these next, then call; `then` says what to expect after."""
        for piece in pieces:
            self._wanted.append(piece)
            self._num_wanted += piece.nbytes
        self._then = then

    def await_much(self) -> None:
        """Have the kernel call no sooner than it is worth it, nor later than when all that is expected is there."""
        if not self.is_near:
            return
        num = min(self._num_wanted, _AWAITED_NBYTES)
        if num != self._num_awaited and num:
            self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, num)
            self._num_awaited = num

    def take_in(self, pieces: Sequence[Piece], then: Callable[[], None]) -> None:
        """Fill these pieces of the region next, then call."""
        self.ends.take_in(pieces, self.expect, then)

    def finish_connecting(self) -> None:
        """Raises OSError if the connection did not come about."""
        _raise_pending(self.sock)
        self.is_near = _kept_near(self.sock)
        self.is_connecting = False

    def send(self) -> int:
        """Bytes given to the kernel now. Raises OSError when the connection is broken."""
        total = 0
        for _ in range(_CALLS):
            self._fill_window()
            if not self._window:
                break
            try:
                num_sent = self.sock.sendmsg(_offer(self._window))
            except BlockingIOError:
                break
            _advance(self._window, num_sent)
            total += num_sent
        return total

    def receive(self) -> int:
        """Bytes taken now. Raises OSError when the connection is broken or ended, and whatever `then` raises."""
        total = 0
        for _ in range(_CALLS):
            if self._checks_reset:
                _raise_pending(self.sock)
            try:
                num_received = self.sock.recvmsg_into(_offer(self._wanted))[0]
            except BlockingIOError:
                break
            if num_received == 0:
                raise ConnectionResetError("the other end closed the connection")
            _advance(self._wanted, num_received)
            self._num_wanted -= num_received
            total += num_received
            while not self._wanted:
                self._then()
        return total

    def abort(self) -> None:
        """Throw away what is unsent and let the other end see a reset, not an orderly end."""
        try:
            self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        finally:
            self.close()

    def close(self) -> None:
        self.sock.close()
        self._queue.clear()
        self._window.clear()
        self._wanted.clear()
        self._num_wanted = 0
        self.ends.close()

    def _fill_window(self) -> None:
        while self._queue and len(self._window) < self._max_window:
            piece = next(self._queue[0], None)
            if piece is None:
                self._queue.popleft()
            elif piece.nbytes:
                self._window.append(piece)


class Session(Protocol):
    """Who stands behind a link."""

    link: Link

    def progressed(self, now: float) -> None:
        """Bytes moved."""

    def connected(self) -> None:
        """The connection that was begun is there."""

    def misspoke(self, reason: str, now: float) -> None:
        """Its other end spoke nonsense, or refused us."""

    def broken(self, reason: str, now: float) -> None:
        """The link failed, or is to end: detach it and close it."""


class Mux:
    """The selector, and which of its sessions changed what they wait for."""

    def __init__(self) -> None:
        self.selector = selectors.DefaultSelector()
        self._changed: set[Session] = set()
        self._events: dict[Session, int] = {}

    def attach(self, session: Session) -> None:
        self._events[session] = session.link.events
        self.selector.register(session.link.sock, session.link.events, session)

    def touch(self, session: Session) -> None:
        """It may wait for something else now."""
        self._changed.add(session)

    def settle(self) -> None:
        """Tell the kernel of the changes; before each wait."""
        for session in self._changed & self._events.keys():
            session.link.await_much()
            if self._events[session] != session.link.events:
                self._events[session] = session.link.events
                self.selector.modify(session.link.sock, session.link.events, session)
        self._changed.clear()

    def detach(self, session: Session) -> None:
        """Before its socket is closed."""
        if self._events.pop(session, None) is not None:
            self.selector.unregister(session.link.sock)

    def __contains__(self, session: Session) -> bool:
        return session in self._events


def _offer(pieces: deque[memoryview]) -> list[memoryview]:
    """The first of them, for one system call."""
    offered: list[memoryview] = []
    room = _CALL_NBYTES
    for piece in itertools.islice(pieces, _PIECES):
        offered.append(piece)
        room -= piece.nbytes
        if room <= 0:
            break
    return offered


def _advance(pieces: deque[memoryview], nbytes: int) -> None:
    while nbytes:
        first = pieces.popleft()
        if first.nbytes > nbytes:
            pieces.appendleft(first[nbytes:])
            return
        nbytes -= first.nbytes


def _kept_near(sock: socket.socket) -> bool:
    """Whether it leads to this host itself, and then has a small buffer."""
    try:
        is_near = bool(sock.getsockname()[0] == sock.getpeername()[0])
        if is_near:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _NEAR_NBYTES)
    except OSError:  # a connection that has ended is noticed when it is used
        return False
    return is_near


def _raise_pending(sock: socket.socket) -> None:
    code = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
    if code:
        raise OSError(code, os.strerror(code))


def _nothing() -> None:
    raise AssertionError("a link was read before anything was expected")
