"""Scenarios made by hand: a few instances, some questions, and exactly what is to go wrong."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from pd.runtime.config import RouterConfig
from pd.runtime.core.instance import InstanceBrain
from pd.runtime.core.router import RouterBrain
from pd.runtime.core.settings import Deadlines
from pd.runtime.wire.values import Role, Sampling
from tests.cluster.scenario import Ask, Instance, Odds, Profile, Scenario, Size, Strike
from tests.cluster.trace import Trace
from tests.cluster.world import Brains, World

MAX_MODEL_LEN = 64
PAGE = 4


def prefill(name: str, *, num_ranks: int = 1, num_pages: int = 64, joins_at: float = 0.0) -> Instance:
    return Instance(name, Role.PREFILL, num_ranks, PAGE, num_pages, 8, joins_at)


def decode(name: str, *, num_ranks: int = 1, num_pages: int = 64, joins_at: float = 0.0) -> Instance:
    return Instance(name, Role.DECODE, num_ranks, PAGE, num_pages, 8, joins_at)


def ask(
    name: str,
    at: float,
    num_tokens: int,
    max_tokens: int = 8,
    *,
    deadline_s: float = 30.0,
    leave_at: float | None = None,
    leave_after: int | None = None,
) -> Ask:
    prompt = tuple((7 * place + 13 * len(name) + ord(name[-1])) % 97 for place in range(num_tokens))
    sampling = Sampling(max_tokens=max_tokens)
    return Ask(at, name, prompt, sampling, deadline_s, leave_at=leave_at, leave_after=leave_after)


def staged(
    instances: Sequence[Instance],
    asks: Sequence[Ask],
    *strikes: Strike,
    odds: Odds = Odds(),  # noqa: B008  (frozen)
    whole_at: float = 0.0,
    is_calm: bool = False,
    can_sever: bool = True,
    max_prefill_tokens: int = 16,
    seed: int = 0,
    brains: Brains | None = None,
    misfits: dict[str, str] | None = None,
    num_probes: int = 1,
) -> World:
    """Run it to its end; raises Violation for whatever must never be. `is_calm`: nothing may be repeated or refused."""
    whole = Scenario(
        seed,
        Profile.CALM if is_calm else Profile.ALL,
        Size.SMALL,
        tuple(instances),
        tuple(asks),
        (ask("probe", 0.0, 5, 4),) * num_probes,
        strikes,
        odds,
        can_sever=can_sever,
        whole_at=whole_at,
        settled_at=whole_at + 7.0,
        max_model_len=MAX_MODEL_LEN,
        max_prefill_tokens=max_prefill_tokens,
        misfits=misfits or {},
    )
    world = World(whole, brains=brains or Brains(), trace=Trace(is_kept=False))
    world.run()
    return world


def as_shipped() -> Brains:
    """With the deadlines and limits that people get."""
    return Brains(
        router=lambda config, epoch, deadlines: RouterBrain(RouterConfig(), epoch),
        instance=lambda settings, hello: InstanceBrain(replace(settings, deadlines=Deadlines()), hello),
    )


def num_stamps(world: World, what: str) -> int:
    """Of the lives that run at the end."""
    return sum(shell.stamps[what] for shell in world.shells.values())
