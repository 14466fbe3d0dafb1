"""Reads a Hugging Face config.json into what our own model code needs to know. Pure: no torch, no transformers.

Rules
1. Nothing is guessed and nothing is skipped: a setting that would change an answer and that we do not compute
   (a rope kind, an activation, a quantization) is a fault, by name.
2. A family is a row of FAMILIES. What transformers' config classes default to (5.24) stands there, since
   config.json may leave it out.
"""

from __future__ import annotations

import enum
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from pd.runtime.config import ConfigError
from pd.runtime.engine.expert_spec import (
    ExpertSpec,
    deepseek_v2_experts,
    deepseek_v3_experts,
    mixtral_experts,
    qwen3_experts,
)
from pd.runtime.engine.fields import Fields, Json
from pd.runtime.engine.latent_spec import LatentSpec, read_latent
from pd.runtime.engine.rope_spec import DEFAULT_THETA, RopeSpec, read_rope

_MEND_CONFIG = "copy config.json from the model's publisher again, or give another --model"


class Bias(enum.Enum):
    """Where a family keeps biases in attention."""

    NONE = "none"
    QKV = "qkv"
    ASKED = "asked"  # config.json's attention_bias, for q, k, v and o alike


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A decoder-only transformer of the Llama kind: RMSNorm, rotary attention, gated SiLU MLP or experts.

    With latent attention `num_kv_heads` is 1 and `head_dim` what a page keeps of a token: all query heads read that.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_query_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    max_positions: int  # what the positions reach, scaling included
    rope: RopeSpec
    has_qkv_bias: bool
    has_output_bias: bool
    has_mlp_bias: bool
    has_qk_norm: bool  # RMSNorm of each query and key head, before the rotation
    is_tied: bool  # the output matrix is the embedding
    windows: tuple[int | None, ...]  # a layer: how many of the last tokens it sees, its own included; None: all
    eos_token_ids: tuple[int, ...]
    dtype: str | None  # the checkpoint's own word; None: it does not say
    experts: ExpertSpec | None = None
    latent: LatentSpec | None = None
    scale_block: tuple[int, int] | None = None  # rows and columns of a float8 weight that share a scale
    num_predicting: int = 0  # layers behind the last that predict further tokens, which we do without

    def has_experts(self, layer: int) -> bool:
        return self.experts is not None and self.experts.layers[layer]

    @property
    def unread(self) -> tuple[str, ...]:
        """How names of tensors begin that belong to the model and are not wanted."""
        return tuple(f"model.layers.{self.num_layers + i}." for i in range(self.num_predicting))

    @property
    def rope_dim(self) -> int:
        """Elements of a head that are rotated."""
        return self.head_dim if self.latent is None else self.latent.rope_dim

    @property
    def attention_scale(self) -> float:
        """What scores are multiplied with."""
        return self.head_dim**-0.5 if self.latent is None else self.latent.scale


def read_spec(directory: Path) -> ModelSpec:
    """Raises ConfigError naming every fault of the directory's config.json."""
    config = _read_json(directory / "config.json")
    architectures = config.get("architectures")
    name = str(architectures[0]) if isinstance(architectures, list) and architectures else "not named in config.json"
    if name not in FAMILIES:
        why = f" ({LACKING[name]})" if name in LACKING else ""
        raise ConfigError(
            f"{directory}: architecture {name} is not supported{why}", hint=f"supported are {', '.join(FAMILIES)}"
        )
    return _Reader(directory, config, FAMILIES[name]).read(name)


def _read_json(path: Path) -> dict[str, object]:
    try:
        value = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise ConfigError(
            f"{path.parent} has no config.json",
            hint="--model wants a Hugging Face directory: config.json, *.safetensors and tokenizer.json",
        ) from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read: {error}", hint=_MEND_CONFIG) from error
    if not isinstance(value, dict):
        raise ConfigError(f"{path} holds no JSON object", hint=_MEND_CONFIG)
    return value


# ---- families ----------------------------------------------------------------------------------------------


def _no_windows(config: Json, num_layers: int) -> tuple[int | None, ...]:
    return (None,) * num_layers


def _mistral_windows(config: Json, num_layers: int) -> tuple[int | None, ...]:
    window = config.get("sliding_window", 4096)
    return (window if isinstance(window, int) else None,) * num_layers


def _qwen_windows(config: Json, num_layers: int) -> tuple[int | None, ...]:
    """Only with use_sliding_window; then by layer_types, else from layer max_window_layers on."""
    window = config.get("sliding_window", 4096)
    if not config.get("use_sliding_window", False) or not isinstance(window, int):
        return (None,) * num_layers
    kinds = config.get("layer_types")
    if not isinstance(kinds, list):
        given = config.get("max_window_layers", 28)
        first = given if isinstance(given, int) else 28
        kinds = ["sliding_attention" if layer >= first else "full_attention" for layer in range(num_layers)]
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def _qwen_moe_windows(config: Json, num_layers: int) -> tuple[int | None, ...]:
    """All layers or none."""
    window = config.get("sliding_window", 4096) if config.get("use_sliding_window", False) else None
    return (window if isinstance(window, int) else None,) * num_layers


def _mixtral_windows(config: Json, num_layers: int) -> tuple[int | None, ...]:
    window = config.get("sliding_window")
    return (window if isinstance(window, int) else None,) * num_layers


def _deepseek_v2_latent(fields: Fields, rope: RopeSpec) -> LatentSpec:
    return read_latent(fields, rope, is_interleaved=True)


def _deepseek_v3_latent(fields: Fields, rope: RopeSpec) -> LatentSpec:
    return read_latent(fields, rope, is_interleaved=fields.flag("rope_interleave", default=True))


@dataclass(frozen=True, slots=True)
class _Family:
    max_positions: int
    bias: Bias
    num_kv_heads: int | None = None  # None: as many as query heads
    head_dim: int | None = None  # None: hidden_size over query heads
    has_mlp_bias: bool = False  # whether config.json's mlp_bias means anything
    has_qk_norm: bool = False
    experts: Callable[[Fields, int], ExpertSpec] | None = None
    latent: Callable[[Fields, RopeSpec], LatentSpec] | None = None
    windows: Callable[[Json, int], tuple[int | None, ...]] = _no_windows
    theta: float = DEFAULT_THETA


FAMILIES: Mapping[str, _Family] = {
    "LlamaForCausalLM": _Family(2048, Bias.ASKED, has_mlp_bias=True),
    "MistralForCausalLM": _Family(131072, Bias.NONE, num_kv_heads=8, windows=_mistral_windows),
    "Qwen2ForCausalLM": _Family(32768, Bias.QKV, num_kv_heads=32, windows=_qwen_windows),
    "Qwen3ForCausalLM": _Family(
        32768, Bias.ASKED, num_kv_heads=32, head_dim=128, has_qk_norm=True, windows=_qwen_windows
    ),
    "Qwen3MoeForCausalLM": _Family(
        32768, Bias.ASKED, num_kv_heads=4, has_qk_norm=True, experts=qwen3_experts, windows=_qwen_moe_windows
    ),
    "MixtralForCausalLM": _Family(
        131072, Bias.NONE, num_kv_heads=8, experts=mixtral_experts, windows=_mixtral_windows, theta=1e6
    ),
    "DeepseekV2ForCausalLM": _Family(2048, Bias.ASKED, experts=deepseek_v2_experts, latent=_deepseek_v2_latent),
    "DeepseekV3ForCausalLM": _Family(4096, Bias.ASKED, experts=deepseek_v3_experts, latent=_deepseek_v3_latent),
}

LACKING: Mapping[str, str] = {
    "DeepseekForCausalLM": "the first DeepSeek-MoE; DeepSeek-V2 and V3 are",
    "DeepseekV32ForCausalLM": "its sparse attention is not computed here; DeepSeek-V2's and V3's attention is",
    "DeepseekV4ForCausalLM": "its compressed sparse attention is not computed here; DeepSeek-V2's and V3's is",
}
"""Relatives of families that we have, and what they would take."""


# ---- the fields ----------------------------------------------------------------------------------------------


class _Reader:
    """One pass over one config.json, collecting faults."""

    def __init__(self, directory: Path, config: dict[str, object], family: _Family) -> None:
        self._directory = directory
        self._fields = Fields(config)
        self._family = family

    def read(self, architecture: str) -> ModelSpec:
        family, fields = self._family, self._fields
        num_layers = fields.size("num_hidden_layers")
        num_query_heads = fields.size("num_attention_heads")
        hidden_size = fields.size("hidden_size")
        rope, max_positions = self._rope()
        latent = family.latent(fields, rope) if family.latent else None
        if latent is not None:
            num_kv_heads, head_dim = 1, latent.size
        else:
            num_kv_heads = fields.size("num_key_value_heads", family.num_kv_heads or num_query_heads)
            head_dim = fields.size("head_dim", family.head_dim or hidden_size // num_query_heads or 1)
        asked = fields.flag("attention_bias")
        spec = ModelSpec(
            architecture=architecture,
            vocab_size=fields.size("vocab_size"),
            hidden_size=hidden_size,
            intermediate_size=fields.size("intermediate_size"),
            num_layers=num_layers,
            num_query_heads=num_query_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            rms_norm_eps=fields.number("rms_norm_eps", 1e-6),
            max_positions=max_positions,
            rope=rope,
            has_qkv_bias=family.bias is Bias.QKV or (family.bias is Bias.ASKED and asked),
            has_output_bias=family.bias is Bias.ASKED and asked,
            has_mlp_bias=family.has_mlp_bias and fields.flag("mlp_bias"),
            has_qk_norm=family.has_qk_norm,
            is_tied=fields.flag("tie_word_embeddings"),
            windows=family.windows(fields.config, num_layers),
            eos_token_ids=self._eos(),
            dtype=self._dtype(),
            experts=family.experts(fields, num_layers) if family.experts else None,
            latent=latent,
            scale_block=self._scaled_by(),
            num_predicting=fields.count("num_nextn_predict_layers", 0),
        )
        self._check(spec)
        if fields.faults:
            raise ConfigError(
                *(f"{self._directory / 'config.json'}: {fault}" for fault in fields.faults), hint=_MEND_CONFIG
            )
        return spec

    def _check(self, spec: ModelSpec) -> None:
        faults, config = self._fields.faults, self._fields.config
        if spec.num_query_heads % spec.num_kv_heads:
            faults.append(f"{spec.num_query_heads} query heads do not share {spec.num_kv_heads} KV heads evenly")
        if spec.rope_dim % 2:
            name = "head_dim" if spec.latent is None else "qk_rope_head_dim"
            faults.append(f"{name} {spec.rope_dim} is odd: rotary embeddings need pairs")
        if spec.experts is not None:
            faults += spec.experts.check()
        if len(spec.windows) != spec.num_layers:
            faults.append(f"{len(spec.windows)} layer_types for {spec.num_layers} layers")
        if (activation := config.get("hidden_act", "silu")) != "silu":
            faults.append(f"hidden_act {activation!r} is not supported; silu is")

    def _scaled_by(self) -> tuple[int, int] | None:
        match self._fields.config.get("quantization_config"):
            case given if not given:
                return None
            case {"quant_method": "fp8", "weight_block_size": [int(rows), int(columns)]} if min(rows, columns) > 0:
                return rows, columns
            case {"quant_method": method} | method:
                self._fields.faults.append(
                    f"quantization_config {method!r} is not supported: the weights must be plain, or fp8 with a "
                    "weight_block_size"
                )
                return None

    def _rope(self) -> tuple[RopeSpec, int]:
        limit = self._fields.size("max_position_embeddings", self._family.max_positions)
        rope, faults = read_rope(self._fields.config, limit, self._family.theta)
        self._fields.faults += faults
        return rope, rope.stretched(limit)

    def _eos(self) -> tuple[int, ...]:
        """generation_config.json's, as transformers' generate takes them, else config.json's."""
        path = self._directory / "generation_config.json"
        generation = _read_json(path) if path.exists() else {}
        ids = generation.get("eos_token_id", self._fields.config.get("eos_token_id"))
        return tuple(i for i in (ids if isinstance(ids, list) else [ids]) if isinstance(i, int))

    def _dtype(self) -> str | None:
        word = self._fields.config.get("dtype", self._fields.config.get("torch_dtype"))
        return word if isinstance(word, str) else None
