"""The draw: one token a row, the largest of logit plus noise that is a function of (seed, position, token id) alone.

    word  = word (id & 3) of Philox4x32-7(counter = (id >> 2, position, 0, 0), key = seed)
    u     = float32(word) 2^-32 + 2^-33, at most 1 - 2^-24        e = -log1p(-u)
    score = logit - log(e)      over the logits at or above the row's floor; the lowest id on ties

so a token wins with its softmax probability (exponential race, or Gumbel-max: Maddison et al. 2014). Philox: Salmon et
al. 2011. log1p(-u) is log(w) (-u) / (w - 1) with w = 1 - u rounded, which restores what the rounding lost (Kahan).

A row's best is found in two launches: of each stretch of the vocabulary, then of those. Without noise it is argmax.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from pd.kernels.target import target_of
from pd.kernels.tuning import launch_of

# R rows, V vocabulary, N stretches of it

ROUNDS = 7


@triton.jit
def _noise(seed, position, start, ROUNDS: tl.constexpr, BLOCK: tl.constexpr):
    """log(e) of ids [start, start + BLOCK), start a multiple of 4."""
    calls = (start // 4 + tl.arange(0, BLOCK // 4)).to(tl.uint32)
    zero = tl.zeros_like(calls)
    w0, w1, w2, w3 = tl.philox(seed, calls, zero + position.to(tl.uint32), zero, zero, n_rounds=ROUNDS)
    words = tl.reshape(tl.join(tl.join(w0, w2), tl.join(w1, w3)), (BLOCK,))
    u = tl.minimum(words.to(tl.float32) * 2.3283064365386963e-10 + 1.1641532182693481e-10, 1.0 - 2.0**-24)
    w = 1.0 - u
    lost = tl.where(w == 1.0, 1.0, tl.log(w) / tl.where(w == 1.0, 1.0, w - 1.0))
    return tl.log(tl.where(w == 1.0, u, u * lost))


@triton.jit
def _stretch(
    logits, floors, seeds, positions, part_score, part_id, logits_row, num_vocab, num_stretches,
    NOISY: tl.constexpr, ROUNDS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row, stretch = tl.program_id(0).to(tl.int64), tl.program_id(1)
    v = stretch * BLOCK + tl.arange(0, BLOCK)
    z = tl.load(logits + row * logits_row + v, mask=v < num_vocab, other=float("-inf")).to(tl.float32)
    if NOISY:
        noise = _noise(tl.load(seeds + row), tl.load(positions + row), stretch * BLOCK, ROUNDS, BLOCK)
        z = tl.where(z >= tl.load(floors + row), z - noise, float("-inf"))
    best, at = tl.max(z, 0, return_indices=True)
    tl.store(part_score + row * num_stretches + stretch, best)
    tl.store(part_id + row * num_stretches + stretch, stretch * BLOCK + at)


@triton.jit
def _first(part_score, part_id, ids, num_stretches, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    n = tl.arange(0, BLOCK)
    score = tl.load(part_score + row * num_stretches + n, mask=n < num_stretches, other=float("-inf"))
    _, at = tl.max(score, 0, return_indices=True)
    tl.store(ids + row, tl.load(part_id + row * num_stretches + at).to(tl.int64))


def race(logits_RV: Tensor, floor_R: Tensor, seed_R: Tensor, position_R: Tensor) -> Tensor:
    """Draw one id a row, int64, from softmax over the logits that are at least the row's floor. Changes nothing.

    logits, floors: float32, -inf for no floor; seeds: int64, the bits of the unsigned seed; positions: integers.
    """
    if not len(floor_R) == len(seed_R) == len(position_R) == len(logits_RV):
        raise ValueError(f"{len(logits_RV)} rows; {len(floor_R)} floors, {len(seed_R)} seeds, {len(position_R)}")
    return _best(logits_RV, (floor_R, seed_R, position_R))


def argmax(logits_RV: Tensor) -> Tensor:
    """The largest of each row, the lowest index on ties. int64. Any float dtype."""
    return _best(logits_RV, None)


def _best(logits_RV: Tensor, dice: tuple[Tensor, Tensor, Tensor] | None) -> Tensor:
    num_rows, num_vocab = logits_RV.shape
    ids_R = torch.empty(num_rows, dtype=torch.int64, device=logits_RV.device)
    if num_rows == 0:
        return ids_R
    target = target_of(logits_RV)
    launch = launch_of("vocabulary", target, num_vocab)
    num_stretches = triton.cdiv(num_vocab, launch.block_n)
    score_RN = torch.empty(num_rows, num_stretches, dtype=torch.float32, device=logits_RV.device)
    id_RN = torch.empty(num_rows, num_stretches, dtype=torch.int32, device=logits_RV.device)
    _stretch[(num_rows, num_stretches)](
        *(logits_RV, *(dice or (ids_R, ids_R, ids_R)), score_RN, id_RN, logits_RV.stride(0), num_vocab, num_stretches),
        NOISY=dice is not None,
        ROUNDS=ROUNDS,
        BLOCK=launch.block_n,
        enable_fp_fusion=False,
        **launch.options(target),
    )
    _first[(num_rows,)](score_RN, id_RN, ids_R, num_stretches, BLOCK=triton.next_power_of_2(num_stretches))
    return ids_R


def noise_reference(seed_R: Tensor, position_R: Tensor, num_vocab: int) -> Tensor:
    """log(e)_RV, in float64 from the uniform on."""
    c0 = torch.arange((num_vocab + 3) // 4, device=seed_R.device).expand(len(seed_R), -1)
    c1, c2, c3 = position_R[:, None].expand_as(c0), torch.zeros_like(c0), torch.zeros_like(c0)
    k0, k1 = (seed_R & 0xFFFFFFFF)[:, None], ((seed_R >> 32) & 0xFFFFFFFF)[:, None]
    for _ in range(ROUNDS):
        p0, p1 = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        high0, high1 = p0 >> 32 & 0xFFFFFFFF, p1 >> 32 & 0xFFFFFFFF
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, p1 & 0xFFFFFFFF, high0 ^ c3 ^ k1, p0 & 0xFFFFFFFF
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
    word_RV = torch.stack((c0, c1, c2, c3), dim=-1).flatten(1)[:, :num_vocab]
    uniform_RV = (word_RV.to(torch.float32) * 2.0**-32).add_(2.0**-33).clamp_(max=1 - 2.0**-24)
    return (-torch.log1p(-uniform_RV.double())).log()


def reference(logits_RV: Tensor, floor_R: Tensor, seed_R: Tensor, position_R: Tensor) -> Tensor:
    score_RV = logits_RV.double() - noise_reference(seed_R, position_R, logits_RV.shape[1])
    return score_RV.masked_fill(logits_RV < floor_R[:, None], -torch.inf).argmax(dim=-1)
