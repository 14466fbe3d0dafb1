"""Passes bytes between two sockets, both ways, until either ends."""

from __future__ import annotations

import contextlib
import socket
import time

from pd.doctor.readable import readable

CHUNK = 64 << 10


def relay(one: socket.socket, other: socket.socket, *, deadline_s: float) -> None:
    """Owns neither socket. Ends when either side closes or breaks, or at the deadline."""
    end = time.monotonic() + deadline_s
    across = {one: other, other: one}
    with contextlib.suppress(OSError):
        while (left := end - time.monotonic()) > 0:
            ready = readable(one.fileno(), other.fileno(), timeout_s=left)
            for sock in (each for each in (one, other) if each.fileno() in ready):
                data = sock.recv(CHUNK)
                if not data:
                    return
                across[sock].sendall(data)
