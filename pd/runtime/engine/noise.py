"""Random choice whose dice are a function of (seed, position, token id) and nothing else.

The noise, exactly, so that any kernel can repeat it in 32-bit integer arithmetic:

1. Philox4x32 with 7 rounds (Salmon, Moraes, Dror, Shaw: "Parallel Random Numbers: As Easy as 1, 2, 3", SC
   2011, which names 7 as the fewest rounds that pass BigCrush), constants and word order of the authors'
   Random123. counter = (token id >> 2, position, 0, 0), key = (seed low word, seed high word); the token
   takes word `token id & 3` of the result. Seeds are taken modulo 2**64. In Triton: `tl.philox(seed, c0,
   c1, 0, 0, n_rounds=7)`.
2. u = float32(word) * 2**-32 + 2**-33, in float32, at most 1 - 2**-24: uniform in (0, 1). float32(word)
   rounds to nearest even, the product is exact, the sum rounds once: fused or not, the same bits.
3. e = -log1p(-u): exponential with mean 1; small ones, which win races, keep their relative precision.
4. score = logit - log(e). The largest score wins, the lowest id on ties: a token wins with its softmax
   probability (the exponential race, or Gumbel-max trick; Maddison, Tarlow, Minka: "A* Sampling", 2014,
   section 2).

Seven rounds instead of ten save a third of the only O(vocabulary) work of a sampled row.
"""

from __future__ import annotations

import torch
from torch import Tensor

# R rows to sample, V vocabulary, W philox calls a row: ceil(V / 4)

NUM_ROUNDS = 7
MULTIPLIER = (0xD2511F53, 0xCD9E8D57)
WEYL = (0x9E3779B9, 0xBB67AE85)
MASK = 0xFFFFFFFF
MAX_UNIFORM = 1 - 2.0**-24
MAX_NOISE = 22.88
"""No score exceeds its logit by more: -log(2**-33) = 22.874."""


def philox(counter: tuple[Tensor, Tensor], key: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
    """The four words of Philox4x32-7 at counter (c0, c1, 0, 0).

    All words are int64 tensors in [0, 2**32), broadcast against each other.
    """
    c0, c1 = counter
    c2 = c3 = torch.zeros_like(c0)
    k0, k1 = key
    for _ in range(NUM_ROUNDS):
        # int64 products wrap to the same 64 bits as unsigned ones; `& MASK` undoes the shift's sign.
        product0, product1 = c0 * MULTIPLIER[0], c2 * MULTIPLIER[1]
        c0, c1, c2, c3 = (
            ((product1 >> 32) & MASK) ^ c1 ^ k0,
            product1 & MASK,
            ((product0 >> 32) & MASK) ^ c3 ^ k1,
            product0 & MASK,
        )
        k0, k1 = (k0 + WEYL[0]) & MASK, (k1 + WEYL[1]) & MASK
    return c0, c1, c2, c3


def exponential(seed_R: Tensor, position_R: Tensor, vocab_size: int) -> Tensor:
    """The race times e_RV, float32, of steps 1 to 3. Seeds are int64 bit patterns of the unsigned 64-bit
    seed."""
    calls_W = torch.arange((vocab_size + 3) // 4, device=seed_R.device)
    key = ((seed_R & MASK)[:, None], ((seed_R >> 32) & MASK)[:, None])
    words = philox((calls_W, position_R[:, None]), key)
    word_RV = torch.stack(words, dim=-1).flatten(1)[:, :vocab_size]
    uniform_RV = (word_RV.to(torch.float32) * 2.0**-32).add_(2.0**-33).clamp_(max=MAX_UNIFORM)
    return uniform_RV.neg_().log1p_().neg_()


def race(logits_RV: Tensor, floor_R: Tensor, seed_R: Tensor, position_R: Tensor) -> Tensor:
    """Draw one id a row, int64, from softmax over the logits that are at least the row's floor.

    logits_RV: float32; floor_R: float32, -inf for no floor; seed_R, position_R: int64. Changes none of them.
    """
    noise_RV = exponential(seed_R, position_R, logits_RV.shape[1]).log_()
    score_RV = torch.sub(logits_RV, noise_RV, out=noise_RV)
    score_RV.masked_fill_(logits_RV < floor_R[:, None], -torch.inf)
    return score_RV.argmax(dim=-1)
