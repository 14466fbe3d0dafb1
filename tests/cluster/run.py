"""Run scenarios: one by its seed, many in a row, and a readable account of the one that fails."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from tests.cluster.drawing import scenario
from tests.cluster.scenario import Profile, Scenario, Size
from tests.cluster.trace import Trace, Violation
from tests.cluster.world import Brains, World

NUM_LINES = 120
"""Of the trace, before the fault."""


@dataclass(frozen=True, slots=True)
class Outcome:
    seed: int
    profile: Profile
    size: Size
    violation: str | None
    endings: Counter[str]
    happened: Counter[str]
    num_events: int
    digest: int
    seconds: float  # simulated
    lines: tuple[str, ...]


def simulate(
    seed: int,
    profile: Profile | None = None,
    size: Size | None = None,
    *,
    brains: Brains | None = None,
    is_traced: bool = False,
) -> Outcome:
    """Run one scenario to its end or its first fault. The same seed does the same in every process."""
    return play(scenario(seed, profile, size), brains=brains, is_traced=is_traced)


def play(whole: Scenario, *, brains: Brains | None = None, is_traced: bool = False) -> Outcome:
    trace = Trace(is_kept=is_traced)
    world = World(whole, brains=brains or Brains(), trace=trace)
    violation = None
    try:
        world.run()
    except Violation as error:
        violation = str(error)
    return Outcome(
        whole.seed,
        whole.profile,
        whole.size,
        violation,
        world.clients.endings,
        world.happened,
        trace.num_events,
        trace.digest,
        world.clock.now,
        tuple(trace.lines),
    )


def explain(outcome: Outcome, *, brains: Brains | None = None) -> str:
    """The end of a failed run, told again line by line."""
    told = simulate(outcome.seed, outcome.profile, outcome.size, brains=brains, is_traced=True)
    lines = "\n".join(told.lines[-NUM_LINES:])
    profile, size = outcome.profile.value, outcome.size.value
    again = f"python -m tests.cluster --seed {outcome.seed} --profile {profile} --size {size} --trace"
    return f"{lines}\n\nseed {outcome.seed}, {profile}, {size}: {outcome.violation}\nagain: {again}"
