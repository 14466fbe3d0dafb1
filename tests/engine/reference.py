"""The truth that our engine is compared with."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM


class Reference:
    """transformers in float32."""

    def __init__(self, checkpoint: Path) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
        self._model.generation_config.eos_token_id = None
        self._told: dict[tuple[int, ...], tuple[list[int], Tensor]] = {}

    @torch.inference_mode()
    def generate(self, prompt: Sequence[int], num_tokens: int) -> tuple[list[int], Tensor]:
        """Greedy ids, through end-of-text, and the log-probabilities each was chosen from: [num_tokens, vocabulary]."""
        key = (*prompt, -num_tokens)
        if key not in self._told:
            self._told[key] = self._generate(prompt, num_tokens)
        return self._told[key]

    def _generate(self, prompt: Sequence[int], num_tokens: int) -> tuple[list[int], Tensor]:
        out = self._model.generate(
            torch.tensor([list(prompt)]),
            max_new_tokens=num_tokens,
            do_sample=False,
            pad_token_id=0,
            output_logits=True,
            return_dict_in_generate=True,
        )
        return out.sequences[0, len(prompt) :].tolist(), torch.cat(out.logits).log_softmax(-1)
