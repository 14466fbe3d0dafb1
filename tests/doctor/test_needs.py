"""What a launch needs, reckoned from a config.json."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest

from pd.doctor.answers import Needs
from pd.doctor.ask import needs as asked
from pd.doctor.check import examine_all
from pd.doctor.checks.needs import Launch, needs_checks
from pd.doctor.recorded import Recorded, Recording
from pd.doctor.result import Result, Status
from tests.published import DEEPSEEK_V2_LITE

SMOLLM2 = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
}
PARAMETERS = 134_515_008
"""Of SmolLM2-135M, as its model card counts."""
TOKEN = 30 * 3 * 2 * 64 * 2
"""Bytes of KV a token: layers, KV heads, K and V, head size, bfloat16."""


@pytest.fixture
def directory(tmp_path: Path) -> str:
    (tmp_path / "config.json").write_text(json.dumps(SMOLLM2))
    return str(tmp_path)


def diagnose(
    model: str, *, tp: int = 1, role: str = "prefill", memory_gib: int = 16, speed: str = "", kv: str = "auto"
) -> dict[str, Result]:
    answer = asked.answer(model, str(tp), "16", "cpu", kv)
    files = {"/proc/meminfo": f"MemTotal: {memory_gib << 20} kB\nMemAvailable: {memory_gib << 20} kB"}
    if speed:
        files["/sys/class/net/eth0/speed"] = speed
    answers = {f"needs M {tp} 16 cpu {kv}": msgspec.Raw(msgspec.json.encode(answer))}
    machine = Recorded(Recording(about="", sources=(), files=files, answers=answers))
    checks = needs_checks(Launch("M", role, tp, 16, kv))
    return {e.check.id: e.result for e in examine_all(checks, machine)}


def test_one_rank_holds_every_parameter(directory: str) -> None:
    needs = asked.answer(directory, "1", "16", "cpu")
    assert isinstance(needs, Needs) and needs.error == ""
    assert needs.ranks[0].weights == PARAMETERS * 2
    assert needs.token_nbytes == TOKEN and needs.ranks[0].page_nbytes == 16 * TOKEN


def test_heads_that_tp_does_not_divide_are_shared_out(directory: str) -> None:
    needs = asked.answer(directory, "2", "16", "cpu")
    assert [(r.query_heads, r.kv_heads) for r in needs.ranks] == [(5, 2), (4, 2)]
    read = diagnose(directory, tp=2)["model.split"].read
    assert "9 query heads as 5+4, 3 KV heads as 2+2 (1 copy more than one each)" in read


def test_a_latent_is_on_every_rank_whole(tmp_path: Path) -> None:
    """DeepSeek-V2-Lite, whose weights' index counts 15,706,484,224 parameters."""
    config = DEEPSEEK_V2_LITE | {"architectures": ["DeepseekV2ForCausalLM"], "torch_dtype": "bfloat16"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    whole, halves = (asked.answer(str(tmp_path), tp, "16", "cpu").ranks for tp in ("1", "2"))
    routers = 26 * 64 * 2048
    assert whole[0].weights == 15_706_484_224 * 2 + routers * 2, "in bfloat16, routers in float32"
    assert [r.page_nbytes for r in (*whole, *halves)] == [16 * 27 * 576 * 2] * 3
    assert halves[0].weights < 0.51 * whole[0].weights
    assert "16 query heads as 8+8, one latent on each" in diagnose(str(tmp_path), tp=2)["model.split"].read


def test_more_ranks_than_query_heads_fail_with_the_limit(directory: str) -> None:
    result = diagnose(directory, tp=10)["model.split"]
    assert result.status is Status.FAIL and "9 query heads" in result.read and "--tp 9" in result.fix


def test_pages_follow_from_the_default_pool(directory: str) -> None:
    pages = (2 << 30) // (16 * TOKEN)
    assert f"{pages} pages of 16 tokens" in diagnose(directory)["model.pages"].read


def test_a_float8_pool_has_twice_the_pages_and_the_same_weights(directory: str) -> None:
    found = diagnose(directory, kv="fp8_e4m3")
    assert f"{(2 << 30) // (16 * TOKEN // 2)} pages of 16 tokens" in found["model.pages"].read
    assert found["model.weights"].read == diagnose(directory)["model.weights"].read
    assert "bfloat16 (KV float8_e4m3fn)" in found["model.split"].read
    with pytest.raises(ValueError, match="--kv-cache-dtype int4: one of auto, fp8_e4m3"):
        diagnose(directory, kv="int4")


def test_a_machine_that_is_too_small_fails(directory: str) -> None:
    found = diagnose(directory, memory_gib=0)
    assert found["model.weights"].status is Status.FAIL and found["model.pages"].status is Status.FAIL


def test_a_handoff_is_reckoned_at_the_links_rate(directory: str) -> None:
    read = diagnose(directory, speed="25000")["model.handoff"].read
    milliseconds = 2048 * TOKEN / (25e9 / 8) * 1e3
    assert f"{milliseconds:.3g} ms" in read and "25 Gbit/s (eth0)" in read


def test_a_colocated_instance_hands_nothing_over(directory: str) -> None:
    assert diagnose(directory, role="colocated")["model.handoff"].status is Status.SKIP


def test_a_model_that_pd_does_not_run_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**SMOLLM2, "architectures": ["MambaForCausalLM"]}))
    result = diagnose(str(tmp_path))["model.split"]
    assert result.status is Status.FAIL and "MambaForCausalLM" in result.read


def test_a_model_elsewhere_is_not_fetched() -> None:
    needs = asked.answer("nobody/no-such-model", "1", "16", "cpu")
    assert "not on this machine" in needs.error and "downloads nothing" in needs.hint
