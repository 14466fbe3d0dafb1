"""(token, expert) pairs put in order of experts, each expert's padded to whole tiles: what a grouped GEMM walks.

Pair p = t K + k goes to expert ids[t, k]. Expert x takes tiles from sum_{y < x} ceil(count_y / M) on; within it pairs
keep their order, so the result is the same every time (no atomics). Places without a pair hold the number of pairs,
tiles without an expert hold -1. Everything is sized by the shapes alone: nothing is asked of the device.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from pd.kernels.target import target_of
from pd.kernels.tuning import launch_of

# T tokens, K experts a token, X experts, M rows of a tile, N tiles at most


@triton.jit(do_not_specialize=["num_pairs"])
def _count(ids, counts, num_pairs, BLOCK: tl.constexpr):
    expert = tl.program_id(0)
    found = tl.zeros((BLOCK,), tl.int32)
    for start in range(0, num_pairs, BLOCK):
        p = start + tl.arange(0, BLOCK)
        found += (tl.load(ids + p, mask=p < num_pairs, other=-1) == expert).to(tl.int32)
    tl.store(counts + expert, tl.sum(found, 0))


@triton.jit(do_not_specialize=["num_pairs", "num_tiles"])
def _place(
    ids, counts, pairs, experts, num_pairs, num_tiles,
    X: tl.constexpr, BLOCK_X: tl.constexpr, M: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The program after the last expert fills what no expert takes."""
    expert = tl.program_id(0)
    x = tl.arange(0, BLOCK_X)
    tiles = tl.cdiv(tl.load(counts + x, mask=x < X, other=0), M)
    first = tl.sum(tl.where(x < expert, tiles, 0), 0)
    own = tl.sum(tl.where(x == expert, tiles, 0), 0)
    if expert == X:
        own = num_tiles - first
    for start in range(0, own, BLOCK):
        n = start + tl.arange(0, BLOCK)
        tl.store(experts + first + n, tl.where(expert < X, expert, -1) + tl.zeros_like(n), mask=n < own)
    done = first * M
    for start in range(0, num_pairs, BLOCK):
        p = start + tl.arange(0, BLOCK)
        is_own = (tl.load(ids + p, mask=p < num_pairs, other=-1) == expert).to(tl.int32)
        tl.store(pairs + done + tl.cumsum(is_own, 0) - 1, p, mask=is_own != 0)
        done += tl.sum(is_own, 0)
    for start in range(done, (first + own) * M, BLOCK):
        n = start + tl.arange(0, BLOCK)
        tl.store(pairs + n, num_pairs + tl.zeros_like(n), mask=n < (first + own) * M)


def sort_pairs(ids_TK: Tensor, num_experts: int, tile: int) -> tuple[Tensor, Tensor]:
    """(pairs_NM, experts_N), int32: the pairs of each tile, and its expert. ids: int32, contiguous."""
    if ids_TK.dtype != torch.int32 or not ids_TK.is_contiguous():
        raise ValueError(f"expert ids are {ids_TK.dtype} with strides {ids_TK.stride()}, not rows of int32")
    num_pairs = ids_TK.numel()
    num_tiles = min(num_pairs, triton.cdiv(num_pairs, tile) + num_experts - 1) if num_pairs else 0
    pairs_NM = torch.empty(num_tiles, tile, dtype=torch.int32, device=ids_TK.device)
    experts_N = torch.empty(num_tiles, dtype=torch.int32, device=ids_TK.device)
    if num_tiles == 0:
        return pairs_NM, experts_N
    target = target_of(ids_TK)
    launch = launch_of("moe_sort", target, num_experts)
    counts_X = torch.empty(num_experts, dtype=torch.int32, device=ids_TK.device)
    _count[(num_experts,)](ids_TK, counts_X, num_pairs, BLOCK=launch.block_n, **launch.options(target))
    _place[(num_experts + 1,)](
        *(ids_TK, counts_X, pairs_NM, experts_N, num_pairs, num_tiles),
        X=num_experts,
        BLOCK_X=triton.next_power_of_2(num_experts),
        M=tile,
        BLOCK=launch.block_n,
        **launch.options(target),
    )
    return pairs_NM, experts_N


def reference(ids_TK: Tensor, num_experts: int, tile: int) -> tuple[Tensor, Tensor]:
    flat, num_pairs = ids_TK.flatten().tolist(), ids_TK.numel()
    num_tiles = min(num_pairs, -(-num_pairs // tile) + num_experts - 1) if num_pairs else 0
    pairs: list[int] = []
    experts: list[int] = []
    for expert in range(num_experts):
        own = [p for p, e in enumerate(flat) if e == expert]
        experts += [expert] * -(-len(own) // tile)
        pairs += own + [num_pairs] * (-len(own) % tile)
    experts += [-1] * (num_tiles - len(experts))
    pairs += [num_pairs] * (num_tiles * tile - len(pairs))
    return torch.tensor(pairs, dtype=torch.int32).view(-1, tile), torch.tensor(experts, dtype=torch.int32)
