"""Multi-head latent attention, absorbed: all heads attend to one latent a token, which is key and value at once.

    s_n = scale (q_latent . c_n + q_rope . k_n)        out = sum_n softmax_n(s) c_n

c_n [R] is the token's latent, k_n [D] its rotated key, stored side by side in a page (K = 1, E = R + D); q_latent is
the query times the up-projection of keys, and what comes out goes through that of values (DeepSeek-V2, 2024, section
2.1.2 and appendix C). A tile's rows are (token, head) pairs in order, so that decode, verification and prefill are one
kernel: 128 heads of one token fill tiles as well as 128 tokens would, and each latent is loaded once a tile for both
products.

Decode splits contexts as `paged_decode` does.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from pd.kernels.attend import as_query, load_tokens
from pd.kernels.paged import LOG2_E, Pages, as_bits, gather
from pd.kernels.paged_decode import merge, plan_splits
from pd.kernels.paged_prefill import find_request
from pd.kernels.target import MIN_DOT, target_of
from pd.kernels.tuning import launch_of

# T rows of queries, B requests, H heads, R latent elements, D rotated ones, E = R + D, C splits


@triton.jit
def _latent_span(
    latent, rope, positions, begin, end, kv, table, page_stride, token_stride, scale,
    PAGE: tl.constexpr, R: tl.constexpr, D: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr,
    BLOCK_D: tl.constexpr, E4M3: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """The online softmax of `attend`, keys and values being one tile. Returns the normed share and its log-sum-exp."""
    acc = tl.zeros((latent.shape[0], BLOCK_R), tl.float32)
    peak = tl.full((latent.shape[0],), float("-inf"), tl.float32)
    total = tl.zeros((latent.shape[0],), tl.float32)
    r = tl.arange(0, BLOCK_R)
    d = tl.arange(0, BLOCK_D)
    for start in range(begin, end, BLOCK_N):
        tokens = start + tl.arange(0, BLOCK_N)
        is_there = tokens < end
        at = load_tokens(kv, table, tokens, is_there, page_stride, token_stride, PAGE)
        c = tl.load(at[:, None] + r[None, :], mask=is_there[:, None] & (r < R)[None, :], other=0)
        k = tl.load(at[None, :] + R + d[:, None], mask=is_there[None, :] & (d < D)[:, None], other=0)
        c = as_query(c, latent, E4M3, NATIVE)
        scores = tl.dot(rope, as_query(k, rope, E4M3, NATIVE), input_precision="ieee")
        scores = tl.dot(latent, tl.trans(c), scores, input_precision="ieee") * scale
        seen = is_there[None, :] & (tokens[None, :] <= positions[:, None])
        scores = tl.where(seen, scores, float("-inf"))
        higher = tl.maximum(peak, tl.max(scores, 1))
        base = tl.where(higher == float("-inf"), 0.0, higher)
        decay = tl.exp2(peak - base)
        weights = tl.exp2(scores - base[:, None])
        acc = tl.dot(weights.to(latent.dtype), c, acc * decay[:, None], input_precision="ieee")
        total = total * decay + tl.sum(weights, 1)
        peak = higher
    filled = tl.where(total > 0, total, 1.0)
    return acc / filled[:, None], tl.where(total > 0, peak + tl.log2(filled), float("-inf"))


@triton.jit(do_not_specialize=["num_requests", "table_row"])
def _mla(
    q, kv, table, first_row, lengths, out, part, part_lse, num_requests, num_heads, q_row, q_head, page_stride,
    token_stride, table_row, out_row, out_head, scale, v_scale,
    SPLITS: tl.constexpr, PAGE: tl.constexpr, R: tl.constexpr, D: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_D: tl.constexpr, E4M3: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    tile, split = tl.program_id(0), tl.program_id(1)
    request = find_request(first_row, num_requests, num_heads, tile, BLOCK_M)
    row_from = tl.load(first_row + request)
    num_new = tl.load(first_row + request + 1) - row_from
    pair = (tile - row_from * num_heads // BLOCK_M - request) * BLOCK_M + tl.arange(0, BLOCK_M)
    length = tl.load(lengths + request)
    token, head = pair // num_heads, pair % num_heads
    is_row = token < num_new
    positions = tl.where(is_row, length - num_new + token, -1)
    row = (row_from + token).to(tl.int64)
    end = tl.max(positions, 0) + 1
    span = tl.cdiv(tl.cdiv(end, BLOCK_N), SPLITS) * BLOCK_N
    begin = split * span
    at = (row * num_heads + head) * SPLITS + split
    if begin >= end and SPLITS > 1:
        tl.store(part_lse + at, tl.full((BLOCK_M,), float("-inf"), tl.float32), mask=is_row)
        return
    r = tl.arange(0, BLOCK_R)
    d = tl.arange(0, BLOCK_D)
    q_at = q + (row * q_row + head * q_head)[:, None]
    latent = tl.load(q_at + r[None, :], mask=is_row[:, None] & (r < R)[None, :], other=0)
    rope = tl.load(q_at + R + d[None, :], mask=is_row[:, None] & (d < D)[None, :], other=0)
    share, lse = _latent_span(
        latent, rope, positions, begin, tl.minimum(begin + span, end), kv, table + request.to(tl.int64) * table_row,
        page_stride, token_stride, scale, PAGE, R, D, BLOCK_N, BLOCK_R, BLOCK_D, E4M3, NATIVE,
    )  # fmt: skip
    share *= v_scale
    is_out = is_row[:, None] & (r < R)[None, :]
    if SPLITS == 1:
        out_at = out + (row * out_row + head * out_head)[:, None] + r[None, :]
        tl.store(out_at, share.to(out.dtype.element_ty), mask=is_out)
    else:
        tl.store(part + (at * R)[:, None] + r[None, :], share, mask=is_out)
        tl.store(part_lse + at, lse, mask=is_row)


def mla_decode(
    q_THE: Tensor,
    pages: Pages,
    lengths_B: Tensor,
    *,
    scale: float,
    num_splits: int | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """out_THR of the last G = T / B tokens of each request, as `paged_decode`. pages: see `mla_prefill`."""
    num_requests = lengths_B.shape[0]
    if num_requests and q_THE.shape[0] % num_requests:
        raise ValueError(f"{q_THE.shape[0]} rows for {num_requests} requests")
    tokens = q_THE.shape[0] // max(num_requests, 1)
    first_row_B1 = torch.arange(num_requests + 1, dtype=torch.int32, device=q_THE.device) * tokens
    if num_splits is None:
        programs = triton.cdiv(tokens * q_THE.shape[1], MIN_DOT) * num_requests
        context = pages.table_BL.shape[1] * pages.k_PKSE.shape[2]
        num_splits = plan_splits(programs, context, target_of(q_THE).num_multiprocessors)
    return _attend("mla_decode", q_THE, pages, (first_row_B1, lengths_B), (scale, num_splits), out)


def mla_prefill(
    q_THE: Tensor, pages: Pages, spans: tuple[Tensor, Tensor], *, scale: float, out: Tensor | None = None
) -> Tensor:
    """out_THR: every row attends, in all heads, to its request's latents up to itself; spans as `paged_prefill`.

    q: q_latent and q_rope side by side, unit stride. pages: k_P1SE the latents with rotated keys, v_P1SR their first R
    elements, a view of the same. Raises ValueError where shapes do not fit.
    """
    return _attend("mla_prefill", q_THE, pages, spans, (scale, 1), out)


def _attend(
    kernel: str,
    q_THE: Tensor,
    pages: Pages,
    spans: tuple[Tensor, Tensor],
    plan: tuple[float, int],
    out: Tensor | None,
) -> Tensor:
    (first_row_B1, lengths_B), (scale, num_splits) = spans, plan
    num_rows, num_heads, size = q_THE.shape
    latent_size, num_requests = pages.v_PKSF.shape[-1], lengths_B.shape[0]
    _check(q_THE, pages, spans)
    out = q_THE.new_empty(num_rows, num_heads, latent_size) if out is None else out
    if num_rows == 0:
        return out
    target = target_of(q_THE)
    launch = launch_of(kernel, target, latent_size, variant=pages.variant(q_THE))
    part = part_lse = out
    if num_splits > 1:
        part = torch.empty(num_rows, num_heads, num_splits, latent_size, dtype=torch.float32, device=q_THE.device)
        part_lse = torch.empty(num_rows, num_heads, num_splits, dtype=torch.float32, device=q_THE.device)
    kv = as_bits(pages.k_PKSE)
    _mla[(num_rows * num_heads // launch.block_m + num_requests, num_splits)](
        *(q_THE, kv, pages.table_BL, first_row_B1, lengths_B, out, part, part_lse, num_requests, num_heads),
        *(*q_THE.stride()[:2], kv.stride(0), kv.stride(2), pages.table_BL.stride(0), *out.stride()[:2]),
        *(scale * pages.k_scale * LOG2_E, pages.k_scale),
        SPLITS=num_splits,
        PAGE=kv.shape[2],
        R=latent_size,
        D=size - latent_size,
        BLOCK_M=launch.block_m,
        BLOCK_N=launch.block_n,
        BLOCK_R=max(MIN_DOT, triton.next_power_of_2(latent_size)),
        BLOCK_D=max(MIN_DOT, triton.next_power_of_2(size - latent_size)),
        E4M3=pages.is_e4m3,
        NATIVE=target.has_native_e4m3,
        **launch.options(target),
    )
    if num_splits > 1:
        merge(part, part_lse, out)
    return out


def _check(q_THE: Tensor, pages: Pages, spans: tuple[Tensor, Tensor]) -> None:
    k_PKSE, v_PKSF = pages.k_PKSE, pages.v_PKSF
    faults = []
    if q_THE.shape[-1] != k_PKSE.shape[-1] or k_PKSE.shape[1] != 1:
        faults.append(f"queries have {q_THE.shape[-1]} elements, the pool {k_PKSE.shape[1]} x {k_PKSE.shape[-1]}")
    if v_PKSF.data_ptr() != k_PKSE.data_ptr() or v_PKSF.shape[-1] >= k_PKSE.shape[-1]:
        faults.append("values must be the first elements of the keys, a view of the same memory")
    if spans[0].shape[0] != spans[1].shape[0] + 1 or pages.table_BL.shape[0] != spans[1].shape[0]:
        faults.append(f"{spans[1].shape[0]} lengths, {spans[0].shape[0]} first rows, {pages.table_BL.shape[0]} tables")
    if not pages.is_e4m3 and q_THE.dtype != k_PKSE.dtype:
        faults.append(f"queries are {q_THE.dtype}, latents {k_PKSE.dtype}")
    if any(x.numel() and x.stride(-1) != 1 for x in (q_THE, k_PKSE)):
        faults.append("the last dim of queries and latents must have stride 1")
    if faults:
        raise ValueError("; ".join(faults))


def reference(q_THE: Tensor, pages: Pages, spans: tuple[Tensor, Tensor], *, scale: float) -> Tensor:
    """out_THR in float64, a request at a time."""
    rows, latent_size = spans[0].tolist(), pages.v_PKSF.shape[-1]
    out_THR = q_THE.new_zeros(*q_THE.shape[:2], latent_size, dtype=torch.float64)
    for b, length in enumerate(spans[1].tolist()):
        own = slice(rows[b], rows[b + 1])
        keys_XE = gather(pages.k_PKSE, pages.table_BL[b], length, pages.k_scale)[:, 0]
        positions_T1 = torch.arange(length - rows[b + 1] + rows[b], length, device=q_THE.device)[:, None]
        scores_HTX = torch.einsum("the,xe->htx", q_THE[own].double() * scale, keys_XE)
        unseen_TX = torch.arange(length, device=q_THE.device) > positions_T1
        weights_HTX = scores_HTX.masked_fill(unseen_TX, -torch.inf).softmax(-1).nan_to_num(0.0)
        out_THR[own] = torch.einsum("htx,xr->thr", weights_HTX, keys_XE[:, :latent_size])
    return out_THR
