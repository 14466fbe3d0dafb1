"""A scenario: which instances there are, what clients ask, what breaks and when. All of it from one seed."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from pd.runtime.wire.values import Role, Sampling


class Profile(enum.Enum):
    CALM = "calm"  # nothing fails: nothing may be repeated
    FAULTS = "faults"  # messages and writes go wrong, processes pause
    CRASHES = "crashes"  # processes die, are cut off, and come back
    TIGHT = "tight"  # too few pages for what is asked
    LATE = "late"  # writes are slow, writers die over them, and their pages are wanted by others
    ALL = "all"


class Size(enum.Enum):
    SMALL = "small"  # a few requests and one or two blows: most schedules, because many differ more than long ones do
    MEDIUM = "medium"
    LARGE = "large"  # twenty requests, and a long silence before the last question


@dataclass(frozen=True, slots=True)
class Instance:
    name: str
    role: Role
    num_ranks: int
    page_size: int
    num_pages: int
    max_running: int
    joins_at: float = 0.0


@dataclass(frozen=True, slots=True)
class Ask:
    at: float
    request_id: str
    prompt: tuple[int, ...]
    sampling: Sampling
    deadline_s: float
    leave_at: float | None = None  # the client leaves then
    leave_after: int | None = None  # or after so many tokens
    leave_at_event: int | None = None  # or when so many messages about it were heard, by anybody
    is_probe: bool = False  # asked when all is whole again: must be answered in the end


@dataclass(frozen=True, slots=True)
class Odds:
    """Chances of a fault, each time it could happen, while faults last."""

    drop: float = 0.0
    duplicate: float = 0.0
    spike: float = 0.0  # a message takes up to a second
    reorder: bool = False  # also between the same two processes
    write_error: float = 0.0  # one rank's share of a job fails
    lost_completion: float = 0.0  # one rank's share of a job never ends by itself
    unreachable: float = 0.0  # with a write error: the ranks say the peer is out of reach
    attach_error: float = 0.0  # a rank cannot connect
    corrupt: float = 0.0  # a value of what lands is another; only where digests are compared
    write_s: float = 0.01  # how long a write takes, on average


class Blow(enum.Enum):
    KILL = "kill"
    DRAIN = "drain"
    STALL = "stall"  # a process stands still
    SLOW = "slow"  # a process takes ten times as long for all it does
    PART = "part"  # a partition between two processes, or between one and all others


@dataclass(frozen=True, slots=True)
class Strike:
    at: float
    blow: Blow
    target: str
    seconds: float  # for how long; of a kill, until a new life starts
    other: str | None = None
    is_cunning: bool = False  # a kill that waits for a moment when pages are being written
    event: int | None = None  # a kill in the midst of what the target does about its so many-th next event ...
    effect: int = 0  # ... when it has done so much of it
    is_for_good: bool = False  # no new life


@dataclass(frozen=True, slots=True)
class Scenario:
    seed: int
    profile: Profile
    size: Size
    instances: tuple[Instance, ...]
    asks: tuple[Ask, ...]
    probes: tuple[Ask, ...]
    strikes: tuple[Strike, ...] = ()
    odds: Odds = field(default_factory=Odds)
    can_sever: bool = True
    whole_at: float = 0.0  # from here on nothing fails any more
    settled_at: float = 0.0  # from here on probes must be answered: the longest silence or severing is over
    max_model_len: int = 64
    max_prefill_tokens: int = 16
    num_heads: int = 2
    is_encoded: bool = False  # messages travel as bytes
    clock_offsets: dict[str, float] = field(default_factory=dict)
    clock_rates: dict[str, float] = field(default_factory=dict)
    reserve: str = "early"  # the router's policies
    direction: str = "push"
    verifies: bool = False
    streams: bool = False  # a step's writes begin in two halves, the first while it computes
    misfits: dict[str, str] = field(default_factory=dict)  # whose ranks find that they can never reach whom
    staging: tuple[int, int] | None = None  # KV goes packed, through so many slots of so many tokens a rank
