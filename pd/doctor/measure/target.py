"""The side that is written to, in a process of its own: `serve`, or `python -m pd.doctor.measure.target BACKEND HOST
NBYTES FD`, FD a connected socket."""

from __future__ import annotations

import os
import socket
import sys
import zlib
from typing import NoReturn, assert_never

from pd.doctor.measure.ends import End, make_end
from pd.doctor.measure.frames import Frames, PeerError
from pd.doctor.measure.messages import Address, Checksum, Clear, Done, Meet, Ready, Sum, ToTarget, Trouble
from pd.doctor.readable import readable

IDLE_S = 30.0
"""With nothing said: the initiator is gone."""
TURN_S = 0.0005
"""Between looks at a passive library."""


def main() -> NoReturn:
    backend, host, nbytes, fd = sys.argv[1:]
    serve(backend, host, int(nbytes), socket.socket(fileno=int(fd)))


def serve(backend: str, host: str, nbytes: int, sock: socket.socket) -> NoReturn:
    """Obey until Done, or until the other side leaves; then end the process."""
    frames: Frames[ToTarget] = Frames(sock, ToTarget, deadline_s=IDLE_S)  # type: ignore[arg-type]
    try:
        end = make_end(backend, name=f"doctor-target-{os.getpid()}", host=host, nbytes=nbytes)
        frames.send(Address(end.address()))
        while obey(end, frames, _next(end, frames)):
            pass
    except PeerError:
        pass  # the initiator left
    except Exception as error:  # noqa: BLE001  whatever a library raises is this measurement's result
        frames.send(Trouble(f"{type(error).__name__}: {error}"))
    os._exit(0)  # libraries that crash on the way out have nothing left to lose


def obey(end: End, frames: Frames[ToTarget], order: ToTarget) -> bool:
    """False: it was Done."""
    match order:
        case Meet(address):
            end.meet(address)
            frames.send(Ready())
        case Clear(nbytes):
            end.region[:nbytes] = bytes(nbytes)
            frames.send(Ready())
        case Sum(nbytes):
            frames.send(Checksum(zlib.crc32(end.region[:nbytes])))
        case Done():
            return False
        case _:
            assert_never(order)
    return True


def _next(end: End, frames: Frames[ToTarget]) -> ToTarget:
    while not readable(frames.sock.fileno(), timeout_s=TURN_S):
        end.tend()
    return frames.receive()


if __name__ == "__main__":
    main()
