"""Every family and rotation, run through plans, is transformers' model: same tokens, same log-probabilities."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from pd.runtime.engine.build import Engine
from pd.runtime.wire.values import Sampling
from tests.engine.driving import (
    PAGE,
    Driver,
    build_engine,
    generate,
    ids_of,
    logprobs_of,
    prompt_of,
    rank_config,
)
from tests.engine.reference import Reference
from tests.tiny import VOCAB_SIZE, make_tiny

TOLERANCE = 3e-5
"""transformers, cached against uncached, differ by 1e-5 on these weights; a dropped bias by more than 0.1."""

CASES: dict[str, tuple[str, dict[str, object]]] = {
    "llama": ("llama", {}),
    "llama-biases-tied": ("llama", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    "llama-one-kv-head": ("llama", {"num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 18}),
    "llama-all-kv-heads": ("llama", {"num_key_value_heads": 9}),
    "llama-linear": ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 2.5, "rope_theta": 500.0}}),
    "llama-dynamic": ("llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 500.0}}),
    "llama-llama3": (
        "llama",
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 500.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            }
        },
    ),
    "llama-yarn": (
        "llama",
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 500.0,
                "factor": 4.0,
                "original_max_position_embeddings": 64,
                "beta_fast": 8.0,
                "mscale": 0.7,
                "mscale_all_dim": 0.9,
            }
        },
    ),
    "qwen2": ("qwen2", {}),
    "qwen2-window-from-layer-1": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 11, "max_window_layers": 1},
    ),
    "qwen2-yarn": (
        "qwen2",
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 500.0,
                "factor": 4.0,
                "original_max_position_embeddings": 128,
                "truncate": False,
            }
        },
    ),
    "qwen3": ("qwen3", {}),
    "qwen3-biases-tied": ("qwen3", {"attention_bias": True, "tie_word_embeddings": True}),
    "qwen3-windows-by-layer": (
        "qwen3",
        {
            "use_sliding_window": True,
            "sliding_window": PAGE,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    "qwen3_moe": ("qwen3_moe", {}),
    "qwen3_moe-dense-layers": (
        "qwen3_moe",
        {"num_hidden_layers": 4, "decoder_sparse_step": 2, "mlp_only_layers": [1], "norm_topk_prob": False},
    ),
    "mixtral": ("mixtral", {}),
    "mixtral-window": ("mixtral", {"sliding_window": 11}),
    "deepseek_v2": ("deepseek_v2", {}),
    "deepseek_v2-as-lite": (
        "deepseek_v2",
        {"q_lora_rank": None, "topk_method": "greedy", "n_group": 1, "topk_group": 1, "routed_scaling_factor": 1.0},
    ),
    "deepseek_v2-biases": ("deepseek_v2", {"attention_bias": True, "rope_parameters": None, "n_shared_experts": 1}),
    "deepseek_v3": ("deepseek_v3", {}),
    "deepseek_v3-plain": (
        "deepseek_v3",
        {
            "q_lora_rank": None,
            "attention_bias": True,
            "rope_interleave": False,
            "norm_topk_prob": False,
            "first_k_dense_replace": 0,
            "n_group": 1,
            "topk_group": 1,
            "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
        },
    ),
    "mistral-no-window": ("mistral", {"sliding_window": None}),
    "mistral-window": ("mistral", {"sliding_window": 11}),
    "mistral-window-of-two": ("mistral", {"sliding_window": 2}),
}

Pair = tuple[Engine, Reference]


@pytest.fixture(scope="module", params=CASES)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    family, overrides = CASES[request.param]
    checkpoint: Path = make_tiny(family, tmp_path_factory.mktemp(request.param), seed=7, **overrides)
    engine = build_engine(rank_config(checkpoint))
    yield engine, Reference(checkpoint)
    engine.close()


def check(pair: Pair, prompt: list[int], *, pieces: tuple[int, ...] = (), num_tokens: int = 5) -> None:
    engine, reference = pair
    ids, logprobs = reference.generate(prompt, num_tokens)
    tokens = generate(engine, prompt, num_tokens, pieces=pieces, logprobs=VOCAB_SIZE)
    assert ids_of(tokens) == ids
    torch.testing.assert_close(torch.stack([logprobs_of(t) for t in tokens]), logprobs, atol=TOLERANCE, rtol=TOLERANCE)


@pytest.mark.parametrize("length", [1, PAGE - 1, PAGE, PAGE + 1, 43])
def test_whole_prompt_equals_transformers(pair: Pair, length: int) -> None:
    check(pair, prompt_of(length, seed=length, vocab_size=VOCAB_SIZE))


@pytest.mark.parametrize("pieces", [(1,), (PAGE,), (PAGE - 1, 1, PAGE + 1), (17, 1, 1, 13)])
def test_chunked_prompt_equals_transformers(pair: Pair, pieces: tuple[int, ...]) -> None:
    check(pair, prompt_of(43, seed=43, vocab_size=VOCAB_SIZE), pieces=pieces)


def test_mixed_steps_equal_transformers(pair: Pair) -> None:
    """Three requests in one batch: each step some decode, some are given the next piece of their prompt."""
    engine, reference = pair
    prompts = {
        slot: prompt_of(length, seed=slot, vocab_size=VOCAB_SIZE) for slot, length in {3: 1, 0: 21, 5: 50}.items()
    }
    piece = {3: 1, 0: 8, 5: 13}
    driver = Driver(engine, seed=3)
    done = dict.fromkeys(prompts, 0)
    answers: dict[int, list[int]] = {slot: [] for slot in prompts}
    for slot, prompt in prompts.items():
        driver.admit(slot, prompt, Sampling(max_tokens=99, temperature=0.0))
    while min(map(len, answers.values())) < 4:
        chunks = []
        for slot, prompt in prompts.items():
            stop = min(done[slot] + piece[slot], len(prompt)) if done[slot] < len(prompt) else done[slot] + 1
            chunks.append((slot, done[slot], stop, stop >= len(prompt)))
            done[slot] = stop
        tokens = iter(driver.run(*chunks))
        for slot, _, _, samples in chunks:
            answers[slot] += [next(tokens).id] if samples else []
    for slot, prompt in prompts.items():
        driver.retire(slot)
        assert answers[slot] == reference.generate(prompt, len(answers[slot]))[0], f"slot {slot}"
    driver.run()
