"""Run scenarios: one by its seed, many in a row, and a readable account of the one that fails."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from tests.cluster.scenario import Profile, scenario
from tests.cluster.trace import Trace, Violation
from tests.cluster.world import Brains, World

NUM_LINES = 120
"""Of the trace, before the fault."""


@dataclass(frozen=True, slots=True)
class Outcome:
    seed: int
    profile: Profile
    violation: str | None
    endings: Counter[str]
    reasons: tuple[str, ...]
    num_events: int
    digest: int
    seconds: float  # simulated
    lines: tuple[str, ...]


def simulate(seed: int, profile: Profile, *, brains: Brains | None = None, is_traced: bool = False) -> Outcome:
    """Run one scenario to its end or its first fault. The same seed does the same in every process."""
    trace = Trace(kept=is_traced)
    world = World(scenario(seed, profile), brains=brains or Brains(), trace=trace)
    violation = None
    try:
        world.run()
    except Violation as error:
        violation = str(error)
    return Outcome(
        seed,
        profile,
        violation,
        world.clients.endings,
        tuple(world.clients.reasons),
        trace.num_lines,
        trace.digest,
        world.clock.now,
        tuple(trace.lines),
    )


def explain(outcome: Outcome, *, brains: Brains | None = None) -> str:
    """The end of a failed run, told again line by line."""
    told = simulate(outcome.seed, outcome.profile, brains=brains, is_traced=True)
    lines = "\n".join(told.lines[-NUM_LINES:])
    again = f"python -m tests.cluster --profile {outcome.profile.value} --seed {outcome.seed} --trace"
    return f"{lines}\n\nseed {outcome.seed}, {outcome.profile.value}: {outcome.violation}\nagain: {again}"
