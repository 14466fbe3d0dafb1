"""Any number of ranks gives one rank's answer; no rank holds what another does, but KV heads they share."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from pd.runtime.engine.shards import parts, share_of
from pd.runtime.engine.spec import ModelSpec, read_spec
from tests.engine.tp_group import PROMPTS, answers
from tests.tiny import make_tiny

ROOT = Path(__file__).parents[2]


def run_group(what: str, tp: int, folder: Path) -> list[list[object]]:
    program = [sys.executable, "-m", "tests.engine.tp_group", what, str(tp), f"file://{folder}/meet"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    ran = subprocess.run(program, cwd=ROOT, env=environment, stdout=subprocess.PIPE, timeout=240, check=True)
    told: list[list[object]] = json.loads(ran.stdout)
    return told


@pytest.mark.parametrize("mesh", ["gloo", "auto"])
def test_collectives_tell_every_rank_the_same(mesh: str, tmp_path: Path) -> None:
    ranks = run_group(mesh, 3, tmp_path)
    gathered = [[[0, 7], [0.5, 8]], [[1, 7], [1.5, 8]], [[2, 7], [2.5, 8]]]
    for rank, told in enumerate(ranks):
        assert told == [[[3], [3, 6, 9, 12, 15]], gathered if rank == 0 else None, [40, 50], 98], f"rank {rank}"


@pytest.mark.parametrize(
    ("family", "tp"),
    [
        *[("llama", 2), ("qwen2", 3), ("qwen3", 4), ("mistral", 8), ("qwen3_moe", 2)],
        *[("deepseek_v2", 4), ("deepseek_v3", 2)],
    ],
)
def test_ranks_together_answer_as_one(family: str, tp: int, tmp_path: Path) -> None:
    overrides: dict[str, object] = {"sliding_window": 11} if family == "mistral" else {}
    if family == "llama":
        overrides = {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}
    if family == "deepseek_v2":
        overrides = {"attention_bias": True, "q_lora_rank": None}
    checkpoint = make_tiny(family, tmp_path / "model", seed=3, **overrides)
    expected = answers(checkpoint, 0, 1, "")
    told = run_group(str(checkpoint), tp, tmp_path)
    assert told[0] == expected
    assert told[1:] == [[[]] * len(PROMPTS)] * (tp - 1), "only rank 0 reports tokens"


WHOLE = ("norm.weight", "gate.weight", "e_score_correction_bias", "q_a_proj", "kv_a_proj_with_mqa")
"""What every rank has: norms, routers, and what makes latents."""


@pytest.fixture(scope="module", params=["llama", "qwen3_moe", "mixtral", "deepseek_v2", "deepseek_v3"])
def spec(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ModelSpec:
    biases = {"llama": ("attention_bias", "mlp_bias"), "deepseek_v3": ("attention_bias",)}.get(request.param, ())
    return read_spec(make_tiny(request.param, tmp_path_factory.mktemp("tiny"), **dict.fromkeys(biases, True)))


@pytest.mark.parametrize("tp", range(1, 10))
def test_every_weight_is_held_once_but_shared_kv_heads(tp: int, spec: ModelSpec) -> None:
    ranks = [parts(spec, share_of(spec, tp, rank)) for rank in range(tp)]
    for name, part in ranks[0].items():
        held = sorted((rank[name].held for rank in ranks), key=lambda r: (r.start, r.stop))
        if name.endswith(WHOLE) or name.rpartition(".")[0].endswith(WHOLE):
            assert all(h == range(part.shape[0]) for h in held), name
        elif "k_proj" in name or "v_proj" in name:
            assert set().union(*held) == set(range(part.shape[0])), name
        else:
            assert sorted(i for h in held for i in h) == list(range(part.shape[part.dim])), name


@pytest.mark.parametrize(
    ("tp", "kv_heads", "kv_head_of_query"),
    [
        (1, [[0, 1, 2]], [[0, 0, 0, 1, 1, 1, 2, 2, 2]]),
        (2, [[0, 1], [1, 2]], [[0, 0, 0, 1, 1], [0, 1, 1, 1]]),
        (4, [[0], [1], [1, 2], [2]], [[0, 0, 0], [0, 0], [0, 1], [0, 0]]),
    ],
)
def test_ranks_hold_the_kv_heads_their_query_heads_read(
    tp: int, kv_heads: list[list[int]], kv_head_of_query: list[list[int]], tmp_path: Path
) -> None:
    spec = read_spec(make_tiny("llama", tmp_path))
    shares = [share_of(spec, tp, rank) for rank in range(tp)]
    assert [list(share.kv_heads) for share in shares] == kv_heads
    assert [list(share.kv_head_of_query) for share in shares] == kv_head_of_query
