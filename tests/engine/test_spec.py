"""Both spellings of config.json, and the defaults it leaves out, read as transformers reads them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from pd.runtime.config import ConfigError
from pd.runtime.engine.rope import inverse_frequencies
from pd.runtime.engine.spec import ExpertSpec, ModelSpec, read_spec

SIZES = {
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
}
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 512}
YARN = {"factor": 4.0, "original_max_position_embeddings": 512}


def spec_of(directory: Path, architecture: str = "LlamaForCausalLM", **fields: object) -> ModelSpec:
    config = {"architectures": [architecture], **SIZES, **fields}
    (directory / "config.json").write_text(json.dumps(config))
    return read_spec(directory)


@pytest.mark.parametrize(
    ("kind", "numbers"),
    [("linear", {"factor": 2.0}), ("dynamic", {"factor": 2.0}), ("llama3", LLAMA3), ("yarn", YARN)],
)
def test_old_and_new_spelling_of_rope_are_one(kind: str, numbers: dict[str, object], tmp_path: Path) -> None:
    new = spec_of(tmp_path, rope_parameters={"rope_type": kind, "rope_theta": 5e5, **numbers})
    old = spec_of(tmp_path, rope_theta=5e5, rope_scaling={"rope_type": kind, **numbers})
    oldest = spec_of(tmp_path, rope_theta=5e5, rope_scaling={"type": kind, **numbers})
    assert new.rope == old.rope == oldest.rope
    assert (new.rope.kind, new.rope.theta) == (kind, 5e5)


@pytest.mark.parametrize(
    ("kind", "numbers"),
    [
        ("linear", {"factor": 3.0}),
        ("dynamic", {"factor": 2.0}),
        ("llama3", LLAMA3),
        ("yarn", YARN),
        ("yarn", YARN | {"attention_factor": 0.8}),
        ("yarn", YARN | {"mscale": 0.7, "mscale_all_dim": 0.3}),
        ("yarn", YARN | {"beta_fast": 16.0, "beta_slow": 2.0, "truncate": False}),
        ("yarn", {"factor": 40.0}),
    ],
)
def test_frequencies_are_transformers_bit_for_bit(kind: str, numbers: dict[str, object], tmp_path: Path) -> None:
    parameters = {"rope_type": kind, "rope_theta": 1e4, **numbers}
    spec = spec_of(tmp_path, rope_parameters=parameters, head_dim=64, max_position_embeddings=2048)
    config = LlamaConfig(**SIZES, head_dim=64, max_position_embeddings=2048, rope_parameters=dict(parameters))
    theirs, their_factor = ROPE_INIT_FUNCTIONS[kind](config)
    ours, our_factor = inverse_frequencies(spec.rope, spec.head_dim)
    assert ours.tolist() == theirs.tolist()
    assert our_factor == their_factor


def test_stretched_positions_count_into_the_limit(tmp_path: Path) -> None:
    def limit(**rope: object) -> int:
        return spec_of(tmp_path, max_position_embeddings=1000, rope_scaling=rope).max_positions

    assert limit(type="linear", factor=4.0) == 4000
    assert limit(type="yarn", factor=4.0) == 4000
    assert limit(type="yarn", factor=4.0, original_max_position_embeddings=250) == 1000
    assert limit(type="llama3", **LLAMA3) == 1000
    assert limit(type="dynamic", factor=4.0) == 1000


def test_absent_fields_take_the_familys_defaults(tmp_path: Path) -> None:
    llama = spec_of(tmp_path)
    assert (llama.num_kv_heads, llama.head_dim, llama.max_positions) == (4, 16, 2048)
    assert (llama.rms_norm_eps, llama.rope.kind, llama.rope.theta) == (1e-6, "default", 1e4)
    assert not (llama.has_qkv_bias or llama.has_output_bias or llama.has_mlp_bias or llama.is_tied)
    qwen3 = spec_of(tmp_path, "Qwen3ForCausalLM", num_key_value_heads=2)
    assert (qwen3.head_dim, qwen3.has_qk_norm, qwen3.has_qkv_bias) == (128, True, False)
    qwen2 = spec_of(tmp_path, "Qwen2ForCausalLM", num_key_value_heads=2)
    assert (qwen2.has_qkv_bias, qwen2.has_output_bias, qwen2.has_qk_norm) == (True, False, False)
    mistral = spec_of(tmp_path, "MistralForCausalLM", num_key_value_heads=2)
    assert mistral.windows == (4096,) * 4


def test_experts_are_read_in_both_spellings_with_the_familys_defaults(tmp_path: Path) -> None:
    plain = spec_of(tmp_path, "Qwen3MoeForCausalLM")
    assert plain.experts == ExpertSpec(128, 8, 768, False, (True,) * 4)
    assert (plain.num_kv_heads, plain.head_dim, plain.has_qk_norm) == (4, 16, True)
    fields = {"num_experts_per_tok": 2, "moe_intermediate_size": 5, "norm_topk_prob": True, "mlp_only_layers": [3]}
    for name in ("num_experts", "num_local_experts"):
        spec = spec_of(tmp_path, "Qwen3MoeForCausalLM", decoder_sparse_step=2, **{name: 6}, **fields)
        assert spec.experts == ExpertSpec(6, 2, 5, True, (False, True, False, False))
    with pytest.raises(ConfigError, match="num_experts_per_tok 8 is more than the 4 experts"):
        spec_of(tmp_path, "Qwen3MoeForCausalLM", num_experts=4)
    assert spec_of(tmp_path).experts is None


def test_windows_follow_each_familys_own_rule(tmp_path: Path) -> None:
    def qwen(**fields: object) -> tuple[int | None, ...]:
        return spec_of(tmp_path, "Qwen2ForCausalLM", num_key_value_heads=2, sliding_window=8, **fields).windows

    assert qwen() == (None,) * 4
    assert qwen(use_sliding_window=True, max_window_layers=3) == (None, None, None, 8)
    kinds = ["sliding_attention", "full_attention"] * 2
    assert qwen(use_sliding_window=True, layer_types=kinds) == (8, None, 8, None)
    mistral = {"architecture": "MistralForCausalLM", "num_key_value_heads": 2}
    assert spec_of(tmp_path, **mistral, sliding_window=None).windows == (None,) * 4
    assert spec_of(tmp_path, **mistral, sliding_window=8).windows == (8,) * 4


def test_end_of_text_is_generation_configs_where_it_has_one(tmp_path: Path) -> None:
    assert spec_of(tmp_path).eos_token_ids == ()
    assert spec_of(tmp_path, eos_token_id=3).eos_token_ids == (3,)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 6]}))
    assert spec_of(tmp_path, eos_token_id=3).eos_token_ids == (5, 6)
    (tmp_path / "generation_config.json").write_text(json.dumps({"temperature": 0.6}))
    assert spec_of(tmp_path, eos_token_id=[3, 4]).eos_token_ids == (3, 4)
