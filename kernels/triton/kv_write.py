"""A step's new K and V into their pages, rotated on the way where the model rotates.

    page[pages[t], head, offsets[t]] = x[t, head]                                     kv_write
    the same of k turned by its position's angle, q turned in place                    rope_and_write

        turned[d] = low[d] cos[d] - high[d] sin[d]    turned[d + D] = high[d] cos[d] + low[d] sin[d]

Element d pairs with d + D (Su et al. 2021, in the halves of GPT-NeoX and Hugging Face); elements from 2D on pass as
they are. One launch reads the projection once and writes once; K is never stored unrotated. In a float8 pool (its bits)
a value is divided by the scale and rounded to e4m3fn.

A token whose page is negative is not written: the padding of a captured step.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from pd.kernels import e4m3
from pd.kernels.paged import as_bits
from pd.kernels.target import target_of
from pd.kernels.tuning import launch_of

# T tokens, H query heads, K kv heads, E head size, F of a value, D pairs that are rotated, P pages, S tokens a page


@triton.jit
def _put(x, at, mask, scale, E4M3: tl.constexpr):
    """Store float32 values in the pool's dtype."""
    if E4M3:
        tl.store(at, e4m3.narrow(x / scale), mask=mask)
    else:
        tl.store(at, x.to(at.dtype.element_ty), mask=mask)


@triton.jit
def _copy(
    x, pool, page_of, offset_of, x_row, x_head, page_stride, head_stride, token_stride, scale, num_heads,
    E: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_E: tl.constexpr, E4M3: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0)
    page = tl.load(page_of + t).to(tl.int64)
    offset = tl.load(offset_of + t).to(tl.int64)
    h = (tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)).to(tl.int64)
    e = tl.arange(0, BLOCK_E)
    mask = (h < num_heads)[:, None] & (e < E)[None, :] & (page >= 0)
    values = tl.load(x + t.to(tl.int64) * x_row + (h * x_head)[:, None] + e[None, :], mask=mask, other=0)
    at = pool + page * page_stride + offset * token_stride + (h * head_stride)[:, None] + e[None, :]
    _put(values.to(tl.float32), at, mask, scale, E4M3)


@triton.jit
def _rope_and_copy(
    q, k, cos, sin, pool, page_of, offset_of, q_row, q_head, k_row, k_head, angle_row, page_stride, head_stride,
    token_stride, scale, num_query, num_kv,
    D: tl.constexpr, E: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_REST: tl.constexpr,
    E4M3: tl.constexpr,
):  # fmt: skip
    """Heads 0 to num_query are q's, turned in place; those after are k's, turned into the pool."""
    t = tl.program_id(0)
    page = tl.load(page_of + t).to(tl.int64)
    offset = tl.load(offset_of + t).to(tl.int64)
    h = (tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)).to(tl.int64)
    is_query = h < num_query
    is_key = (h >= num_query) & (h < num_query + num_kv) & (page >= 0)
    own = h - num_query
    d = tl.arange(0, BLOCK_D)
    q_mask, k_mask = is_query[:, None] & (d < D)[None, :], is_key[:, None] & (d < D)[None, :]
    q_at = q + t.to(tl.int64) * q_row + (h * q_head)[:, None] + d[None, :]
    k_at = k + t.to(tl.int64) * k_row + (own * k_head)[:, None] + d[None, :]
    to = pool + page * page_stride + offset * token_stride + (own * head_stride)[:, None] + d[None, :]
    turn = tl.load(cos + t * angle_row + d, mask=d < D, other=0.0)[None, :]
    lift = tl.load(sin + t * angle_row + d, mask=d < D, other=0.0)[None, :]
    q_low = tl.load(q_at, mask=q_mask, other=0).to(tl.float32)
    q_high = tl.load(q_at + D, mask=q_mask, other=0).to(tl.float32)
    tl.store(q_at, (q_low * turn - q_high * lift).to(q.dtype.element_ty), mask=q_mask)
    tl.store(q_at + D, (q_high * turn + q_low * lift).to(q.dtype.element_ty), mask=q_mask)
    low = tl.load(k_at, mask=k_mask, other=0).to(tl.float32)
    high = tl.load(k_at + D, mask=k_mask, other=0).to(tl.float32)
    # Rounded as k itself would be, so that a float8 pool holds the same as rotating first and writing then.
    _put((low * turn - high * lift).to(k.dtype.element_ty).to(tl.float32), to, k_mask, scale, E4M3)
    _put((high * turn + low * lift).to(k.dtype.element_ty).to(tl.float32), to + D, k_mask, scale, E4M3)
    if E > 2 * D:
        r = 2 * D + tl.arange(0, BLOCK_REST)
        mask = is_key[:, None] & (r < E)[None, :]
        rest = tl.load(k + t.to(tl.int64) * k_row + (own * k_head)[:, None] + r[None, :], mask=mask, other=0)
        to = pool + page * page_stride + offset * token_stride + (own * head_stride)[:, None] + r[None, :]
        _put(rest.to(tl.float32), to, mask, scale, E4M3)


def kv_write(x_TKE: Tensor, pool_PKSE: Tensor, *, pages_T: Tensor, offsets_T: Tensor, scale: float = 1.0) -> None:
    """Write K, or V, or MLA's latent, into its places in one layer of the pool. Unit stride in E, else any."""
    _check_place(x_TKE, pool_PKSE, pages_T, offsets_T)
    num_tokens, num_heads, size = x_TKE.shape
    if num_tokens == 0 or num_heads == 0:
        return
    pool = as_bits(pool_PKSE)
    target = target_of(x_TKE)
    launch = launch_of("kv_write", target, num_heads)
    block_h = min(launch.block_m, triton.next_power_of_2(num_heads))
    _copy[(num_tokens, triton.cdiv(num_heads, block_h))](
        *(x_TKE, pool, pages_T, offsets_T, *x_TKE.stride()[:2], *pool.stride()[:3], scale, num_heads),
        E=size,
        BLOCK_H=block_h,
        BLOCK_E=triton.next_power_of_2(size),
        E4M3=pool.dtype is torch.uint8,
        **launch.options(target),
    )


def rope_and_write(
    qkv: tuple[Tensor, Tensor, Tensor],
    angles: tuple[Tensor, Tensor],
    pools: tuple[Tensor, Tensor],
    *,
    pages_T: Tensor,
    offsets_T: Tensor,
    scales: tuple[float, float] = (1.0, 1.0),
) -> None:
    """Turn q in place; write turned k, and v, into their places in one layer of the pool.

    qkv: q_THE, k_TKE, v_TKF, unit stride in the last dim, else any. Only q is changed. angles: cos_TD, sin_TD, float32.
    pools: k_PKSE, v_PKSF. pages_T, offsets_T: integers; token t goes to (page, offset in page), nowhere if the page
    is negative. Raises ValueError where shapes do not fit.
    """
    q_THE, k_TKE, v_TKF = qkv
    cos_TD, sin_TD = angles
    _check_place(k_TKE, pools[0], pages_T, offsets_T)
    if q_THE.shape[0] != k_TKE.shape[0] or q_THE.shape[-1] != k_TKE.shape[-1] or q_THE.stride(-1) != 1:
        raise ValueError(f"queries {tuple(q_THE.shape)} do not go with keys {tuple(k_TKE.shape)}")
    if cos_TD.shape != sin_TD.shape or cos_TD.stride() != sin_TD.stride() or 2 * cos_TD.shape[1] > q_THE.shape[-1]:
        raise ValueError(f"angles {tuple(cos_TD.shape)}, {tuple(sin_TD.shape)} for heads of {q_THE.shape[-1]} elements")
    kv_write(v_TKF, pools[1], pages_T=pages_T, offsets_T=offsets_T, scale=scales[1])
    num_tokens, num_heads = q_THE.shape[0], q_THE.shape[1] + k_TKE.shape[1]
    if num_tokens == 0:
        return
    pool = as_bits(pools[0])
    half, size = cos_TD.shape[1], k_TKE.shape[-1]
    target = target_of(q_THE)
    launch = launch_of("kv_write", target, num_heads)
    block_h = min(launch.block_m, triton.next_power_of_2(num_heads))
    _rope_and_copy[(num_tokens, triton.cdiv(num_heads, block_h))](
        *(q_THE, k_TKE, cos_TD, sin_TD, pool, pages_T, offsets_T, *q_THE.stride()[:2], *k_TKE.stride()[:2]),
        *(cos_TD.stride(0), *pool.stride()[:3], scales[0], q_THE.shape[1], k_TKE.shape[1]),
        D=half,
        E=size,
        BLOCK_H=block_h,
        BLOCK_D=triton.next_power_of_2(half),
        BLOCK_REST=triton.next_power_of_2(max(size - 2 * half, 1)),
        E4M3=pool.dtype is torch.uint8,
        **launch.options(target),
    )


def _check_place(x_TKE: Tensor, pool_PKSE: Tensor, pages_T: Tensor, offsets_T: Tensor) -> None:
    faults = []
    if (x_TKE.shape[1], x_TKE.shape[2]) != (pool_PKSE.shape[1], pool_PKSE.shape[3]):
        faults.append(f"heads are {tuple(x_TKE.shape[1:])}, the pool's {(pool_PKSE.shape[1], pool_PKSE.shape[3])}")
    if pages_T.shape != x_TKE.shape[:1] or offsets_T.shape != x_TKE.shape[:1]:
        faults.append(f"{x_TKE.shape[0]} tokens, {pages_T.numel()} pages and {offsets_T.numel()} offsets")
    if x_TKE.numel() and (x_TKE.stride(-1) != 1 or pool_PKSE.stride(-1) != 1):
        faults.append("the last dim of tokens and pool must have stride 1")
    if pool_PKSE.dtype not in (x_TKE.dtype, torch.uint8, torch.float8_e4m3fn):
        faults.append(f"tokens are {x_TKE.dtype}, the pool {pool_PKSE.dtype}")
    if faults:
        raise ValueError("; ".join(faults))


def reference(x_TKE: Tensor, pool_PKSE: Tensor, *, pages_T: Tensor, offsets_T: Tensor, scale: float = 1.0) -> None:
    """`kv_write` in PyTorch."""
    kept_T = pages_T >= 0
    pages, offsets, x = pages_T[kept_T].long(), offsets_T[kept_T].long(), x_TKE[kept_T]
    pool = as_bits(pool_PKSE)
    pool[pages, :, offsets] = e4m3.reference(x.float() / scale) if pool.dtype is torch.uint8 else x.to(pool.dtype)


def rope_reference(x_THE: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
    """x turned, in float64."""
    cos_T1D, sin_T1D = (a.double()[:, None] for a in angles)
    half = cos_T1D.shape[-1]
    low, high, rest = x_THE.double().split_with_sizes((half, half, x_THE.shape[-1] - 2 * half), dim=-1)
    return torch.cat((low * cos_T1D - high * sin_T1D, high * cos_T1D + low * sin_T1D, rest), dim=-1)
