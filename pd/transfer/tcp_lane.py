"""The initiating end of one connection: asks for welcome, sends a job's share, takes answers in turn."""

from __future__ import annotations

import contextlib
import hmac
import ipaddress
import secrets
import socket
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec

from pd.transfer.outbox import Outbox
from pd.transfer.region import Region
from pd.transfer.tcp_ends import Ends
from pd.transfer.tcp_frames import (
    HEADER_NBYTES,
    MAX_ENTRIES,
    NONCE_NBYTES,
    PROOF_NBYTES,
    SECRET_NBYTES,
    Entry,
    Frame,
    FrameError,
    Kind,
    Prover,
    mixed,
    pack,
    pack_hello,
    prove,
    unpack,
)
from pd.transfer.tcp_link import Link, Mux
from pd.transfer.transport import Span, TransferError


class TcpEndpoint(msgspec.Struct, frozen=True, array_like=True, tag="tcp"):
    me: str
    host: str  # numeric
    port: int
    secret: bytes
    nbytes: int  # of the region


@dataclass(frozen=True, slots=True)
class TcpLimits:
    num_lanes: int = 1
    """Connections to a peer. On loopback one is as fast as several; a network of several paths may want more."""
    connect_s: float = 5.0
    """From the first packet to the peer's welcome on every lane."""
    stall_s: float = 10.0
    """Without one byte of progress while jobs are on their way; the peer then gets `connect_s` to come back."""
    max_jobs: int = 4096
    """Waiting for one peer; more are refused."""
    max_inbound: int = 1024
    """Accepted connections at once; more are closed at the door."""


@dataclass(frozen=True, slots=True)
class Ours:
    """What a peer needs of its transport."""

    region: Region
    ends: Callable[[], Ends]
    """Makes those of one connection."""
    outbox: Outbox
    mux: Mux
    limits: TcpLimits
    key: bytes | None = None
    """The cluster's; it does not travel with endpoints."""


class Far(Protocol):
    """What a lane needs of the peer it leads to."""

    name: str
    me: str
    there: TcpEndpoint
    ours: Ours
    generation: int

    def progressed(self, now: float) -> None:
        """Bytes moved."""

    def welcomed(self, now: float) -> None:
        """One more lane is up."""

    def landed(self, ticket: int, lane: int) -> None:
        """That lane's share of a job is in place. Raises FrameError if there is none."""

    def break_off(self, reason: str, now: float, *, is_told: bool = True) -> None:
        """The lane failed. `is_told`: the reason is more than that the connection ended."""


class Lane:
    """A `Session`: one connection to a peer."""

    def __init__(self, index: int, peer: Far) -> None:
        """Raises OSError if no connection can even be begun."""
        self.index = index
        self.is_up = False
        self._peer = peer
        self._reads: deque[tuple[Frame, list[Entry]]] = deque()
        self._header = bytearray(HEADER_NBYTES)
        family = socket.AF_INET6 if ":" in peer.there.host else socket.AF_INET
        sock = socket.socket(family, socket.SOCK_STREAM)
        try:
            self.link = Link(sock, peer.ours.ends(), is_connecting=True, checks_reset=False)
            with contextlib.suppress(BlockingIOError):
                sock.connect((peer.there.host, peer.there.port))
        except OSError:
            sock.close()
            raise
        self._secret = mixed(peer.there.secret, peer.ours.key)
        self._hello = pack_hello(secrets.token_bytes(NONCE_NBYTES), peer.generation, index, peer.me)
        self._challenge = b""
        self.link.queue([self._hello])
        self._expect_header()
        peer.ours.mux.attach(self)

    @property
    def is_answered(self) -> bool:
        """The other end has spoken."""
        return bool(self._challenge)

    def progressed(self, now: float) -> None:
        self._peer.progressed(now)
        self._peer.ours.mux.touch(self)

    def connected(self) -> None:
        self._peer.ours.mux.touch(self)

    def misspoke(self, reason: str, now: float) -> None:
        self._peer.break_off(reason, now)

    def broken(self, reason: str, now: float) -> None:
        words = self._last_words()
        self._peer.break_off(words or reason, now, is_told=words is not None)

    def carry(self, ticket: int, spans: Sequence[Span], *, is_read: bool) -> None:
        """Send a job's share, in frames of at most MAX_ENTRIES."""
        for start in range(0, max(len(spans), 1), MAX_ENTRIES):
            part = spans[start : start + MAX_ENTRIES]
            nbytes, is_last = sum(span.nbytes for span in part), start + MAX_ENTRIES >= len(spans)
            if is_read:
                frame = Frame(Kind.READ, is_last, len(part), ticket, nbytes)
                self.link.queue([pack(frame, [Entry(span.src, span.nbytes) for span in part])])
                self._reads.append((frame, [Entry(span.dst, span.nbytes) for span in part]))
            else:
                frame = Frame(Kind.WRITE, is_last, len(part), ticket, nbytes)
                self.link.queue(_write_pieces(frame, part, self.link.ends))
        self._peer.ours.mux.touch(self)

    def _expect_header(self) -> None:
        self.link.expect([memoryview(self._header)], self._on_header)

    def _on_header(self) -> None:
        frame = unpack(bytes(self._header))
        if frame.kind is Kind.REFUSED:
            reason = bytearray(frame.nbytes)
            self.link.expect([memoryview(reason)], lambda: self._on_refusal(reason))
            return
        if not self.is_up and frame.kind is (Kind.WELCOME if self._challenge else Kind.CHALLENGE):
            self._be_let_in(frame)
            return
        if not self.is_up:
            raise FrameError(f"{self._peer.name} sends {frame.kind.name} out of turn")
        if frame.kind is Kind.DATA:
            self._on_data(frame)
            return
        if frame.kind is Kind.ACK:
            self._peer.landed(frame.ticket, self.index)
            self._expect_header()
        else:
            raise FrameError(f"an acceptor does not send {frame.kind.name}")

    def _be_let_in(self, frame: Frame) -> None:
        """Prove who we are, then have the acceptor prove who it is."""
        if frame.kind is Kind.CHALLENGE:
            nonce = bytearray(NONCE_NBYTES)
            self.link.expect([memoryview(nonce)], lambda: self._on_challenge(bytes(nonce)))
            return
        if frame.nbytes != self._peer.there.nbytes:
            raise FrameError(f"its region is of {frame.nbytes} bytes, said were {self._peer.there.nbytes}")
        proof = bytearray(PROOF_NBYTES)
        self.link.expect([memoryview(proof)], lambda: self._on_welcome(proof))

    def _on_challenge(self, nonce: bytes) -> None:
        self._challenge = nonce
        proof = prove(Prover.INITIATOR, self._secret, self._hello, nonce)
        self.link.queue([pack(Frame(Kind.PROOF, True, 0, 0, PROOF_NBYTES)), proof])
        self._peer.ours.mux.touch(self)
        self._expect_header()

    def _on_welcome(self, proof: bytearray) -> None:
        expected = prove(Prover.ACCEPTOR, self._secret, self._hello, self._challenge)
        if not hmac.compare_digest(bytes(proof), expected):
            raise FrameError(f"{self._peer.name} does not prove that it is who it says")
        self.is_up = True
        self._expect_header()
        self._peer.welcomed(time.monotonic())

    def _on_data(self, data: Frame) -> None:
        if not self._reads:
            raise FrameError(f"{self._peer.name} sends data that was not asked for")
        asked, pieces = self._reads.popleft()
        if (asked.ticket, asked.nbytes, asked.is_last) != (data.ticket, data.nbytes, data.is_last):
            raise FrameError(f"{self._peer.name} sends {data} for {asked}")

        def filled() -> None:
            if asked.is_last:
                self._peer.landed(asked.ticket, self.index)
            self._expect_header()

        if pieces:
            self.link.take_in(pieces, filled)
        else:
            filled()

    def _last_words(self) -> str | None:
        """Why the other end closed a connection that we were still writing to, if it said so."""
        try:
            self.link.receive()
        except TransferError as error:
            return str(error)
        except OSError:
            pass
        return None

    def _on_refusal(self, reason: bytearray) -> None:
        told = reason.decode(errors="replace")  # of whoever sits at that address: it may hold ends of lines
        raise FrameError(f"{self._peer.name} refused: {''.join(c if c.isprintable() else '?' for c in told)}")


def decode(peer: str, endpoint: bytes) -> TcpEndpoint:
    """Raises TransferError on anything but a sound endpoint of this backend."""
    try:
        there = msgspec.msgpack.decode(endpoint, type=TcpEndpoint)
        ipaddress.ip_address(there.host)
    except (msgspec.MsgspecError, ValueError) as error:
        raise TransferError(f"{peer} sent no tcp endpoint: {error}") from error
    if "%" in there.host:  # a zone means something on its own host alone, and may be any text
        raise TransferError(f"{peer} sent no tcp endpoint: {there.host!r} is no address beyond its host")
    if not 0 < there.port < 1 << 16 or len(there.secret) != SECRET_NBYTES or there.nbytes < 1:
        raise TransferError(f"{peer} sent a broken tcp endpoint: {there.host}:{there.port}, {there.nbytes} bytes")
    return there


def _write_pieces(frame: Frame, spans: Sequence[Span], ends: Ends) -> Iterator[memoryview | bytes]:
    yield pack(frame, [Entry(span.dst, span.nbytes) for span in spans])
    yield from ends.out([(src, nbytes) for src, _, nbytes in spans])
