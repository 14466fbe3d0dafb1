"""A scenario: which instances there are, what clients ask, what breaks and when. All of it from one seed."""

from __future__ import annotations

import enum
import random
from dataclasses import dataclass, field

from pd.runtime.wire.messages import Role, Sampling

MAX_MODEL_LEN = 64


class Profile(enum.Enum):
    CALM = "calm"  # nothing fails: nothing may be repeated
    FAULTS = "faults"  # messages and writes go wrong, processes pause
    CRASHES = "crashes"  # processes die, are cut off, and come back
    TIGHT = "tight"  # too few pages for what is asked
    LATE = "late"  # writes are slow, writers die over them, and their pages are wanted by others
    ALL = "all"


@dataclass(frozen=True, slots=True)
class Instance:
    name: str
    role: Role
    num_ranks: int
    page_size: int
    num_pages: int
    max_running: int


@dataclass(frozen=True, slots=True)
class Ask:
    at: float
    request_id: str
    prompt: tuple[int, ...]
    sampling: Sampling
    deadline_s: float
    leave_at: float | None = None  # the client leaves then
    leave_after: int | None = None  # or after so many tokens
    is_probe: bool = False  # asked when all is whole again: must be answered


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
    write_s: float = 0.01  # how long a write takes, on average


class Blow(enum.Enum):
    KILL = "kill"
    DRAIN = "drain"
    STALL = "stall"
    PART = "part"  # a partition between two processes, or between one and all others


@dataclass(frozen=True, slots=True)
class Strike:
    at: float
    blow: Blow
    target: str
    seconds: float
    other: str | None = None
    is_cunning: bool = False  # a kill that waits for a moment when pages are being written


@dataclass(frozen=True, slots=True)
class Scenario:
    seed: int
    profile: Profile
    instances: tuple[Instance, ...]
    asks: tuple[Ask, ...]
    strikes: tuple[Strike, ...]
    odds: Odds
    can_sever: bool
    whole_at: float  # from here on nothing fails any more
    clock_offsets: dict[str, float] = field(default_factory=dict)


def scenario(seed: int, profile: Profile) -> Scenario:
    rng = random.Random(f"{profile.value} {seed}")
    instances = _instances(rng, profile)
    whole_at = 4.6
    asks = _asks(rng, profile, until=4.2)
    probe_at = whole_at + 7.0  # the longest silence or severing is over by then
    asks += [_probe(rng, probe_at + 0.01 * index, index) for index in range(3)]
    names = [instance.name for instance in instances]
    return Scenario(
        seed,
        profile,
        tuple(instances),
        tuple(asks),
        tuple(_strikes(rng, profile, names, until=3.2)),
        _odds(rng, profile),
        can_sever=profile is Profile.CALM or rng.random() < 0.5,
        whole_at=whole_at,
        clock_offsets={name: rng.choice((0.0, rng.uniform(0.0, 3600.0))) for name in ["router", *names]},
    )


def _instances(rng: random.Random, profile: Profile) -> list[Instance]:
    tight = profile is Profile.TIGHT or (profile is Profile.ALL and rng.random() < 0.5)
    page_size = rng.choice((4, 4, 2, 8))
    odd_sizes = rng.random() < 0.3

    def instance(name: str, role: Role) -> Instance:
        size = rng.choice((2, 4, 8)) if odd_sizes else page_size
        longest = -(-MAX_MODEL_LEN // size)
        num_pages = rng.randint(longest // 2, longest * 2) if tight else longest * rng.randint(3, 5)
        if profile is Profile.CALM:
            num_pages = longest * 9  # for all slots and what is promised: nobody gives way
        elif profile is Profile.LATE:
            num_pages = longest * 2
        max_running = rng.choice((2, 3, 4)) if tight else 8
        return Instance(name, role, rng.choice((1, 1, 2)), size, num_pages, max_running)

    if profile is Profile.LATE:
        return [instance("p0", Role.PREFILL), instance("p1", Role.PREFILL), instance("d0", Role.DECODE)]
    shape = rng.random()
    if shape < 0.12:
        return [instance(f"c{index}", Role.COLOCATED) for index in range(rng.randint(1, 2))]
    instances = [instance(f"p{index}", Role.PREFILL) for index in range(rng.randint(1, 2))]
    instances += [instance(f"d{index}", Role.DECODE) for index in range(rng.randint(1, 2))]
    if shape > 0.9:
        instances.append(instance("c0", Role.COLOCATED))
    return instances


def _asks(rng: random.Random, profile: Profile, *, until: float) -> list[Ask]:
    beginnings = [tuple(rng.randrange(97) for _ in range(rng.randint(4, 24))) for _ in range(3)]
    asks: list[Ask] = []
    time = 0.6
    while time < until and len(asks) < 20:
        num_alike = rng.choice((1, 1, 1, 2, 4))  # `n`, or a burst of one prompt
        prompt = _prompt(rng, beginnings)
        for _ in range(num_alike):
            asks.append(_ask(rng, time, f"r{len(asks)}", prompt, profile=profile))
        time += rng.choice((0.0, rng.expovariate(4.0), rng.expovariate(2.0)))
    return asks


def _prompt(rng: random.Random, beginnings: list[tuple[int, ...]]) -> tuple[int, ...]:
    beginning = rng.choice(beginnings) if rng.random() < 0.5 else ()
    num_more = rng.choice((1, 2, rng.randint(1, 16), rng.randint(1, 36), rng.choice((3, 4, 5, 7, 8, 9))))
    return (beginning + tuple(rng.randrange(97) for _ in range(num_more)))[: MAX_MODEL_LEN - 2]


def _ask(rng: random.Random, at: float, request_id: str, prompt: tuple[int, ...], *, profile: Profile) -> Ask:
    sampling = Sampling(
        max_tokens=rng.choice((1, 2, rng.randint(1, 8), rng.randint(4, 24))),
        temperature=0.0,
        stop_token_ids=(rng.randrange(97), rng.randrange(97)) if rng.random() < 0.4 else (),
    )
    leaves = rng.random() if profile is not Profile.CALM else 1.0
    return Ask(
        at,
        request_id,
        prompt,
        sampling,
        deadline_s=rng.choice((30.0, 30.0, 4.0)) if profile is not Profile.CALM else 30.0,
        leave_at=at + rng.uniform(0.0, 0.5) if leaves < 0.1 else None,
        leave_after=rng.randint(1, 5) if 0.1 <= leaves < 0.2 else None,
    )


def _probe(rng: random.Random, at: float, index: int) -> Ask:
    prompt = tuple(rng.randrange(97) for _ in range(rng.randint(1, 7)))
    return Ask(at, f"probe{index}", prompt, Sampling(max_tokens=4, temperature=0.0), 20.0, is_probe=True)


def _odds(rng: random.Random, profile: Profile) -> Odds:
    if profile in (Profile.CALM, Profile.TIGHT):
        return Odds()
    if profile is Profile.LATE:
        return Odds(spike=0.02, drop=rng.choice((0.0, 0.02)), reorder=rng.random() < 0.5, write_s=0.06)
    heavy = rng.random() < 0.3
    scale = (3.0 if heavy else 1.0) if profile is not Profile.CRASHES else 0.3
    return Odds(
        drop=rng.choice((0.0, 0.01, 0.02)) * scale,
        duplicate=rng.choice((0.0, 0.02)) * scale,
        spike=rng.choice((0.0, 0.02)) * scale,
        reorder=rng.random() < 0.3,
        write_error=rng.choice((0.0, 0.02, 0.05)) * scale,
        lost_completion=rng.choice((0.0, 0.03)) * scale,
        unreachable=rng.random() * 0.5,
    )


def _strikes(rng: random.Random, profile: Profile, names: list[str], *, until: float) -> list[Strike]:
    blows = {
        Profile.CALM: (),
        Profile.TIGHT: (),
        Profile.FAULTS: (Blow.STALL, Blow.PART),
        Profile.LATE: (Blow.KILL, Blow.KILL, Blow.PART, Blow.STALL),
        Profile.CRASHES: (Blow.KILL, Blow.KILL, Blow.DRAIN, Blow.PART),
        Profile.ALL: tuple(Blow),
    }[profile]
    strikes: list[Strike] = []
    if not blows:
        return strikes
    for _ in range(rng.randint(1, 4)):
        blow = rng.choice(blows)
        target = rng.choice(["router", *names] if blow is not Blow.DRAIN else names)
        if profile is Profile.LATE:
            target = rng.choice(("p0", "p1"))
        others = [name for name in ["router", *names] if name != target]
        other = rng.choice([*others, None]) if blow is Blow.PART else None
        seconds = rng.choice((rng.uniform(0.05, 0.5), rng.uniform(0.3, 3.0)))
        strikes.append(Strike(rng.uniform(0.5, until), blow, target, seconds, other, rng.random() < 0.6))
    if Blow.KILL in blows and rng.random() < 0.5:
        name = "p0" if profile is Profile.LATE else rng.choice(names)
        strikes += _restart_unseen(rng, name, rng.uniform(0.5, until))
    return strikes


def _restart_unseen(rng: random.Random, name: str, at: float) -> list[Strike]:
    """Cut off from the router, dead and back before it is heard of again: what was sent to the old life waits."""
    dead_s = rng.uniform(0.05, 0.3)
    dies_at = at + rng.uniform(0.0, 0.2)
    return [
        Strike(at, Blow.PART, name, dies_at - at + dead_s + rng.uniform(0.0, 1.5), "router"),
        Strike(dies_at, Blow.KILL, name, dead_s, is_cunning=rng.random() < 0.5),
    ]
