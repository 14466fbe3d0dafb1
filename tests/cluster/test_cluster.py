"""Thousands of things go wrong in a simulated cluster, and every answer is the one a lone machine would give."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cluster.many import run_many
from tests.cluster.run import explain

NUM_SEEDS = int(os.environ.get("CLUSTER_SEEDS", "10000"))
MANY = 1000
"""Seeds of which something can be said beyond that none failed."""
FIRST = int(os.environ.get("CLUSTER_FIRST_SEED", "0"))
HAPPENED = {
    "attach error": 500,
    "barred": 500,
    "client left": 500,
    "corrupted": 200,
    "cut off": 500,
    "death for good": 100,
    "delay": 500,
    "drain under load": 100,
    "duplicate": 500,
    "exit": 500,
    "hung up": 500,
    "join under load": 500,
    "kill": 500,
    "kill at an event": 200,
    "kill under a write": 200,
    "late write": 200,
    "lost": 500,
    "lost completion": 200,
    "packed": 500,
    "partition": 500,
    "preempted": 100,
    "quarantined": 100,
    "reorder": 500,
    "read ahead": 500,
    "read in doubt": 30,
    "repeated": 1000,
    "restart": 500,
    "router lost": 100,
    "severed": 500,
    "slow peer": 500,
    "stall": 500,
    "streamed": 500,
    "word of the dead": 500,
    "write cut off": 100,
    "write error": 500,
}
"""At least so often in 10,000 seeds, in fewer as many fewer: a fault that never happens is not survived."""


def test_every_request_ends_once_with_the_right_tokens_and_nothing_is_left(capsys: pytest.CaptureFixture[str]) -> None:
    """10,000 seeds, or CLUSTER_SEEDS from CLUSTER_FIRST_SEED. One again: python -m tests.cluster --seed N --trace."""
    tally = run_many(range(FIRST, FIRST + NUM_SEEDS))
    with capsys.disabled():
        sys.stdout.write(f"\nseeds {FIRST} to {FIRST + NUM_SEEDS - 1}: {tally.told()}\n")
    if tally.failed:
        pytest.fail(explain(tally.failed[0]), pytrace=False)
    if NUM_SEEDS < MANY:
        return
    share = NUM_SEEDS / 10_000
    rare = {what: tally.happened[what] for what, least in HAPPENED.items() if tally.happened[what] < least * share}
    assert not rare, f"too rare: {rare}"
    assert set(tally.calm_endings) == {"finished"}, tally.calm_endings
    failed = tally.endings["503"] + tally.endings["504"]  # a cluster that fails everything would break no invariant
    assert tally.endings["finished"] > 4 * failed, tally.endings


def test_a_seed_does_the_same_in_every_process() -> None:
    """Whatever order the interpreter's string hashes give to sets."""
    said = set()
    for hash_seed in ("1", "2"):
        script = "from tests.cluster.run import simulate\nprint([simulate(seed).digest for seed in range(30)])"
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
