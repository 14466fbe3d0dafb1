"""Tokens that a grammar forbids are given the logit -inf.

Bit v & 31 of word v >> 5 of a row's mask says that v may come. The words are those of llguidance and xgrammar. A row
without a grammar has no mask: its index is negative.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from pd.kernels.target import target_of
from pd.kernels.tuning import launch_of

# B rows of logits, V vocabulary, M masks, W words of a mask: ceil(V / 32)


@triton.jit
def _forbid(logits, masks, mask_of, logits_row, mask_row, num_vocab, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    own = tl.load(mask_of + row).to(tl.int64)
    if own < 0:
        return
    v = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    words = tl.load(masks + own * mask_row + (v >> 5), mask=v < num_vocab, other=-1)
    is_forbidden = ((words >> (v & 31)) & 1) == 0
    tl.store(logits + row * logits_row + v, float("-inf"), mask=is_forbidden & (v < num_vocab))


def grammar_mask(logits_BV: Tensor, masks_MW: Tensor, mask_of_B: Tensor) -> None:
    """Change logits in place. masks: int32; mask_of_B: int32, each row's mask, or negative. Unit stride in V and W."""
    num_rows, num_vocab = logits_BV.shape
    if masks_MW.shape[1] * 32 < num_vocab or mask_of_B.shape[0] != num_rows or masks_MW.dtype != torch.int32:
        raise ValueError(
            f"masks have {masks_MW.shape[1]} words of {masks_MW.dtype} for {num_vocab} tokens; "
            f"{mask_of_B.shape[0]} indices for {num_rows} rows"
        )
    if num_rows == 0:
        return
    target = target_of(logits_BV)
    launch = launch_of("vocabulary", target, num_vocab)
    _forbid[(num_rows, triton.cdiv(num_vocab, launch.block_n))](
        *(logits_BV, masks_MW, mask_of_B, logits_BV.stride(0), masks_MW.stride(0), num_vocab),
        BLOCK=launch.block_n,
        **launch.options(target),
    )


def reference(logits_BV: Tensor, masks_MW: Tensor, mask_of_B: Tensor) -> None:
    v = torch.arange(logits_BV.shape[1], device=logits_BV.device)
    for row, own in enumerate(mask_of_B.tolist()):
        if own >= 0:
            logits_BV[row, ((masks_MW[own, v >> 5] >> (v & 31)) & 1) == 0] = -torch.inf
