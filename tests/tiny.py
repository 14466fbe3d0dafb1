"""Builds tiny checkpoints with random weights, for tests that need a whole model directory.

Rules
1. The weights are a function of (family, overrides, seed), so two calls write the same model.
2. Greedy choices are decisive: weights are large, norms and biases random, so a dropped bias or a wrong
   rotation shows.
3. The default shape has 9 query heads on 3 KV heads: no tensor parallelism but 1, 3 and 9 divides it.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    DeepseekV2Config,
    DeepseekV3Config,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

CONFIGS = {
    "llama": LlamaConfig,
    "qwen2": Qwen2Config,
    "qwen3": Qwen3Config,
    "qwen3_moe": Qwen3MoeConfig,
    "mistral": MistralConfig,
    "mixtral": MixtralConfig,
    "deepseek_v2": DeepseekV2Config,
    "deepseek_v3": DeepseekV3Config,
}
FAMILIES = tuple(CONFIGS)

SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
PAIRS = "th he in er an re on at en nd ti es or te of ed is it al ar st to nt ng"
EOS = 256 + len(PAIRS.split()) + SPECIALS.index("<|im_end|>")
VOCAB_SIZE = 256 + len(PAIRS.split()) + len(SPECIALS)

CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

DEFAULTS = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 72,
    "intermediate_size": 100,
    "num_hidden_layers": 3,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "bos_token_id": None,
    "eos_token_id": EOS,
    "pad_token_id": None,
}
_YARN = {
    "rope_type": "yarn", "rope_theta": 500.0, "factor": 8.0, "original_max_position_embeddings": 64,
    "mscale": 0.8, "mscale_all_dim": 0.9,
}  # fmt: skip
_LATENT = {
    "num_key_value_heads": 9, "kv_lora_rank": 24, "q_lora_rank": 20, "qk_rope_head_dim": 8, "qk_nope_head_dim": 12,
    "v_head_dim": 10, "n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 20, "n_group": 4,
    "topk_group": 2, "first_k_dense_replace": 1, "routed_scaling_factor": 1.7, "rope_parameters": _YARN,
}  # fmt: skip
OWN: dict[str, dict[str, object]] = {
    "qwen3_moe": {"num_experts": 7, "num_experts_per_tok": 3, "moe_intermediate_size": 20, "norm_topk_prob": True},
    "mixtral": {"num_local_experts": 5, "num_experts_per_tok": 2},
    "deepseek_v2": {**_LATENT, "topk_method": "group_limited_greedy", "n_shared_experts": 2},
    "deepseek_v3": {**_LATENT, "n_shared_experts": 1, "num_mtp_layers": 0},
}
"""Of a family, beside or before the above."""


def make_tiny(
    family: str, directory: Path, *, seed: int = 0, dtype: torch.dtype = torch.float32, **overrides: object
) -> Path:
    """Write config.json, safetensors and a tokenizer into `directory` (made if missing) and return it.

    `family` is one of FAMILIES; `overrides` are fields of its transformers config, such as num_hidden_layers
    or rope_parameters. `AutoModelForCausalLM.from_pretrained(directory)` reads what was written.
    """
    directory.mkdir(parents=True, exist_ok=True)
    config = CONFIGS[family](**{**DEFAULTS, **OWN.get(family, {}), **overrides})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    _randomize(model, seed)
    model.to(dtype).save_pretrained(directory)
    _write_tokenizer(directory)
    return directory


def _randomize(model: torch.nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if "norm" in name:
                parameter.copy_(1 + 0.3 * noise)
            elif "embed_tokens" in name or "lm_head" in name or name.endswith("bias"):
                parameter.copy_(0.4 * noise)
            else:
                parameter.copy_(noise * 1.5 / parameter.shape[-1] ** 0.5)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.copy_(0.2 * torch.randn(buffer.shape, generator=generator))


def _write_tokenizer(directory: Path) -> None:
    letters = pre_tokenizers.ByteLevel.alphabet()
    pairs = PAIRS.split()
    vocab = {token: i for i, token in enumerate([*sorted(letters), *pairs])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[(pair[0], pair[1]) for pair in pairs]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIALS])
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "clean_up_tokenization_spaces": False,
        "model_max_length": 512,
        "chat_template": CHAT_TEMPLATE,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(settings, indent=2))
