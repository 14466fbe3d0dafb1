"""How often each token stands in a penalised request: counts on the device, one row a request that asks for
penalties."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from pd.runtime.engine.staging import upload

# R rows of the pool, N rows under a penalty, V vocabulary

FIRST_ROWS = 4
"""Few requests ask for penalties; the pool doubles when they do."""


class History:
    """A pool of rows of token counts. Rows are taken and given back; each belongs to one slot at a time."""

    def __init__(self, *, vocab_size: int, max_rows: int, device: torch.device) -> None:
        self._max_rows = max_rows
        self._vocab_size = vocab_size
        self._device = device
        self._answer = torch.zeros(0, vocab_size, dtype=torch.int32, device=device)
        self._prompt = torch.zeros(0, vocab_size, dtype=torch.bool, device=device)
        self._free: list[int] = []

    def take(self, tokens: Sequence[int], num_prompt: int) -> int:
        """Take a row for a request whose first `num_prompt` tokens are its prompt and the rest its answer
        so far."""
        if not self._free:
            self._grow()
        row = self._free.pop()
        ids = np.array(tokens, dtype=np.int64)
        prompt, answer = upload([ids[:num_prompt], ids[num_prompt:]], self._device)
        self._prompt[row].zero_().index_fill_(0, prompt, True)
        # bincount would ask the device for the largest id
        self._answer[row].zero_().index_add_(0, answer, torch.ones_like(answer, dtype=torch.int32))
        return row

    def give_back(self, row: int) -> None:
        self._free.append(row)

    def append(self, rows_N: Tensor, ids_N: Tensor) -> None:
        """Count one more answer token a row. No host sync."""
        self._answer.index_put_((rows_N, ids_N), self._answer.new_ones(()), accumulate=True)

    def counts(self) -> tuple[Tensor, Tensor]:
        """answer_RV, int32: how often in the answer; prompt_RV, bool: whether in the prompt. Not copies."""
        return self._answer, self._prompt

    def _grow(self) -> None:
        num_rows = self._answer.shape[0]
        assert num_rows < self._max_rows, f"more than {self._max_rows} penalised slots"
        more = min(max(num_rows, FIRST_ROWS), self._max_rows - num_rows)
        self._answer = torch.cat([self._answer, self._answer.new_zeros(more, self._vocab_size)])
        self._prompt = torch.cat([self._prompt, self._prompt.new_zeros(more, self._vocab_size)])
        self._free.extend(range(num_rows, num_rows + more))
