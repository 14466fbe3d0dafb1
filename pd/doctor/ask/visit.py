"""A visit to a `pd doctor --serve`: facts, latency, clock, ports both ways, and how large a packet passes."""

from __future__ import annotations

import contextlib
import socket
import threading
import time

from pd.doctor.answers import Visit
from pd.doctor.facts import gather
from pd.doctor.local import ThisMachine
from pd.doctor.measure.frames import PeerError
from pd.doctor.peer.path import LARGEST, count_whole, interface_of, mtu_of, send_whole
from pd.doctor.peer.protocol import Call, Called, Count, Counted, Listen, Open, Opened, Probe, Stamp, Stamped
from pd.doctor.peer.serve import HEAR_S, take_one, try_port
from pd.doctor.peer.visit import Host

STAMPS = 50
"""Round trips; the fastest says latency and skew with least doubt."""
ETHERNET = 1500
STEPS = (9000, 4200, 1500, 1450, 1400, 1280, 576)
"""MTUs in use: jumbo, RoCE's 4096 and headers, Ethernet, tunnels, IPv6's least, IPv4's least."""


def answer(address: str) -> Visit:
    try:
        host = Host(address)
    except PeerError as error:
        return Visit(error=str(error))
    try:
        with contextlib.closing(host):
            return _look(host)
    except PeerError as error:
        return Visit(error=f"{address} answered, then: {error}")


def _look(host: Host) -> Visit:
    welcome = host.greet()
    here = host.sock.getsockname()[0]
    interface = interface_of(here)
    latency, skew = _clocks(host)
    mtu = mtu_of(here)
    ours, theirs = (min(m or ETHERNET, LARGEST) for m in (mtu, welcome.mtu))
    sizes = tuple(s for s in dict.fromkeys((ours, theirs, *STEPS)) if s <= max(ours, theirs))
    return Visit(
        error="",
        interface=interface or "",
        here=gather(ThisMachine()),
        there=dict(welcome.facts),
        latency_s=latency,
        skew_s=skew,
        out=_out(host),
        back=_back(host),
        mtu_here=mtu,
        mtu_there=welcome.mtu,
        whole_out=_whole_out(host, sizes),
        whole_back=_whole_back(host, sizes),
    )


def _clocks(host: Host) -> tuple[float, float]:
    """Seconds of the fastest round trip, and how far the other clock is ahead by it."""
    best = (float("inf"), 0.0)
    for _ in range(STAMPS):
        wall, began = time.time(), time.perf_counter()
        theirs = host.ask(Stamp(), Stamped).wall_s
        trip = time.perf_counter() - began
        best = min(best, (trip, theirs - wall - trip / 2))
    return best


def _out(host: Host) -> str:
    """Connecting to a fresh port there."""
    return try_port(host.sock.getpeername()[0], host.ask(Open(), Opened).port)


def _back(host: Host) -> str:
    """Being connected to from there."""
    listener = socket.create_server((host.sock.getsockname()[0], 0), family=host.sock.family)
    taking = threading.Thread(target=take_one, args=(listener,), daemon=True)
    taking.start()
    return host.ask(Call(listener.getsockname()[1]), Called).error


def _whole_out(host: Host, sizes: tuple[int, ...]) -> int:
    port = host.ask(Listen(), Opened).port
    send_whole(host.sock.family, host.sock.getpeername()[0], port, sizes)
    return max(host.ask(Count(), Counted).sizes, default=0)


def _whole_back(host: Host, sizes: tuple[int, ...]) -> int:
    with socket.socket(host.sock.family, socket.SOCK_DGRAM) as sock:
        sock.bind((host.sock.getsockname()[0], 0))
        host.ask(Probe(sock.getsockname()[1], sizes), Called)
        return max(count_whole(sock, wait_s=HEAR_S), default=0)
