"""What this host's name resolves to."""

from __future__ import annotations

import socket

from pd.doctor.answers import Hosts


def answer() -> Hosts:
    name = socket.gethostname()
    try:
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except OSError as error:
        return Hosts(name=name, addresses=(), error=str(error))
    return Hosts(name=name, addresses=tuple(dict.fromkeys(str(f[4][0]) for f in found)), error="")
