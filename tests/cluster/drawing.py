"""Draws a scenario from a seed: many small ones, some large, of every profile."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from typing import NamedTuple

from pd.runtime.wire.values import Role, Sampling
from tests.cluster.model import VOCAB_SIZE
from tests.cluster.scenario import Ask, Blow, Instance, Odds, Profile, Scenario, Size, Strike

SETTLE_S = 7.0
"""After the last fault, for the longest silence or severing to be over."""

P = Profile
PROFILES = (P.ALL, P.FAULTS, P.LATE, P.CRASHES, P.TIGHT, P.ALL, P.FAULTS, P.LATE, P.CRASHES, P.ALL, P.CALM, P.LATE)
PERIOD = 192
"""Of so many seeds one is large and six are of medium size."""


USUAL = ("early", "push")
POLICIES = (USUAL, ("late", "push"), USUAL, ("early", "pull"), USUAL, ("late", "pull"))
"""When decode reserves, and who moves KV: every other seed as most people run it."""


MISFITS = ({"p0": "d0", "d0": "p0"}, {"p0": "d0"}, {"d0": "p0"})
"""Both find that they can never reach each other, or one does, as where only its staging is too small."""


class Frame(NamedTuple):
    """How much of everything."""

    first_at: float
    until: float  # asked, and struck somewhat earlier
    num_asks: tuple[int, int]
    max_strikes: int
    whole_at: float
    max_model_len: int
    prompts: tuple[int, int]  # tokens of a common beginning, and of what follows, at most
    answer: int  # tokens at most
    max_prefill_tokens: tuple[int, ...]
    num_probes: int


FRAMES = {
    Size.SMALL: Frame(0.25, 1.0, (2, 6), 2, 1.3, 24, (9, 9), 8, (4, 6, 8), 1),
    Size.MEDIUM: Frame(0.4, 2.2, (6, 12), 3, 2.6, 40, (16, 20), 14, (8, 16), 2),
    Size.LARGE: Frame(0.6, 4.2, (20, 20), 4, 4.6, 64, (24, 36), 24, (16,), 3),
}


def profile_of(seed: int) -> Profile:
    return PROFILES[seed % len(PROFILES)]


def size_of(seed: int) -> Size:
    place = seed // len(PROFILES) * 7 % PERIOD  # 7: all sizes within a hundred
    return Size.LARGE if not place else Size.MEDIUM if place <= 6 else Size.SMALL


def policy_of(seed: int) -> tuple[str, str]:
    """When decode reserves, and the direction."""
    return POLICIES[seed // len(PROFILES) % len(POLICIES)]


class Weather(NamedTuple):
    """What a seed's schedule is like, known before it is drawn."""

    profile: Profile
    direction: str | None = None  # None: either

    def is_that_of(self, seed: int) -> bool:
        return profile_of(seed) is self.profile and self.direction in (None, policy_of(seed)[1])


def scenario(seed: int, profile: Profile | None = None, size: Size | None = None) -> Scenario:
    profile, size = profile or profile_of(seed), size or size_of(seed)
    rng = random.Random(f"{profile.value} {size.value} {seed}")
    frame = FRAMES[size]
    instances = _instances(rng, profile, frame)
    names = [instance.name for instance in instances]
    asks = _asks(rng, profile, frame)
    strikes = _strikes(rng, profile, instances, frame=frame)
    is_shaky = profile not in (Profile.CALM, Profile.TIGHT)
    settled_at = frame.whole_at + (SETTLE_S if is_shaky else 0.0)
    probes_at = settled_at if size is Size.LARGE else frame.whole_at
    reserve, direction = policy_of(seed)
    verifies = seed // 7 % 3 == 0
    odds = _odds(rng, profile, size)
    staging = (rng.randint(1, 4), rng.choice((4, 8, 16)))
    dies_read = profile is Profile.LATE and direction == "pull"  # under a read, of which more may come
    if dies_read:
        strikes = [replace(s, is_cunning=True, event=None) if s.blow is Blow.KILL else s for s in strikes]
    return Scenario(
        seed,
        profile,
        size,
        tuple(instances),
        tuple(asks),
        tuple(_probe(rng, probes_at + 0.01 * index, index) for index in range(frame.num_probes)),
        tuple(strikes),
        replace(odds, corrupt=0.05) if verifies and is_shaky else odds,
        can_sever=profile is Profile.CALM or (rng.random() < 0.5 and not dies_read),
        whole_at=frame.whole_at,
        settled_at=settled_at,
        max_model_len=frame.max_model_len,
        max_prefill_tokens=rng.choice(frame.max_prefill_tokens),
        num_heads=2 if any(instance.num_ranks > 1 for instance in instances) else 1,
        is_encoded=seed % 4 == 0,
        reserve=reserve,
        direction=direction,
        verifies=verifies,
        streams=seed // 11 % 3 == 0,
        misfits=MISFITS[seed // 39 % 3] if is_shaky and {"p1", "d1"} <= set(names) and seed // 13 % 3 == 0 else {},
        staging=staging if seed // 5 % (2 if direction == "pull" else 4) == 0 else None,
        clock_offsets={name: rng.choice((0.0, rng.uniform(0.0, 3600.0))) for name in ["router", *names]},
        clock_rates={name: rng.choice((1.0, rng.uniform(0.97, 1.03))) for name in ["router", *names]},
    )


def _instances(rng: random.Random, profile: Profile, frame: Frame) -> list[Instance]:
    tight = profile is Profile.TIGHT or (profile is Profile.ALL and rng.random() < 0.5)
    page_size = rng.choice((4, 4, 2, 8))
    odd_sizes = rng.random() < 0.3
    ranks = rng.choice(((1,), (1, 1, 2), (2,)))

    def instance(name: str, role: Role) -> Instance:
        size = rng.choice((2, 4, 8)) if odd_sizes else page_size
        longest = -(-frame.max_model_len // size)
        least = max(longest // 2, -(-12 // size))  # for a probe
        num_pages = rng.randint(least, longest + longest // 4) if tight else longest * rng.randint(3, 5)
        if profile is Profile.CALM:
            num_pages = longest * 9  # for all slots and what is promised: nobody gives way
        elif profile is Profile.LATE:
            num_pages = longest * 2
        max_running = rng.choice((2, 3, 4)) if tight else 8
        return Instance(name, role, rng.choice(ranks), size, num_pages, max_running, rng.uniform(0.0, 0.1))

    shape = rng.random()
    if profile is Profile.LATE:
        num = (0, 2, 2 if shape < 0.2 else 1)
    elif shape < 0.1:
        num = (rng.randint(1, 2), 0, 0)
    elif shape < 0.4:
        num = (0, 2, 2)
    else:
        num = (1 if shape > 0.9 else 0, rng.randint(1, 2), rng.randint(1, 2))
    roles = zip("cpd", (Role.COLOCATED, Role.PREFILL, Role.DECODE), num, strict=True)
    instances = [instance(f"{letter}{index}", role) for letter, role, count in roles for index in range(count)]
    if profile in (Profile.CRASHES, Profile.ALL) and rng.random() < 0.3:  # one joins while others work
        late = rng.randrange(len(instances))
        instances[late] = replace(instances[late], joins_at=rng.uniform(frame.first_at, frame.until))
    return instances


def _asks(rng: random.Random, profile: Profile, frame: Frame) -> list[Ask]:
    beginnings = [_tokens(rng, rng.randint(4, frame.prompts[0])) for _ in range(2)]
    num_asks = rng.randint(*frame.num_asks) + (3 if profile is Profile.TIGHT else 0)
    asks: list[Ask] = []
    time = frame.first_at
    pace = num_asks / (frame.until - frame.first_at)
    while time < frame.until and len(asks) < num_asks:
        prompt = _prompt(rng, beginnings, frame)
        for choice in range(rng.choice((1, 1, 1, 2, 4))):  # `n`, or a burst of one prompt
            asks.append(_ask(rng, time, f"r{len(asks)}", prompt, frame=frame, seed=choice, profile=profile))
        time += rng.choice((0.0, rng.expovariate(pace), rng.expovariate(pace / 2)))
    return asks


def _prompt(rng: random.Random, beginnings: list[tuple[int, ...]], frame: Frame) -> tuple[int, ...]:
    beginning = rng.choice(beginnings) if rng.random() < 0.5 else ()
    longest = frame.prompts[1]
    num_more = rng.choice((1, 2, rng.randint(1, longest // 2), rng.randint(1, longest), rng.choice((3, 4, 5, 7, 8, 9))))
    is_monotonous = rng.random() < 0.2  # pages of the same tokens after other beginnings
    return (beginning + _tokens(rng, num_more, 2 if is_monotonous else VOCAB_SIZE))[: frame.max_model_len - 2]


def _tokens(rng: random.Random, num_tokens: int, num_kinds: int = VOCAB_SIZE) -> tuple[int, ...]:
    return tuple(int(rng.random() * num_kinds) for _ in range(num_tokens))


def _ask(
    rng: random.Random,
    at: float,
    request_id: str,
    prompt: tuple[int, ...],
    *,
    frame: Frame,
    seed: int,
    profile: Profile,
) -> Ask:
    answer = frame.answer * (2 if profile is Profile.TIGHT else 1)
    sampling = Sampling(
        max_tokens=rng.choice((1, 2, rng.randint(1, answer // 3), rng.randint(answer // 6, answer))),
        seed=seed,
        stop_token_ids=_tokens(rng, 2) if rng.random() < 0.4 else (),
        logprobs=2 if rng.random() < 0.15 else None,
    )
    if profile is Profile.CALM:
        return Ask(at, request_id, prompt, sampling, deadline_s=30.0)
    leaves = rng.random()
    return Ask(
        at,
        request_id,
        prompt,
        sampling,
        deadline_s=rng.choice((30.0, 30.0, rng.uniform(0.2, 4.0))),
        leave_at=at + rng.uniform(0.0, 0.5) if leaves < 0.05 else None,
        leave_after=rng.randint(1, 5) if 0.05 <= leaves < 0.1 else None,
        leave_at_event=rng.randint(1, 12) if 0.1 <= leaves < 0.25 else None,
    )


def _probe(rng: random.Random, at: float, index: int) -> Ask:
    prompt = _tokens(rng, rng.randint(1, 7))
    return Ask(at, f"probe{index}", prompt, Sampling(max_tokens=4), 20.0, is_probe=True)


def _odds(rng: random.Random, profile: Profile, size: Size) -> Odds:
    scale = {Size.SMALL: 2.5, Size.MEDIUM: 1.5, Size.LARGE: 1.0}[size]  # some fault in each, but not many in all
    if profile in (Profile.CALM, Profile.TIGHT):
        return Odds()
    if profile is Profile.LATE:
        drop = rng.choice((0.0, 0.02))
        return Odds(spike=0.02 * scale, drop=drop * scale, reorder=rng.random() < 0.5, write_s=rng.choice((0.06, 0.15)))
    if profile is Profile.CRASHES:
        scale *= 0.3
    elif rng.random() < 0.3:
        scale *= 2.0
    return Odds(
        drop=rng.choice((0.0, 0.01, 0.02)) * scale,
        duplicate=rng.choice((0.0, 0.02)) * scale,
        spike=rng.choice((0.0, 0.02)) * scale,
        reorder=rng.random() < 0.3,
        write_error=rng.choice((0.0, 0.02, 0.05)) * scale,
        lost_completion=rng.choice((0.0, 0.03)) * scale,
        unreachable=rng.random() * 0.5,
        attach_error=rng.choice((0.0, 0.1)) * scale,
    )


BLOWS: dict[Profile, tuple[Blow, ...]] = {
    Profile.CALM: (),
    Profile.TIGHT: (),
    Profile.FAULTS: (Blow.STALL, Blow.PART, Blow.SLOW),
    Profile.LATE: (Blow.KILL, Blow.KILL, Blow.PART, Blow.STALL),
    Profile.CRASHES: (Blow.KILL, Blow.KILL, Blow.DRAIN, Blow.PART),
    Profile.ALL: tuple(Blow),
}


def _strikes(rng: random.Random, profile: Profile, instances: list[Instance], *, frame: Frame) -> list[Strike]:
    blows = BLOWS[profile]
    if not blows:
        return []
    names = [instance.name for instance in instances]
    first, last = frame.first_at, frame.first_at + 0.75 * (frame.until - frame.first_at)
    strikes = []
    for _ in range(rng.randint(1, frame.max_strikes)):
        blow = rng.choice(blows)
        target = rng.choice(["router", *names] if blow is not Blow.DRAIN else names)
        if profile is Profile.LATE:
            target = rng.choice(("p0", "p1"))
        strikes.append(_strike(rng, rng.uniform(first, last), blow, target=target, names=names))
    if Blow.KILL in blows and rng.random() < 0.5:
        name = "p0" if profile is Profile.LATE else rng.choice(names)
        strikes += _restart_unseen(rng, name, rng.uniform(first, last))
    if Blow.KILL in blows and rng.random() < 0.15:
        strikes += _restart_meanwhile(rng, names, rng.uniform(first, last))
    if Blow.KILL in blows and rng.random() < 0.1:
        strikes += _death_for_good(rng, instances, rng.uniform(first, last))
    return strikes


def _strike(rng: random.Random, at: float, blow: Blow, *, target: str, names: list[str]) -> Strike:
    others = [name for name in ["router", *names] if name != target]
    return Strike(
        at,
        blow,
        target,
        seconds=rng.choice((rng.uniform(0.05, 0.5), rng.uniform(0.3, 3.0))),
        other=rng.choice([*others, None]) if blow is Blow.PART else None,
        is_cunning=rng.random() < 0.5,
        event=rng.randint(1, 20) if blow is Blow.KILL and rng.random() < 0.4 else None,
        effect=rng.choice((0, 1, 1, 2, 3)),
    )


def _restart_unseen(rng: random.Random, name: str, at: float) -> list[Strike]:
    """Cut off from the router, dead and back before it is heard of again: what was sent to the old life waits."""
    dead_s = rng.uniform(0.05, 0.3)
    dies_at = at + rng.uniform(0.0, 0.2)
    return [
        Strike(at, Blow.PART, name, dies_at - at + dead_s + rng.uniform(0.0, 1.5), "router"),
        Strike(dies_at, Blow.KILL, name, dead_s, is_cunning=rng.random() < 0.5),
    ]


def _restart_meanwhile(rng: random.Random, names: list[str], at: float) -> list[Strike]:
    """One is slow, so that what it has begun for another comes when that other is dead and back."""
    slow, name = rng.choice(names), rng.choice(names)
    return [
        Strike(at, Blow.SLOW, slow, 1.0),
        Strike(at + 0.1, Blow.KILL, name, rng.uniform(0.03, 0.2), is_cunning=True),
    ]


def _death_for_good(rng: random.Random, instances: list[Instance], at: float) -> list[Strike]:
    """One of a role that others have, too."""
    roles = [instance.role for instance in instances]
    spare = [instance.name for instance in instances if roles.count(instance.role) > 1]
    return [Strike(at, Blow.KILL, rng.choice(spare), math.inf, is_for_good=True)] if spare else []
