"""The accepting end of one connection: puts a peer's bytes into our region, and hands ours out.

Nothing is believed before the hello's proof is right, nor any entry before all of its frame's table is checked.
"""

from __future__ import annotations

import hmac
import secrets
import socket
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

from pd.transfer.region import Region
from pd.transfer.tcp_ends import Ends
from pd.transfer.tcp_frames import (
    ENTRY_NBYTES,
    HEADER_NBYTES,
    HELLO_NBYTES,
    NONCE_NBYTES,
    PROOF_NBYTES,
    Entry,
    Frame,
    FrameError,
    Hello,
    Kind,
    Prover,
    pack,
    pack_refusal,
    prove,
    unpack,
    unpack_entries,
    unpack_hello,
)
from pd.transfer.tcp_link import Link, Mux

_LINGER_S = 1.0
"""For a refused peer to read why; what it sends meanwhile is thrown away."""


class House(Protocol):
    """What a served connection needs of its transport."""

    secret: bytes  # tied to the cluster's key
    region: Region
    ends: Callable[[], Ends]
    mux: Mux

    def admit(self, served: Served, generation: int) -> str | None:
        """Why this peer may not come in; None if it may. Ends its connections of lower generations first."""

    def forget(self, served: Served) -> None:
        """It is over."""

    def refused(self, who: str, reason: str, now: float) -> None:
        """One is shown out: count it, and tell a person."""


class Served:
    """A `Session`. `deadline` is when to end it unless it got on; None: it may stay."""

    def __init__(self, sock: socket.socket, house: House, *, deadline: float) -> None:
        self.link = Link(sock, house.ends(), is_connecting=False, checks_reset=True)
        self.who = "{}:{}".format(*sock.getpeername()[:2])  # for a person
        self.name: str | None = None  # the initiator's `me`, once admitted
        self.deadline: float | None = deadline
        self._house = house
        self._is_refused = False
        self._is_turned_away = False  # one that may be known, and comes again every second: no news
        self._hello = bytearray(HELLO_NBYTES)
        self._header = bytearray(HEADER_NBYTES)
        self.link.expect([memoryview(self._hello)], self._on_hello)

    def progressed(self, now: float) -> None:
        self._house.mux.touch(self)
        if self._is_refused and not self.link.has_output:
            self._is_refused = False
            self.link.sock.shutdown(socket.SHUT_WR)  # it reads why, then the end

    def connected(self) -> None:
        """Accepted connections are from the start."""

    def broken(self, reason: str, now: float) -> None:
        self._house.mux.detach(self)
        self._house.forget(self)
        self.link.close()

    def misspoke(self, reason: str, now: float) -> None:
        """Say why, take nothing more in, and end soon."""
        if not self._is_turned_away:
            self._house.refused(self.who, reason, now)
        self._house.forget(self)
        self._is_refused = True
        self.deadline = now + _LINGER_S
        self.link.queue([pack_refusal(reason)])
        self._house.mux.touch(self)
        self._discard()

    def _discard(self) -> None:
        self.link.expect([memoryview(bytearray(1 << 16))], self._discard)

    def _on_hello(self) -> None:
        hello = unpack_hello(bytes(self._hello))
        name = bytearray(hello.name_nbytes)
        self.link.expect([memoryview(name)], lambda: self._challenge(hello, bytes(name)))

    def _challenge(self, hello: Hello, name: bytes) -> None:
        nonce = secrets.token_bytes(NONCE_NBYTES)
        self.link.queue([pack(Frame(Kind.CHALLENGE, True, 0, 0, NONCE_NBYTES)), nonce])
        self._house.mux.touch(self)
        answer = bytearray(HEADER_NBYTES + PROOF_NBYTES)
        said = bytes(self._hello) + name
        self.link.expect([memoryview(answer)], lambda: self._on_proof(hello, said, nonce, answer))

    def _on_proof(self, hello: Hello, said: bytes, nonce: bytes, answer: bytearray) -> None:
        frame = unpack(bytes(answer[:HEADER_NBYTES]))
        if frame.kind is not Kind.PROOF:
            raise FrameError(f"a challenge is answered with a PROOF, not with {frame.kind.name}")
        name = said[HELLO_NBYTES:].decode(errors="replace")
        self.who = f"{ascii(name)[1:-1]} at {self.who}"  # a stranger's choice: it may hold an end of line
        expected = prove(Prover.INITIATOR, self._house.secret, said, nonce)
        if not hmac.compare_digest(bytes(answer[HEADER_NBYTES:]), expected):
            raise FrameError("wrong proof: another life of the process, another process, or another cluster key")
        self.name = name
        refusal = self._house.admit(self, hello.generation)
        if refusal is not None:
            self._is_turned_away = True
            raise FrameError(refusal)
        self.deadline = None
        self._answer(Frame(Kind.WELCOME, True, 0, 0, self._house.region.nbytes))
        self.link.queue([prove(Prover.ACCEPTOR, self._house.secret, said, nonce)])
        self._expect_header()

    def _expect_header(self) -> None:
        self.link.expect([memoryview(self._header)], self._on_header)

    def _on_header(self) -> None:
        frame = unpack(bytes(self._header))
        if frame.kind not in (Kind.WRITE, Kind.READ):
            raise FrameError(f"an initiator does not send {frame.kind.name}")
        table = bytearray(frame.num_entries * ENTRY_NBYTES)
        if table:
            self.link.expect([memoryview(table)], lambda: self._on_table(frame, table))
        else:
            self._on_table(frame, table)

    def _on_table(self, frame: Frame, table: bytearray) -> None:
        entries = unpack_entries(frame, bytes(table), self._house.region.nbytes)
        if frame.kind is Kind.READ:
            data = Frame(Kind.DATA, frame.is_last, 0, frame.ticket, frame.nbytes)
            self.link.queue(self._data(data, entries))
            self._expect_header()
        elif entries:
            self.link.take_in(entries, lambda: self._on_payload(frame))
        else:
            self._on_payload(frame)

    def _on_payload(self, frame: Frame) -> None:
        if frame.is_last:
            self._answer(Frame(Kind.ACK, True, 0, frame.ticket, 0))
        self._expect_header()

    def _data(self, frame: Frame, entries: Sequence[Entry]) -> Iterator[memoryview]:
        yield memoryview(pack(frame))
        yield from self.link.ends.out(entries)

    def _answer(self, frame: Frame) -> None:
        self.link.queue([pack(frame)])
        self._house.mux.touch(self)
