"""Steps that do nothing, of every kind that serving launches: what they need is compiled before a request waits for it.

A kernel is compiled once for each set of sizes that it is specialized for, half a second to two each; in service
everyone's answers would stand still meanwhile. And the largest step shows at the start that memory suffices for it.

Rules
1. All of it is padding: page -1 is not written and a context of 0 is not read, so the pool stays as it is.
2. Decode attention is specialized for the number of splits, powers of two, which grows with the page table's width:
   one step for each. Experts' products are for how many tokens an expert gets: so prefill of several sizes.
"""

from __future__ import annotations

import dataclasses

import torch

from pd.runtime.engine.graphs import padding
from pd.runtime.engine.inputs import Ragged, StepInputs

SPLIT_TOKENS, MAX_SPLITS = 256, 64
"""As `pd.kernels.paged_decode` has them; more or less of it would compile a kernel too many, or too late."""


def idle_steps(max_context: int, page_size: int, max_tokens: int, device: torch.device) -> list[StepInputs]:
    """Decode over contexts of each number of splits up to `max_context` tokens; then prefill of up to `max_tokens`."""
    most = max(1, min(MAX_SPLITS, max_context // SPLIT_TOKENS))
    contexts = [min(max_context, SPLIT_TOKENS << i) for i in range(most.bit_length())]
    decodes = [padding(1, -(-context // page_size), device) for context in contexts]
    sizes = [size for i in range(0, max_tokens.bit_length(), 2) if (size := max_tokens >> i) >= 16] or [max_tokens]
    return [*decodes, *(_prefill(size, device) for size in reversed(sizes))]


def _prefill(num_tokens: int, device: torch.device) -> StepInputs:
    """One chunk of `num_tokens`, whose positions all lie before the first token: none of them sees anything."""
    step = padding(num_tokens, 1, device)
    first_row_B1 = torch.tensor([0, num_tokens], dtype=torch.int32, device=device)
    ragged = Ragged(first_row_B1, torch.zeros(1, dtype=torch.int32, device=device), step.table_BL[:1])
    return dataclasses.replace(step, num_single=0, ragged=ragged)
