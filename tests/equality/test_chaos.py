"""Instances killed, paused and cut off under load: every answer is the one of quiet times, and every page comes back.

A long run is `pd bench chaos`; this one is short, and its seed is told.
"""

from __future__ import annotations

import secrets
from pathlib import Path

import pytest

from pd.bench.chaos import run_chaos
from pd.bench.chaos_options import ChaosOptions
from tests.tiny import make_tiny

pytestmark = pytest.mark.slow
OPTIONS = "--dtype float32 --page-size 4 --num-pages 1000 --threads 1"


async def test_no_client_notices_what_dies_while_one_instance_of_each_role_lives(tmp_path: Path) -> None:
    model, seed = make_tiny("llama", tmp_path / "tiny"), secrets.randbits(31)
    said: list[str] = []
    options = ChaosOptions(
        model=str(model), duration=12, every=2.5, seed=seed, concurrency=32, tokens=32, options=OPTIONS
    )
    result = await run_chaos(options, tmp_path / "logs", say=said.append)
    told = f"seed {seed}: {result}\n" + "\n".join(said)
    assert sum(result.faults.values()) > 0, told
    assert result.tally.num_done > 0, told
    found = (result.tally.num_wrong, result.tally.num_hung, result.tally.num_failed, result.num_sick, result.unfree)
    assert found == (0, 0, 0, 0, []), told
