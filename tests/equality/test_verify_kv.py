"""The law where digests are compared: every answer is that of transformers, and no KV is taken for corrupted."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import pytest

from tests.equality.cluster import apart
from tests.equality.conftest import COMMON, NUM_TOKENS, Case


class Way(NamedTuple):
    router: tuple[str, ...]
    prefill: tuple[str, ...]
    decode: tuple[str, ...]
    family: str = "qwen3"


WAYS = {
    "pushed as it lies": Way((), ("--tp", "3"), ("--tp", "2")),
    "pushed by layers, each on its own, into larger pages": Way(
        (), ("--tp", "3", "--stream-layers", "1"), ("--tp", "2", "--page-size", "64", "--num-pages", "200")
    ),
    "read late, packed into larger pages": Way(
        ("--reserve", "late", "--direction", "pull"),
        ("--tp", "2"),
        ("--move", "packed", "--page-size", "64", "--num-pages", "200"),
    ),
    "latents, packed into larger pages": Way(
        (),
        ("--tp", "2", "--move", "packed"),
        ("--tp", "3", "--page-size", "64", "--num-pages", "200"),
        "deepseek_v3",
    ),
}


@pytest.mark.parametrize("way", WAYS)
def test_verified_answers_are_those_of_transformers(cases: dict[str, Case], tmp_path: Path, way: str) -> None:
    chosen = WAYS[way]
    case = cases[chosen.family]
    options = {"router": (*chosen.router, "--verify-kv"), "prefill": chosen.prefill, "decode": chosen.decode}
    with apart(case.model, tmp_path, common=COMMON, **options) as cluster:
        assert cluster.generate_all(case.prompts, NUM_TOKENS) == case.answers  # 32 at once
        for prompt, answer in zip(case.prompts[8:12], case.answers[8:12], strict=True):  # whose prefix decode holds
            assert cluster.generate(prompt + answer[:10], NUM_TOKENS - 10) == answer[10:]
        for instance in cluster.wait_idle()["instances"]:
            assert instance["num_free_pages"] == instance["num_pages"], instance
        metrics = cluster.get("/metrics")[1].decode()
    assert 'pd_router_events_total{what="corrupted"} 0.0' in metrics
    assert 'pd_router_events_total{what="repeated"} 0.0' in metrics
