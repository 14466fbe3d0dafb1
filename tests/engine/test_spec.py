"""Both spellings of config.json, and the defaults it leaves out, read as transformers reads them."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.deepseek_v3.modeling_deepseek_v3 import yarn_apply_mscale

from pd.runtime.config import ConfigError
from pd.runtime.engine.expert_spec import ExpertSpec
from pd.runtime.engine.latent_spec import LatentSpec
from pd.runtime.engine.rope import inverse_frequencies
from pd.runtime.engine.shards import layout_of
from pd.runtime.engine.spec import ModelSpec, read_spec
from tests.published import DEEPSEEK_V2_LITE, DEEPSEEK_V3

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


def test_deepseeks_published_configs_are_read(tmp_path: Path) -> None:
    v3 = spec_of(tmp_path, "DeepseekV3ForCausalLM", **DEEPSEEK_V3)
    scale = yarn_apply_mscale({"rope_type": "yarn", "factor": 40, "mscale_all_dim": 1.0}, 192**-0.5)
    assert v3.max_positions == 163840
    assert v3.latent == LatentSpec(512, 64, 128, 128, 1536, is_interleaved=True, scale=scale)
    assert (v3.num_kv_heads, v3.head_dim, v3.rope_dim) == (1, 576, 64)
    routing = {"is_sigmoid": True, "has_bias": True, "factor": 2.5, "num_groups": 8, "num_groups_chosen": 4}
    layers = (False,) * 3 + (True,) * 58
    assert v3.experts == ExpertSpec(256, 8, 2048, True, layers, shared_size=2048, is_router_wide=True, **routing)
    layout = layout_of(v3, page_size=16, dtype="bfloat16")
    assert layout.token_nbytes == 61 * 576 * 2, "of a token, on every rank"

    lite = spec_of(tmp_path, "DeepseekV2ForCausalLM", **DEEPSEEK_V2_LITE)
    assert lite.latent is not None and (lite.latent.query_rank, lite.latent.is_interleaved) == (None, True)
    layers = (False,) + (True,) * 26
    assert lite.experts == ExpertSpec(64, 6, 1408, False, layers, shared_size=2816, is_router_wide=True)
    grouped = {"topk_method": "group_limited_greedy", "n_group": 8, "topk_group": 3, "routed_scaling_factor": 16.0}
    v2 = spec_of(tmp_path, "DeepseekV2ForCausalLM", **DEEPSEEK_V2_LITE | grouped)
    assert v2.experts is not None
    assert (v2.experts.num_groups, v2.experts.num_groups_chosen, v2.experts.factor) == (8, 3, 16.0)


@pytest.mark.parametrize(
    ("architecture", "fields", "said"),
    [
        ("DeepseekV32ForCausalLM", {}, "DeepseekV32ForCausalLM is not supported (its sparse attention"),
        ("DeepseekV3ForCausalLM", {"index_topk": 2048}, "index_topk: sparse attention"),
        ("DeepseekV3ForCausalLM", {"quantization_config": {"quant_method": "fp8"}}, "quantization_config 'fp8'"),
        ("DeepseekV3ForCausalLM", {"topk_method": "greedy"}, "topk_method 'greedy' is not supported; 'noaux_tc' is"),
        ("DeepseekV3ForCausalLM", {"scoring_func": "softmax"}, "scoring_func 'softmax' is not supported"),
        ("DeepseekV3ForCausalLM", {"moe_layer_freq": 2}, "moe_layer_freq 2 is not supported"),
        ("DeepseekV3ForCausalLM", {"n_group": 7}, "256 experts in n_group 7"),
        ("DeepseekV3ForCausalLM", {"topk_group": 9}, "of which topk_group 9"),
        ("DeepseekV3ForCausalLM", {"n_group": 128, "topk_group": 2}, "do not have num_experts_per_tok 8 experts"),
        ("DeepseekV3ForCausalLM", {"n_group": 256, "topk_group": 9}, "must have two"),
        ("DeepseekV3ForCausalLM", {"num_key_value_heads": 8}, "num_key_value_heads must be num_attention_heads"),
        ("DeepseekV3ForCausalLM", {"qk_rope_head_dim": 63}, "qk_rope_head_dim 63 is odd"),
        ("DeepseekV3ForCausalLM", {"n_shared_experts": "one"}, "n_shared_experts must be an integer from 0 on"),
        ("DeepseekV3ForCausalLM", {"rope_scaling": {"type": "linear", "factor": 2.0, "mscale_all_dim": 1.0}},
         "mscale_all_dim is not supported for rope type 'linear'"),
        ("DeepseekV2ForCausalLM", {"topk_method": "noaux_tc"}, "topk_method 'noaux_tc' is not supported"),
        ("DeepseekV2ForCausalLM", {"norm_topk_prob": True}, "norm_topk_prob True is not supported"),
        ("DeepseekV2ForCausalLM", {"mlp_bias": True}, "mlp_bias is not supported"),
    ],
)  # fmt: skip
def test_what_a_deepseek_asks_beyond_us_is_refused_by_name(
    architecture: str, fields: dict[str, object], said: str, tmp_path: Path
) -> None:
    config = DEEPSEEK_V2_LITE if architecture.startswith("DeepseekV2") else DEEPSEEK_V3
    with pytest.raises(ConfigError, match=re.escape(said)):
        spec_of(tmp_path, architecture, **config | fields)


def test_mixtral_has_experts_by_names_of_its_own(tmp_path: Path) -> None:
    spec = spec_of(tmp_path, "MixtralForCausalLM", num_key_value_heads=2)
    names = {"at": "block_sparse_moe.", "gate_up_down": ("w1", "w3", "w2")}
    assert spec.experts == ExpertSpec(8, 2, 96, True, (True,) * 4, **names)
    assert (spec.windows, spec.rope.theta, spec.max_positions) == ((None,) * 4, 1e6, 131072)
    assert spec_of(tmp_path, "MixtralForCausalLM", num_key_value_heads=2, sliding_window=7).windows == (7,) * 4


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
