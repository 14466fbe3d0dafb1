"""Thousands of things go wrong in a simulated cluster, and every answer is the one a lone machine would give."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from tests.cluster.run import explain, simulate
from tests.cluster.scenario import Profile

CASES = [(profile, range(first, first + 18)) for profile in Profile for first in (0, 18)]


@pytest.mark.parametrize(("profile", "seeds"), CASES, ids=[f"{p.value}-{s.start}" for p, s in CASES])
def test_every_request_ends_once_with_the_right_tokens_and_nothing_is_left(profile: Profile, seeds: range) -> None:
    endings: Counter[str] = Counter()
    for seed in seeds:
        outcome = simulate(seed, profile)
        if outcome.violation is not None:
            pytest.fail(explain(outcome), pytrace=False)
        endings += outcome.endings
    if profile is Profile.CALM:
        assert set(endings) == {"finished"}, f"seeds {seeds}: {endings}"
    failed = endings["503"] + endings["504"]  # a cluster that fails everything would break no invariant
    assert endings["finished"] > 4 * failed, f"seeds {seeds}: {endings}"


def test_a_seed_does_the_same_in_every_process() -> None:
    """Whatever order the interpreter's string hashes give to sets."""
    said = set()
    for hash_seed in ("1", "2"):
        script = (
            "from tests.cluster.run import simulate\nfrom tests.cluster.scenario import Profile\n"
            "print([simulate(seed, Profile.ALL).digest for seed in range(3)])"
        )
        run = subprocess.run(
            [sys.executable, "-c", script],
            env={**os.environ, "PYTHONHASHSEED": hash_seed},
            cwd=Path(__file__).parents[2],
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
        )
        said.add(run.stdout)
    assert len(said) == 1, said
