"""Typed messages over a stream socket: four bytes of length, then MessagePack. Used between processes and hosts.

Rules
1. A frame longer than LARGEST, or one that does not decode, is a `PeerError`; nothing of it is believed.
2. Every receive has a deadline.
"""

from __future__ import annotations

import socket
import struct
from typing import Generic, TypeVar

import msgspec

LARGEST = 64 << 10
"""Bytes of one message: the longest are an endpoint (4 KiB) and a host's facts."""
DEADLINE_S = 20.0
"""Clearing and summing 256 MiB takes under a second on any machine worth serving on."""
_LENGTH = struct.Struct("!I")

T = TypeVar("T")


class PeerError(Exception):
    """The other side broke off, was too slow, or spoke nonsense."""


class Frames(Generic[T]):
    """One end of a conversation in messages of the union `kind`. Owns the socket."""

    def __init__(self, sock: socket.socket, kind: type[T], *, deadline_s: float = DEADLINE_S) -> None:
        self.sock = sock
        sock.settimeout(deadline_s)
        self._decoder = msgspec.msgpack.Decoder(kind)

    def send(self, message: msgspec.Struct) -> None:
        send_raw(self.sock, msgspec.msgpack.encode(message))

    def receive(self) -> T:
        try:
            return self._decoder.decode(receive_raw(self.sock))
        except msgspec.MsgspecError as error:
            raise PeerError(f"unreadable message: {error}") from error

    def close(self) -> None:
        self.sock.close()


def send_raw(sock: socket.socket, body: bytes) -> None:
    try:
        sock.sendall(_LENGTH.pack(len(body)) + body)
    except OSError as error:
        raise PeerError(f"sending failed: {error}") from error


def receive_raw(sock: socket.socket) -> bytes:
    (length,) = _LENGTH.unpack(_exactly(sock, _LENGTH.size))
    if length > LARGEST:
        raise PeerError(f"a message of {length} bytes; at most {LARGEST} are taken")
    return _exactly(sock, length)


def _exactly(sock: socket.socket, nbytes: int) -> bytes:
    parts, left = [], nbytes
    while left:
        try:
            part = sock.recv(left)
        except TimeoutError as error:
            raise PeerError(f"no answer in {sock.gettimeout():.0f} s") from error
        except OSError as error:
            raise PeerError(f"receiving failed: {error}") from error
        if not part:
            raise PeerError("the other side closed the connection")
        parts.append(part)
        left -= len(part)
    return b"".join(parts)
