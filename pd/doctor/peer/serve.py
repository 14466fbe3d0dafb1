"""The service: answers a visitor's questions about this host and lends it targets to measure against.

Rules
1. One thread a connection, at most MAX_VISITS; another is told so and closed.
2. Each connection lives at most VISIT_S. One measurement at a time.
3. It changes nothing, needs no right, and knows no secret; whoever reaches the port can read the facts it tells, so it
   listens on loopback unless --host says otherwise, and ends with Ctrl-C.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from typing import assert_never

from pd.doctor.measure.ends import MODULES
from pd.doctor.measure.frames import Frames, PeerError
from pd.doctor.measure.initiator import start_target
from pd.doctor.peer.path import count_whole, mtu_of, send_whole
from pd.doctor.peer.protocol import (
    VERSION,
    Call,
    Called,
    Count,
    Counted,
    FromService,
    Hello,
    Lend,
    Lent,
    Listen,
    Open,
    Opened,
    Probe,
    Refused,
    Stamp,
    Stamped,
    ToService,
    Welcome,
)
from pd.doctor.peer.relay import relay

MAX_VISITS = 8
VISIT_S = 120.0
CALL_S = 3.0
"""To connect somewhere: a packet that a firewall drops gets no answer at all."""
HEAR_S = 0.3
"""For datagrams that were sent before the question."""


class Service:
    """Owns the listening socket. `serve` blocks until `close`."""

    def __init__(self, host: str, port: int, facts: dict[str, str]) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, port), family=family, backlog=MAX_VISITS)
        self.address: tuple[str, int] = self._listener.getsockname()[:2]
        self._facts = facts
        self._slots = threading.BoundedSemaphore(MAX_VISITS)
        self._measuring = threading.Lock()

    def serve(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                return  # closed
            threading.Thread(target=self._visit, args=(sock,), daemon=True).start()

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes accept
        self._listener.close()

    def _visit(self, sock: socket.socket) -> None:
        frames: Frames[ToService] = Frames(sock, ToService)  # type: ignore[arg-type]
        if not self._slots.acquire(blocking=False):
            with contextlib.suppress(PeerError):
                frames.send(Refused(f"{MAX_VISITS} visits are going on; try again"))
            frames.close()
            return
        visit = Visit(frames, self._facts, self._measuring)
        try:
            visit.run()
        finally:
            visit.close()
            self._slots.release()


class Visit:
    """One connection: its socket, and the listeners it asked for."""

    def __init__(self, frames: Frames[ToService], facts: dict[str, str], measuring: threading.Lock) -> None:
        self._frames = frames
        self._facts = facts
        self._measuring = measuring
        self._here: str = frames.sock.getsockname()[0]
        self._there: str = frames.sock.getpeername()[0]
        self._datagrams: socket.socket | None = None

    def run(self) -> None:
        """Answer until the visitor leaves, speaks nonsense or has had its time."""
        end = time.monotonic() + VISIT_S
        with contextlib.suppress(PeerError):
            while time.monotonic() < end:
                question = self._frames.receive()
                if isinstance(question, Lend):
                    self._lend(question)
                    return
                self._frames.send(self._answer(question))

    def close(self) -> None:
        self._frames.close()
        if self._datagrams:
            self._datagrams.close()

    def _answer(self, question: Hello | Stamp | Open | Call | Listen | Count | Probe) -> FromService:
        match question:
            case Hello(version):
                if version != VERSION:
                    return Refused(f"this doctor speaks version {VERSION}, yours {version}: use one version of pd")
                return Welcome(VERSION, self._facts, mtu_of(self._here))
            case Stamp():
                return Stamped(time.time())
            case Open():
                return self._open()
            case Call(port):
                return Called(try_port(self._there, port))
            case Listen():
                return self._listen()
            case Count():
                return Counted(tuple(sorted(count_whole(self._datagrams, wait_s=HEAR_S))) if self._datagrams else ())
            case Probe(port, sizes):
                send_whole(self._frames.sock.family, self._there, port, sizes)
                return Called("")
            case _:
                assert_never(question)

    def _open(self) -> Opened:
        """A listener that takes one connection and closes; a thread of its own, so that the answer goes out first."""
        listener = socket.create_server((self._here, 0), family=self._frames.sock.family)
        threading.Thread(target=take_one, args=(listener,), daemon=True).start()
        return Opened(listener.getsockname()[1])

    def _listen(self) -> Opened:
        if self._datagrams is None:
            self._datagrams = socket.socket(self._frames.sock.family, socket.SOCK_DGRAM)
            self._datagrams.bind((self._here, 0))
        return Opened(self._datagrams.getsockname()[1])

    def _lend(self, wanted: Lend) -> None:
        if wanted.backend not in MODULES:
            self._frames.send(Refused(f"no backend {wanted.backend}"))
            return
        if not self._measuring.acquire(timeout=CALL_S):
            self._frames.send(Refused("another measurement is going on; try again"))
            return
        try:
            self._frames.send(Lent())
            process, inner = start_target(wanted.backend, host=self._here, nbytes=wanted.nbytes)
            try:
                relay(self._frames.sock, inner, deadline_s=VISIT_S)
            finally:
                inner.close()
                process.kill()
                process.wait()
        finally:
            self._measuring.release()


def take_one(listener: socket.socket) -> None:
    with listener, contextlib.suppress(OSError):
        listener.settimeout(2 * CALL_S)
        listener.accept()[0].close()


def try_port(host: str, port: int) -> str:
    """What connecting says; "" when it went."""
    try:
        socket.create_connection((host, port), timeout=CALL_S).close()
    except TimeoutError:
        return f"no answer in {CALL_S:.0f} s: a firewall drops it"
    except OSError as error:
        return error.strerror or str(error)
    return ""
