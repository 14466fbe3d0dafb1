"""The least logit of each row that min_p, top_k and top_p let live, without a sort and without asking the host.

    min_p   z >= max z + log min_p
    top_k   z >= the kth largest
    top_p   of those that live so far: the mass strictly above z is below top_p times their mass

Floats map to integers of the same order (sign flipped, negative ones reversed), so the kth largest is the largest t
with |{key >= t}| >= k, and the nucleus' last is the largest t with mass(key >= t) >= top_p mass. Both are found a digit
of 4 bits at a time: 8 passes over the row, each counting (or weighing, in float64, so that no order of summation moves
the border) for 16 candidates at once. Tokens tied with the last survivor survive.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from pd.kernels.target import target_of
from pd.kernels.tuning import launch_of

# R rows, V vocabulary

DIGIT = 4  # bits


@triton.jit
def _key(z):
    bits = z.to(tl.uint32, bitcast=True)
    return tl.where((bits >> 31) != 0, bits ^ 0xFFFFFFFF, bits | 0x80000000)


@triton.jit
def _value(key):
    return tl.where((key >> 31) != 0, key & 0x7FFFFFFF, key ^ 0xFFFFFFFF).to(tl.float32, bitcast=True)


@triton.jit
def _largest(logits, num_vocab, wanted, best, floor, WEIGHED: tl.constexpr, DIGIT: tl.constexpr, BLOCK: tl.constexpr):
    """The largest key such that as many (or so much mass of those >= floor) as wanted stand at or above it."""
    candidates = tl.arange(0, 1 << DIGIT).to(tl.uint32)
    found = tl.zeros((1,), tl.uint32)
    for digit in range(32 // DIGIT):
        shift = tl.zeros((1,), tl.uint32) + (32 - DIGIT - digit * DIGIT)
        at_least = found + (candidates << shift)
        held = tl.zeros((1 << DIGIT,), tl.float64)
        for start in range(0, num_vocab, BLOCK):
            v = start + tl.arange(0, BLOCK)
            z = tl.load(logits + v, mask=v < num_vocab, other=float("-inf"))
            if WEIGHED:
                weight = tl.where((v < num_vocab) & (z >= floor), tl.exp(z - best), 0.0).to(tl.float64)
            else:
                weight = tl.where(v < num_vocab, 1.0, 0.0).to(tl.float64)
            is_above = _key(z)[:, None] >= at_least[None, :]
            held += tl.sum(tl.where(is_above, weight[:, None], 0.0), 0)
        # Fewer stand above a higher candidate: those that suffice are the first ones, the lowest always does.
        num_sufficing = tl.sum((held >= wanted).to(tl.int32), 0)
        last = tl.maximum(num_sufficing - 1, 0).to(tl.uint32)
        found += last << shift
    return tl.max(_value(found), 0)


@triton.jit
def _floor(logits, log_min_p, top_k, top_p, floors, logits_row, num_vocab, DIGIT: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    logits += row * logits_row
    keep, mass = tl.load(top_k + row), tl.load(top_p + row)
    peak = tl.full((BLOCK,), float("-inf"), tl.float32)
    for start in range(0, num_vocab, BLOCK):
        v = start + tl.arange(0, BLOCK)
        peak = tl.maximum(peak, tl.load(logits + v, mask=v < num_vocab, other=float("-inf")))
    best = tl.max(peak, 0)
    floor = best + tl.load(log_min_p + row)
    if keep < num_vocab:
        floor = tl.maximum(floor, _largest(logits, num_vocab, keep.to(tl.float64), best, floor, False, DIGIT, BLOCK))
    if mass < 1.0:
        whole = tl.zeros((BLOCK,), tl.float64)
        for start in range(0, num_vocab, BLOCK):
            v = start + tl.arange(0, BLOCK)
            z = tl.load(logits + v, mask=v < num_vocab, other=float("-inf"))
            whole += tl.where((v < num_vocab) & (z >= floor), tl.exp(z - best), 0.0).to(tl.float64)
        enough = tl.sum(whole, 0) * mass.to(tl.float64)
        nucleus = _largest(logits, num_vocab, enough, best, floor, True, DIGIT, BLOCK)
        floor = tl.maximum(floor, tl.where(enough > 0, nucleus, best))
    tl.store(floors + row, floor)


def floors(logits_RV: Tensor, min_p_R: Tensor, top_k_R: Tensor, top_p_R: Tensor) -> Tensor:
    """floor_R, float32: tokens at or above it live. -inf for a row that filters nothing.

    logits: float32, temperature applied, unit stride in V. min_p: 0 for none; top_k: int32, V or more for none; top_p:
    1 for none. Reads nothing on the host.
    """
    num_rows, num_vocab = logits_RV.shape
    if logits_RV.dtype != torch.float32 or not min_p_R.shape == top_k_R.shape == top_p_R.shape == (num_rows,):
        raise ValueError(f"{num_rows} rows of {logits_RV.dtype}; {len(min_p_R)} min_p, {len(top_k_R)}, {len(top_p_R)}")
    floor_R = torch.empty(num_rows, dtype=torch.float32, device=logits_RV.device)
    if num_rows == 0:
        return floor_R
    target = target_of(logits_RV)
    launch = launch_of("floors", target, num_vocab)
    _floor[(num_rows,)](
        *(logits_RV, min_p_R.log(), top_k_R, top_p_R, floor_R, logits_RV.stride(0), num_vocab),
        DIGIT=DIGIT,
        BLOCK=launch.block_n,
        **launch.options(target),
    )
    return floor_R


def reference(logits_RV: Tensor, min_p_R: Tensor, top_k_R: Tensor, top_p_R: Tensor) -> Tensor:
    """A row at a time, by sorting."""
    rows = []
    for z_V, min_p, top_k, top_p in zip(logits_RV, min_p_R, top_k_R.tolist(), top_p_R, strict=True):
        sorted_V = z_V.sort(descending=True).values
        floor = sorted_V[0] + min_p.log()
        if top_k < len(z_V):
            floor = torch.maximum(floor, sorted_V[top_k - 1])
        if top_p < 1:
            weight_V = torch.where(sorted_V >= floor, (sorted_V - sorted_V[0]).exp(), 0.0).double()
            above_V = weight_V.cumsum(0) - weight_V
            kept_V = sorted_V[above_V < weight_V.sum() * top_p.double()]
            floor = torch.maximum(floor, kept_V[-1] if len(kept_V) else sorted_V[0])
        rows.append(floor)
    return torch.stack(rows) if rows else logits_RV.new_empty(0)
