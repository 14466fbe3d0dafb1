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
from pd.runtime.engine.rope_spec import RopeSpec, read_rope

Json = Mapping[str, object]
_MEND_CONFIG = "copy config.json from the model's publisher again, or give another --model"


class Bias(enum.Enum):
    """Where a family keeps biases in attention."""

    NONE = "none"
    QKV = "qkv"
    ASKED = "asked"  # config.json's attention_bias, for q, k, v and o alike


@dataclass(frozen=True, slots=True)
class ExpertSpec:
    """A mixture of experts in place of an MLP: softmax over all of them, and the best few for each token."""

    num_experts: int
    num_chosen: int  # a token
    intermediate_size: int  # of each
    is_renormalised: bool  # the weights of those chosen are made to sum to 1
    layers: tuple[bool, ...]  # which have one; the others have an MLP


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A decoder-only transformer of the Llama kind: RMSNorm, rotary GQA attention, gated SiLU MLP or experts."""

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

    def has_experts(self, layer: int) -> bool:
        return self.experts is not None and self.experts.layers[layer]


def read_spec(directory: Path) -> ModelSpec:
    """Raises ConfigError naming every fault of the directory's config.json."""
    config = _read_json(directory / "config.json")
    architectures = config.get("architectures")
    name = str(architectures[0]) if isinstance(architectures, list) and architectures else "not named in config.json"
    if name not in FAMILIES:
        raise ConfigError(
            f"{directory}: architecture {name} is not supported", hint=f"supported are {', '.join(FAMILIES)}"
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


@dataclass(frozen=True, slots=True)
class _Family:
    max_positions: int
    bias: Bias
    num_kv_heads: int | None = None  # None: as many as query heads
    head_dim: int | None = None  # None: hidden_size over query heads
    has_mlp_bias: bool = False  # whether config.json's mlp_bias means anything
    has_qk_norm: bool = False
    has_experts: bool = False
    windows: Callable[[Json, int], tuple[int | None, ...]] = _no_windows


FAMILIES: Mapping[str, _Family] = {
    "LlamaForCausalLM": _Family(2048, Bias.ASKED, has_mlp_bias=True),
    "MistralForCausalLM": _Family(131072, Bias.NONE, num_kv_heads=8, windows=_mistral_windows),
    "Qwen2ForCausalLM": _Family(32768, Bias.QKV, num_kv_heads=32, windows=_qwen_windows),
    "Qwen3ForCausalLM": _Family(
        32768, Bias.ASKED, num_kv_heads=32, head_dim=128, has_qk_norm=True, windows=_qwen_windows
    ),
    "Qwen3MoeForCausalLM": _Family(
        32768, Bias.ASKED, num_kv_heads=4, has_qk_norm=True, has_experts=True, windows=_qwen_moe_windows
    ),
}


# ---- the fields ----------------------------------------------------------------------------------------------


class _Reader:
    """One pass over one config.json, collecting faults."""

    def __init__(self, directory: Path, config: dict[str, object], family: _Family) -> None:
        self._directory = directory
        self._config = config
        self._family = family
        self._faults: list[str] = []

    def read(self, architecture: str) -> ModelSpec:
        family = self._family
        num_layers = self._size("num_hidden_layers")
        num_query_heads = self._size("num_attention_heads")
        hidden_size = self._size("hidden_size")
        num_kv_heads = self._size("num_key_value_heads", family.num_kv_heads or num_query_heads)
        rope, max_positions = self._rope()
        asked = bool(self._config.get("attention_bias", False))
        spec = ModelSpec(
            architecture=architecture,
            vocab_size=self._size("vocab_size"),
            hidden_size=hidden_size,
            intermediate_size=self._size("intermediate_size"),
            num_layers=num_layers,
            num_query_heads=num_query_heads,
            num_kv_heads=num_kv_heads,
            head_dim=self._size("head_dim", family.head_dim or hidden_size // num_query_heads or 1),
            rms_norm_eps=self._number("rms_norm_eps", 1e-6),
            max_positions=max_positions,
            rope=rope,
            has_qkv_bias=family.bias is Bias.QKV or (family.bias is Bias.ASKED and asked),
            has_output_bias=family.bias is Bias.ASKED and asked,
            has_mlp_bias=family.has_mlp_bias and bool(self._config.get("mlp_bias", False)),
            has_qk_norm=family.has_qk_norm,
            is_tied=bool(self._config.get("tie_word_embeddings", False)),
            windows=family.windows(self._config, num_layers),
            eos_token_ids=self._eos(),
            dtype=self._dtype(),
            experts=self._experts(num_layers) if family.has_experts else None,
        )
        self._check(spec)
        if self._faults:
            raise ConfigError(
                *(f"{self._directory / 'config.json'}: {fault}" for fault in self._faults), hint=_MEND_CONFIG
            )
        return spec

    def _check(self, spec: ModelSpec) -> None:
        if spec.num_query_heads % spec.num_kv_heads:
            self._faults.append(f"{spec.num_query_heads} query heads do not share {spec.num_kv_heads} KV heads evenly")
        if spec.head_dim % 2:
            self._faults.append(f"head_dim {spec.head_dim} is odd: rotary embeddings need pairs")
        if spec.experts is not None and spec.experts.num_chosen > spec.experts.num_experts:
            chosen, there = spec.experts.num_chosen, spec.experts.num_experts
            self._faults.append(f"num_experts_per_tok {chosen} is more than the {there} experts")
        if len(spec.windows) != spec.num_layers:
            self._faults.append(f"{len(spec.windows)} layer_types for {spec.num_layers} layers")
        if (activation := self._config.get("hidden_act", "silu")) != "silu":
            self._faults.append(f"hidden_act {activation!r} is not supported; silu is")
        if quantization := self._config.get("quantization_config"):
            method = quantization.get("quant_method") if isinstance(quantization, dict) else quantization
            self._faults.append(f"quantization_config {method!r} is not supported: the weights must be plain")

    def _experts(self, num_layers: int) -> ExpertSpec:
        """As Qwen3-MoE tells of them; newer transformers say num_local_experts."""
        said = "num_local_experts" if "num_local_experts" in self._config else "num_experts"
        step = self._size("decoder_sparse_step", 1)
        plain = self._config.get("mlp_only_layers") or ()
        without = set(plain) if isinstance(plain, list | tuple) else set()
        return ExpertSpec(
            num_experts=self._size(said, 128),
            num_chosen=self._size("num_experts_per_tok", 8),
            intermediate_size=self._size("moe_intermediate_size", 768),
            is_renormalised=bool(self._config.get("norm_topk_prob", False)),
            layers=tuple(layer not in without and (layer + 1) % step == 0 for layer in range(num_layers)),
        )

    def _rope(self) -> tuple[RopeSpec, int]:
        limit = self._size("max_position_embeddings", self._family.max_positions)
        rope, faults = read_rope(self._config, limit)
        self._faults += faults
        return rope, rope.stretched(limit)

    def _eos(self) -> tuple[int, ...]:
        """generation_config.json's, as transformers' generate takes them, else config.json's."""
        path = self._directory / "generation_config.json"
        generation = _read_json(path) if path.exists() else {}
        ids = generation.get("eos_token_id", self._config.get("eos_token_id"))
        return tuple(i for i in (ids if isinstance(ids, list) else [ids]) if isinstance(i, int))

    def _dtype(self) -> str | None:
        word = self._config.get("dtype", self._config.get("torch_dtype"))
        return word if isinstance(word, str) else None

    def _size(self, name: str, default: int | None = None) -> int:
        value = self._config.get(name)
        if value is None:
            value = default
        if isinstance(value, int) and not isinstance(value, bool) and value >= 1:
            return value
        self._faults.append(f"{name} must be a positive integer, not {value!r}")
        return 1

    def _number(self, name: str, default: float) -> float:
        value = self._config.get(name, default)
        if isinstance(value, int | float) and not isinstance(value, bool):
            return float(value)
        self._faults.append(f"{name} must be a number, not {value!r}")
        return default
