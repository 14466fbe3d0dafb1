"""Answers by Hugging Face transformers: the reference nobody here wrote."""

from __future__ import annotations

import functools
import random
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

PAGE = 16
CHUNK = 48
LENGTHS = (1, 2, PAGE - 1, PAGE, PAGE + 1, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK + 5, 2 * PAGE, 200, 97)
"""Of prompts, in tokens: one, the edges of a page and of a chunk, several chunks."""


def prompts(vocab_size: int, *, num_prompts: int, seed: int) -> list[list[int]]:
    """Random prompts whose lengths go through LENGTHS."""
    dice = random.Random(seed)
    lengths = [LENGTHS[i % len(LENGTHS)] for i in range(num_prompts)]
    return [[dice.randrange(vocab_size) for _ in range(length)] for length in lengths]


def greedy(checkpoint: Path, asked: list[list[int]], num_tokens: int) -> list[list[int]]:
    """`num_tokens` greedy tokens for each prompt, in float32. Prompts of one length go together: nothing is padded."""
    alike: dict[int, list[int]] = {}
    for place, prompt in enumerate(asked):
        alike.setdefault(len(prompt), []).append(place)
    answers: list[list[int]] = [[] for _ in asked]
    for places in alike.values():
        told = greedy_together(checkpoint, [asked[place] for place in places], num_tokens)
        for place, answer in zip(places, told, strict=True):
            answers[place] = answer
    return answers


def greedy_together(checkpoint: Path, asked: list[list[int]], num_tokens: int) -> list[list[int]]:
    """As `greedy`, in one batch, padded on the left: many times faster where the model is large."""
    model = _load(checkpoint)
    longest = max(map(len, asked))
    ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in asked])
    # Left out, the mask is guessed, and tokens that happen to be the pad token are masked.
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in asked])
    with torch.inference_mode():
        out = model.generate(
            ids, attention_mask=mask, max_new_tokens=num_tokens, min_new_tokens=num_tokens, do_sample=False
        )
    return [[int(token) for token in row[longest:]] for row in out]


@functools.lru_cache(maxsize=1)
def _load(checkpoint: Path) -> PreTrainedModel:
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model
