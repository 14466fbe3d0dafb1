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
        told = _continued(checkpoint, torch.tensor([asked[place] for place in places]), num_tokens)
        for place, answer in zip(places, told, strict=True):
            answers[place] = answer
    return answers


def greedy_along(checkpoint: Path, prompt: list[int], answer: list[int]) -> list[int]:
    """The greedy token after the prompt, and after each token of `answer` but the last.

    That is `answer` if and only if it is the greedy answer, told in one pass: half the time of one a token.
    """
    ids = torch.tensor([prompt + answer[:-1]])
    with torch.inference_mode():
        logits_TV = _load(checkpoint)(ids, logits_to_keep=len(answer)).logits[0]
    return [int(token) for token in logits_TV.argmax(dim=-1)]


def _continued(checkpoint: Path, ids_BT: torch.Tensor, num_tokens: int) -> list[list[int]]:
    # Left out, the mask is guessed, and tokens that happen to be the pad token are masked.
    mask_BT = torch.ones_like(ids_BT)
    with torch.inference_mode():
        out = _load(checkpoint).generate(
            ids_BT, attention_mask=mask_BT, max_new_tokens=num_tokens, min_new_tokens=num_tokens, do_sample=False
        )
    return [[int(token) for token in row[ids_BT.shape[1] :]] for row in out]


@functools.lru_cache(maxsize=1)
def _load(checkpoint: Path) -> PreTrainedModel:
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model
