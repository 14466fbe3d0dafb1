"""What a visitor asks of a doctor's service, and what it answers. Pure.

Rules
1. The visitor speaks first, and every question has one answer; `Refused` may stand for any.
2. The service reaches out to no address but the visitor's own, and only when asked.
3. After `Lend` the connection belongs to a measurement's target: see `pd.doctor.measure.messages`.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

VERSION = 1
PORT = 8590
"""Of the service, unless told."""
LARGEST_REGION = 256 << 20
"""Bytes that a measurement may ask the service to hold."""

Short = Annotated[str, Meta(max_length=64)]
Line = Annotated[str, Meta(max_length=512)]
Facts = Annotated[dict[Short, Line], Meta(max_length=64)]
"""Name -> value, as `pd.doctor.facts` gathers them; compared side by side."""
PortNumber = Annotated[int, Meta(ge=1024, le=65535)]


class Message(msgspec.Struct, frozen=True, array_like=True, tag=True):
    pass


class Hello(Message, frozen=True):
    """-> Welcome."""

    version: int


class Stamp(Message, frozen=True):
    """-> Stamped, at once: for latency and clock skew."""


class Open(Message, frozen=True):
    """-> Opened: take one TCP connection there within seconds."""


class Call(Message, frozen=True):
    """-> Called: connect to this port of mine."""

    port: PortNumber


class Listen(Message, frozen=True):
    """-> Opened: take UDP datagrams there."""


class Count(Message, frozen=True):
    """-> Counted: sizes that arrived since Listen, headers included."""


class Probe(Message, frozen=True):
    """-> Called: send me datagrams of these sizes (headers included), unfragmented, to this UDP port."""

    port: PortNumber
    sizes: Annotated[tuple[Annotated[int, Meta(ge=64, le=65535)], ...], Meta(max_length=16)]


class Lend(Message, frozen=True):
    """-> Lent: start a target of this backend; what follows is between it and me."""

    backend: Short
    nbytes: Annotated[int, Meta(ge=1, le=LARGEST_REGION)]


class Welcome(Message, frozen=True):
    version: int
    facts: Facts
    mtu: int | None  # of the interface that this connection came in by


class Stamped(Message, frozen=True):
    wall_s: float  # seconds since 1970 by the service's clock


class Opened(Message, frozen=True):
    port: int


class Called(Message, frozen=True):
    error: Line  # "": done


class Counted(Message, frozen=True):
    sizes: tuple[int, ...]


class Lent(Message, frozen=True):
    pass


class Refused(Message, frozen=True):
    reason: Line


ToService = Hello | Stamp | Open | Call | Listen | Count | Probe | Lend
FromService = Welcome | Stamped | Opened | Called | Counted | Lent | Refused
