"""What brains hear and what they want done. Pure.

`brain.on(event, now) -> list[effect]`: `now` is seconds of this host's monotonic clock, never compared across hosts.
The shell performs effects in order. It decides nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from pd.runtime.wire.messages import AnyMessage
from pd.runtime.wire.plans import Attach, Digest, Sever, StepPlan, Transfer
from pd.runtime.wire.values import Finish, Sampling, Token

ROUTER = "router"
"""The router's name as a sender and as a destination."""


class Peer(NamedTuple):
    """One life of a process. A restarted one is another Peer."""

    name: str
    epoch: str


# ---- events -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Received:
    """A message from another instance, the router or (rank r of our own instance) `Peer(str(r), "")`."""

    sender: Peer
    message: AnyMessage


@dataclass(frozen=True, slots=True)
class Tick:
    """Time passed. Sent at least every 100 ms; every deadline is looked at here."""


@dataclass(frozen=True, slots=True)
class Drain:
    """Take nothing new; end what runs; then Exit."""

    reason: str


@dataclass(frozen=True, slots=True)
class Submit:
    """Router only: a client's request, checked and tokenized."""

    request_id: str
    tokens: tuple[int, ...]
    sampling: Sampling
    deadline_s: float  # from now, for the whole answer


@dataclass(frozen=True, slots=True)
class Abandon:
    """Router only: the client left, or has all it wanted (a stop string), or the server stops. `reason` says which."""

    request_id: str
    reason: str


@dataclass(frozen=True, slots=True)
class HungUp:
    """Router only: the connection to that life is closed. None: to somebody; a message to each will tell to whom."""

    peer: Peer | None = None


# ---- effects ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Send:
    """To the router (ROUTER) or to another instance by name. An unknown or dead destination drops it silently:
    deadlines and membership speak of that, not the link."""

    to: str
    message: AnyMessage


@dataclass(frozen=True, slots=True)
class Launch:
    """To every rank of the instance."""

    plan: StepPlan


@dataclass(frozen=True, slots=True)
class Order:
    """To every rank, outside the sequence of steps."""

    message: Attach | Sever | Transfer | Digest


class Timings(NamedTuple):
    """Where an answer's time went, in seconds; of its last attempt. They add up to the time to decode's first token."""

    queued_s: float  # from Submit until prefill planned its first chunk: in the router, for pages, at the prefill
    prefill_s: float  # until the first token was here
    handoff_s: float  # until decode's first token was here, its step included; 0 where one instance does both


@dataclass(frozen=True, slots=True)
class Emit:
    """Router only: tokens for the client, in order, each position once. `finish` is the request's one ending."""

    request_id: str
    position: int
    tokens: tuple[Token, ...]
    finish: Finish | None
    cached_tokens: int | None = None  # told with the first token
    timings: Timings | None = field(default=None, compare=False)  # told with the last


@dataclass(frozen=True, slots=True)
class End:
    """Router only: the request's one ending when it fails. `status` is HTTP's; 429 and 503 carry retry_after_s."""

    request_id: str
    status: int
    reason: str
    retry_after_s: float | None = None


@dataclass(frozen=True, slots=True)
class Stamp:
    """For logs, metrics and spans: something happened in a request's life. `what` is one word of docs/words.md."""

    subject: str  # a handle, a request id, or a worker
    what: str
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Exit:
    """The instance has nothing left to do (drained), or may not go on: end the process.

    `failed`: a new life may do better. `refused` as well: it will not, until a person changes something.
    """

    reason: str
    failed: bool
    refused: bool = False


Event = Received | Tick | Drain | Submit | Abandon | HungUp
Effect = Send | Launch | Order | Emit | End | Stamp | Exit
