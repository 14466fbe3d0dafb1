"""Passes bytes between two sockets, both ways, until either ends."""

from __future__ import annotations

import contextlib
import select
import socket
import time

CHUNK = 64 << 10


def relay(one: socket.socket, other: socket.socket, *, deadline_s: float) -> None:
    """Owns neither socket. Ends when either side closes or breaks, or at the deadline."""
    end = time.monotonic() + deadline_s
    across = {one: other, other: one}
    with contextlib.suppress(OSError):
        while (left := end - time.monotonic()) > 0:
            for sock in select.select([one, other], [], [], left)[0]:
                data = sock.recv(CHUNK)
                if not data:
                    return
                across[sock].sendall(data)
