"""Each (token, expert) pair's row times its expert's weight, and the sum of a token's pairs: the two halves of MoE.

    out[p] = x[p // rows_a_token] @ w[expert of p]^T           out[t] = sum_k weight[t, k] y[t K + k]

Tiles are those of `moe_sort`: rows of one expert, gathered where they stand and scattered back to the pair's own place,
so nothing is permuted in memory. Sums are float32.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from pd.kernels.target import target_of
from pd.kernels.tuning import launch_of

# T tokens, K experts a token, P = T K pairs, X experts, I inputs, O outputs, N tiles of M rows


@triton.jit(do_not_specialize=["num_pairs"])
def _grouped_gemm(
    x, w, pairs, experts, out, num_pairs, num_out, num_in, share, x_row, w_expert, w_row, out_row,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(1)
    expert = tl.load(experts + tile).to(tl.int64)
    if expert < 0:
        return
    pair = tl.load(pairs + tile * BLOCK_M + tl.arange(0, BLOCK_M))
    is_pair = pair < num_pairs
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    i = tl.arange(0, BLOCK_K)
    x_at = x + ((pair // share).to(tl.int64) * x_row)[:, None] + i[None, :]
    w_at = w + expert * w_expert + (n.to(tl.int64) * w_row)[None, :] + i[:, None]
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, num_in, BLOCK_K):
        is_in = start + i < num_in
        a = tl.load(x_at + start, mask=is_pair[:, None] & is_in[None, :], other=0)
        b = tl.load(w_at + start, mask=is_in[:, None] & (n < num_out)[None, :], other=0)
        acc = tl.dot(a, b, acc, input_precision="ieee")
    at = out + (pair.to(tl.int64) * out_row)[:, None] + n[None, :]
    tl.store(at, acc.to(out.dtype.element_ty), mask=is_pair[:, None] & (n < num_out)[None, :])


@triton.jit
def _combine(y, weights, out, num_out, K: tl.constexpr, BLOCK: tl.constexpr):
    t = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    acc = tl.zeros((BLOCK,), tl.float32)
    for k in tl.static_range(K):
        part = tl.load(y + (t * K + k) * num_out + n, mask=n < num_out, other=0).to(tl.float32)
        acc += part * tl.load(weights + t * K + k)
    tl.store(out + t * num_out + n, acc.to(out.dtype.element_ty), mask=n < num_out)


def tile_rows(num_pairs: int, num_experts: int, like: Tensor) -> int:
    """Rows of a tile for `sort_pairs`: few where an expert gets few pairs."""
    launch = launch_of("grouped_gemm", target_of(like), triton.cdiv(num_pairs, num_experts))
    return launch.block_m


def grouped_gemm(
    x: Tensor,
    w_XOI: Tensor,
    sorted_pairs: tuple[Tensor, Tensor],
    *,
    num_pairs: int,
    share: int,
    out: Tensor | None = None,
) -> Tensor:
    """out_PO. x: [P // share, I], pair p's row is p // share: `share` is K for the first product, 1 for the second.

    sorted_pairs: what `sort_pairs` gave. Unit stride in I. Raises ValueError where shapes do not fit.
    """
    pairs_NM, experts_N = sorted_pairs
    num_experts, num_out, num_in = w_XOI.shape
    if x.shape != (num_pairs // share, num_in) or x.dtype != w_XOI.dtype or num_pairs % share:
        raise ValueError(f"{num_pairs} pairs, {share} a row; x {tuple(x.shape)} {x.dtype}, w {tuple(w_XOI.shape)}")
    if (x.numel() and x.stride(1) != 1) or w_XOI.stride(2) != 1:
        raise ValueError(f"strides {x.stride()} and {w_XOI.stride()}: the last must be 1")
    out = x.new_empty(num_pairs, num_out) if out is None else out
    if num_pairs == 0:
        return out
    target = target_of(x)
    launch = launch_of("grouped_gemm", target, triton.cdiv(num_pairs, num_experts))
    if pairs_NM.shape[1] != launch.block_m:
        launch = launch._replace(block_m=pairs_NM.shape[1])
    _grouped_gemm[(triton.cdiv(num_out, launch.block_n), len(experts_N))](
        *(x, w_XOI, pairs_NM, experts_N, out, num_pairs, num_out, num_in, share),
        *(x.stride(0), w_XOI.stride(0), w_XOI.stride(1), out.stride(0)),
        BLOCK_M=launch.block_m,
        BLOCK_N=launch.block_n,
        BLOCK_K=launch.block_k,
        **launch.options(target),
    )
    return out


def combine(y_PO: Tensor, weights_TK: Tensor) -> Tensor:
    """out_TO: each token's pairs, weighted and summed. y: contiguous; weights: float32."""
    (num_tokens, num_chosen), num_out = weights_TK.shape, y_PO.shape[1]
    if len(y_PO) != num_tokens * num_chosen or not y_PO.is_contiguous():
        raise ValueError(f"{len(y_PO)} pairs for weights {tuple(weights_TK.shape)}")
    out = y_PO.new_empty(num_tokens, num_out)
    if out.numel() == 0:
        return out
    target = target_of(y_PO)
    launch = launch_of("silu_mul", target, num_out)
    block = min(launch.block_n, triton.next_power_of_2(num_out))
    _combine[(num_tokens, triton.cdiv(num_out, block))](
        *(y_PO, weights_TK, out, num_out), K=num_chosen, BLOCK=block, **launch.options(target)
    )
    return out


def reference(x: Tensor, w_XOI: Tensor, ids_TK: Tensor, *, share: int) -> Tensor:
    """out_PO in float64."""
    rows = x.double().repeat_interleave(share, 0)
    return torch.einsum("pi,poi->po", rows, w_XOI.double()[ids_TK.flatten().long()])
