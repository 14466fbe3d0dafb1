"""The visitor's side: connecting to a doctor's service and asking."""

from __future__ import annotations

import ipaddress
import re
import socket
from typing import TypeVar

from pd.doctor.measure.frames import Frames, PeerError
from pd.doctor.measure.messages import FromTarget
from pd.doctor.peer.protocol import PORT, VERSION, FromService, Hello, Lend, Lent, Message, Refused, Welcome

CONNECT_S = 5.0
_ADDRESS = re.compile(r"(?:\[(?P<v6>[^\]]+)\]|(?P<host>[^:\[\]\s]+))(?::(?P<port>\d{1,5}))?")
M = TypeVar("M", bound=Message)


def parse(address: str) -> tuple[str, int]:
    """ "host", "host:port", "[v6]:port" -> host and port. Raises ValueError saying what is wrong."""
    if _is_ipv6(address):
        return address, PORT
    found = _ADDRESS.fullmatch(address)
    port = int(found["port"] or PORT) if found else 0
    if found is None or not 0 < port < 65536 or (found["v6"] and not _is_ipv6(found["v6"])):
        raise ValueError(f"--peer {address}: expected HOST or HOST:PORT ([…]:PORT for IPv6)")
    return found["v6"] or found["host"], port


def _is_ipv6(text: str) -> bool:
    try:
        return ipaddress.ip_address(text).version == 6
    except ValueError:
        return False


class Host:
    """A conversation with a service. Owns its connection."""

    def __init__(self, address: str) -> None:
        """Raises PeerError saying why there is nobody."""
        host, port = parse(address)
        try:
            sock = socket.create_connection((host, port), timeout=CONNECT_S)
        except TimeoutError as error:
            raise PeerError(f"no answer from {host}:{port} in {CONNECT_S:.0f} s") from error
        except OSError as error:
            raise PeerError(f"{host}:{port}: {error.strerror or error}") from error
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.frames: Frames[FromService] = Frames(sock, FromService)  # type: ignore[arg-type]

    @property
    def sock(self) -> socket.socket:
        return self.frames.sock

    def greet(self) -> Welcome:
        return self.ask(Hello(VERSION), Welcome)

    def ask(self, question: Message, kind: type[M]) -> M:
        """Raises PeerError for a refusal, an answer of another kind, or none."""
        self.frames.send(question)
        answer = self.frames.receive()
        if isinstance(answer, Refused):
            raise PeerError(answer.reason)
        if not isinstance(answer, kind):
            raise PeerError(f"{type(answer).__name__} where {kind.__name__} belongs")
        return answer

    def close(self) -> None:
        self.frames.close()


def borrow_target(address: str, backend: str, *, nbytes: int) -> Frames[FromTarget]:
    """Let the service start a target; the frames then lead to it. Raises PeerError. The caller closes them."""
    host = Host(address)
    try:
        host.ask(Lend(backend, nbytes), Lent)
    except PeerError:
        host.close()
        raise
    return Frames(host.sock, FromTarget)  # type: ignore[arg-type]
