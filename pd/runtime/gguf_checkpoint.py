"""Turn a GGUF file of a Llama with SmolLM's tokenizer into a Hugging Face directory, weights in bfloat16.

Rules
1. No torch and no transformers: a leader and a router may call it.
2. One tensor is in memory at a time.

transformers' own GGUF loader is not used: it drops the tokenizer's Digits step, so texts with numbers come
out otherwise than in llama.cpp, and it cannot save what it loaded.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
from gguf.quants import dequantize
from numpy.typing import NDArray

from pd.runtime.config import ConfigError

Progress = Callable[[int, int], None]
"""(bytes written, bytes in all)"""

_OUTER = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_INNER = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_CONTROL_TOKEN = int(gguf.TokenType.CONTROL)


def convert(source: Path, folder: Path, *, progress: Progress) -> None:
    """Write model.safetensors, config, tokenizer and generation settings of `source` into existing `folder`.

    Raises ConfigError if the file is another kind of model than this module knows.
    """
    reader = gguf.GGUFReader(source)
    fields = _Fields(reader)
    kind = fields.text("general.architecture"), fields.text("tokenizer.ggml.pre")
    if kind != ("llama", "smollm"):
        raise ConfigError(f"{source} holds a {kind[0]} with tokenizer {kind[1]}; only a llama with smollm is converted")
    tensors = {_hub_name(tensor.name): tensor for tensor in reader.tensors}
    tied = "lm_head.weight" not in tensors
    _write_json(folder / "config.json", _config(fields, tied=tied))
    _write_json(folder / "generation_config.json", _token_ids(fields))
    _write_json(folder / "tokenizer.json", _tokenizer(fields))
    _write_json(folder / "tokenizer_config.json", _tokenizer_config(fields))
    heads = {
        "q_proj": fields.number("llama.attention.head_count"),
        "k_proj": fields.number("llama.attention.head_count_kv"),
    }
    _write_weights(folder / "model.safetensors", tensors, heads=heads, progress=progress)


class _Fields:
    """The file's metadata, each read with the type it must have."""

    def __init__(self, reader: gguf.GGUFReader) -> None:
        self._reader = reader

    def number(self, key: str) -> int:
        return int(self._get(key))  # type: ignore[call-overload, no-any-return]

    def real(self, key: str) -> float:
        return float(f"{self._get(key):.7g}")  # stored as float32: 1e-5, not 9.999999747e-06

    def text(self, key: str) -> str:
        return str(self._get(key))

    def texts(self, key: str) -> list[str]:
        return list(self._get(key))  # type: ignore[call-overload, no-any-return]

    def numbers(self, key: str) -> list[int]:
        return list(self._get(key))  # type: ignore[call-overload, no-any-return]

    def _get(self, key: str) -> object:
        field = self._reader.fields.get(key)
        if field is None:
            raise ConfigError(
                f"the GGUF file has no field {key}", hint="the file is damaged: install its package again"
            )
        return field.contents()


def _hub_name(name: str) -> str:
    if name in _OUTER:
        return _OUTER[name]
    _, layer, part, _ = name.split(".")
    return f"model.layers.{layer}.{_INNER[part]}.weight"


def _config(fields: _Fields, *, tied: bool) -> dict[str, object]:
    hidden_size = fields.number("llama.embedding_length")
    num_heads = fields.number("llama.attention.head_count")
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden_size,
        "intermediate_size": fields.number("llama.feed_forward_length"),
        "num_hidden_layers": fields.number("llama.block_count"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": fields.number("llama.attention.head_count_kv"),
        "head_dim": hidden_size // num_heads,
        "vocab_size": fields.number("llama.vocab_size"),
        "max_position_embeddings": fields.number("llama.context_length"),
        "rms_norm_eps": fields.real("llama.attention.layer_norm_rms_epsilon"),
        "rope_theta": fields.real("llama.rope.freq_base"),
        "tie_word_embeddings": tied,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        "torch_dtype": "bfloat16",
        **_token_ids(fields),
    }


def _token_ids(fields: _Fields) -> dict[str, object]:
    return {
        "bos_token_id": fields.number("tokenizer.ggml.bos_token_id"),
        "eos_token_id": fields.number("tokenizer.ggml.eos_token_id"),
        "pad_token_id": fields.number("tokenizer.ggml.padding_token_id"),
    }


def _tokenizer(fields: _Fields) -> dict[str, object]:
    """llama.cpp's "smollm" pre-tokenizer: each digit by itself, then GPT-2's byte-level BPE."""
    tokens = fields.texts("tokenizer.ggml.tokens")
    kinds = fields.numbers("tokenizer.ggml.token_type")
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    special = [
        {"id": number, "content": token, **plain}
        for number, (token, kind) in enumerate(zip(tokens, kinds, strict=True))
        if kind == _CONTROL_TOKEN
    ]
    byte_level = {"type": "ByteLevel", "trim_offsets": True, "use_regex": True}
    digits = {"type": "Digits", "individual_digits": True}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": special,
        "normalizer": None,
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [digits, {**byte_level, "add_prefix_space": False}],
        },
        "post_processor": None,
        "decoder": {**byte_level, "add_prefix_space": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {token: number for number, token in enumerate(tokens)},
            "merges": [merge.split(" ", 1) for merge in fields.texts("tokenizer.ggml.merges")],
        },
    }


def _tokenizer_config(fields: _Fields) -> dict[str, object]:
    tokens = fields.texts("tokenizer.ggml.tokens")
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": tokens[fields.number("tokenizer.ggml.bos_token_id")],
        "eos_token": tokens[fields.number("tokenizer.ggml.eos_token_id")],
        "pad_token": tokens[fields.number("tokenizer.ggml.padding_token_id")],
        "unk_token": tokens[fields.number("tokenizer.ggml.unknown_token_id")],
        "model_max_length": fields.number("llama.context_length"),
        "clean_up_tokenization_spaces": False,
        "chat_template": fields.text("tokenizer.chat_template"),
    }


def _write_json(path: Path, value: dict[str, object]) -> None:
    path.write_text(json.dumps(value, ensure_ascii=False, indent=1), encoding="utf-8")


def _write_weights(
    path: Path, tensors: dict[str, gguf.ReaderTensor], *, heads: dict[str, int], progress: Progress
) -> None:
    """Write a safetensors file: header length (8 bytes, little-endian), JSON header, then the tensors' bytes.

    By hand and not with the library, whose writer wants all tensors at once and, for bfloat16, arguments that
    differ between its releases. Format: the safetensors README, "Format".
    """
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, tensor in tensors.items():
        start, end = end, end + 2 * int(tensor.n_elements)
        header[name] = {"dtype": "BF16", "shape": _shape(tensor), "data_offsets": [start, end]}
    head = json.dumps(header).encode()
    head += b" " * (-len(head) % 8)  # the data begins aligned
    written = 0
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(head)) + head)
        for name, tensor in tensors.items():
            weights = dequantize(tensor.data, tensor.tensor_type).astype(np.float32).reshape(_shape(tensor))
            if (part := name.split(".")[-2]) in heads:
                weights = _half_rotated(weights, heads[part])
            file.write(bfloat16_bits(weights).tobytes())
            written += 2 * int(tensor.n_elements)
            progress(written, end)


def _shape(tensor: gguf.ReaderTensor) -> list[int]:
    return [int(size) for size in reversed(tensor.shape)]  # GGUF says the fastest axis first


def _half_rotated(weights: NDArray[np.float32], num_heads: int) -> NDArray[np.float32]:
    """Rows from llama.cpp's order (rope turns neighbours) to Hugging Face's (rope turns halves of a head)."""
    rows, columns = weights.shape
    pairs = weights.reshape(num_heads, rows // num_heads // 2, 2, columns)
    return pairs.swapaxes(1, 2).reshape(rows, columns)


def bfloat16_bits(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """The upper 16 bits of each float32, rounded to nearest, ties to even. Not for NaN; weights have none."""
    bits = np.ascontiguousarray(values).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
