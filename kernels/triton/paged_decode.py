"""Attention of each request's last tokens to its whole context in pages: decode, and verification of drafts.

    out_t = sum_n softmax_n(scale q_t . k_n) v_n      over the n that t sees: n <= t, and n > t - window

1. The G last tokens of a request times the query heads of one KV head are the rows of one tile, padded to 16 so that
   the matrix cores take it; K and V are read once for all of them.
2. Few requests leave a GPU idle, so a context is cut into splits, each by a program of its own, which leaves its share
   out_s and log-sum-exp L_s; the second kernel merges them stably (flash decoding; Dao et al. 2023):
       out = sum_s 2^(L_s - max L) out_s / sum_s 2^(L_s - max L)
   Empty splits, of shorter requests, say L = -inf and end at once, so a launch depends on nothing but shapes and can
   stand in a graph.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from pd.kernels.attend import attend_range
from pd.kernels.paged import LOG2_E, Heads, Pages, attend_dense, check_attention, gather
from pd.kernels.target import MIN_DOT, target_of
from pd.kernels.tuning import launch_of

# T = B * G rows of queries, G tokens a request, H query heads, E size of a key, F of a value, C splits

MAX_ROWS = 128
"""Of one tile: tokens times group."""
MIN_SPLIT = 256
"""Tokens: below this a split's own start and its merge cost more than it saves."""
MAX_SPLITS = 64


@triton.jit(do_not_specialize=["table_row"])
def _decode(
    q, k, v, table, lengths, first_query, out, part, part_lse, q_row, q_head, k_page, k_head, k_token, v_page, v_head,
    v_token, table_row, out_row, out_head, scale, v_scale, window, num_heads,
    G: tl.constexpr, GROUP: tl.constexpr, SPLITS: tl.constexpr, PAGE: tl.constexpr, E: tl.constexpr, F: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_F: tl.constexpr,
    WINDOWED: tl.constexpr, E4M3: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    request, kv_head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    length = tl.load(lengths + request)
    head_from = tl.load(first_query + kv_head)
    num_own = tl.load(first_query + kv_head + 1) - head_from
    m = tl.arange(0, BLOCK_M)
    token, head = m // GROUP, m % GROUP
    is_row = (token < G) & (head < num_own)
    positions = tl.where(is_row, length - G + token, -1)
    row, head = (request * G + token).to(tl.int64), head_from + head
    e = tl.arange(0, BLOCK_E)
    f = tl.arange(0, BLOCK_F)

    low = 0
    if WINDOWED:
        low = tl.maximum(length - G + 1 - window, 0) // BLOCK_N * BLOCK_N
    span = tl.cdiv(tl.cdiv(tl.maximum(length - low, 0), BLOCK_N), SPLITS) * BLOCK_N
    begin = low + split * span
    end = tl.minimum(begin + span, length)
    at = (row * num_heads + head) * SPLITS + split
    if begin >= end and SPLITS > 1:
        tl.store(part_lse + at, tl.full((BLOCK_M,), float("-inf"), tl.float32), mask=is_row)
        return
    query = tl.load(
        q + (row * q_row + head * q_head)[:, None] + e[None, :], mask=is_row[:, None] & (e < E)[None, :], other=0
    )
    share, lse = attend_range(
        query, positions, begin, length - G, end, k + kv_head.to(tl.int64) * k_head, v + kv_head.to(tl.int64) * v_head,
        table + request.to(tl.int64) * table_row, k_page, k_token, v_page, v_token, scale, window,
        PAGE, E, F, BLOCK_N, BLOCK_E, BLOCK_F, WINDOWED, E4M3, NATIVE,
    )  # fmt: skip
    share *= v_scale
    is_out = is_row[:, None] & (f < F)[None, :]
    if SPLITS == 1:
        out_at = out + (row * out_row + head * out_head)[:, None] + f[None, :]
        tl.store(out_at, share.to(out.dtype.element_ty), mask=is_out)
    else:
        tl.store(part + (at * F)[:, None] + f[None, :], share, mask=is_out)
        tl.store(part_lse + at, lse, mask=is_row)


@triton.jit
def _merge(
    part, part_lse, out, out_row, out_head, num_heads, SPLITS: tl.constexpr, F: tl.constexpr, BLOCK_F: tl.constexpr
):
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    f = tl.program_id(2) * BLOCK_F + tl.arange(0, BLOCK_F)
    c = tl.arange(0, SPLITS)
    at = (row * num_heads + head) * SPLITS + c
    lse = tl.load(part_lse + at)
    is_full = lse > float("-inf")
    best = tl.max(lse, 0)
    weights = tl.where(is_full, tl.exp2(lse - tl.where(best == float("-inf"), 0.0, best)), 0.0)
    total = tl.sum(weights, 0)
    shares = tl.load(part + (at * F)[:, None] + f[None, :], mask=is_full[:, None] & (f < F)[None, :], other=0.0)
    merged = tl.sum(shares * weights[:, None], 0) / tl.where(total > 0, total, 1.0)
    tl.store(out + row * out_row + head * out_head + f, merged.to(out.dtype.element_ty), mask=f < F)


def paged_decode(
    q_THE: Tensor,
    pages: Pages,
    lengths_B: Tensor,
    heads: Heads,
    *,
    num_splits: int | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """out_THF of the last G = T / B tokens of each request; their K and V are in the pages already.

    lengths_B: int32, of the context, those tokens included; rows at positions below 0 (length 0: a padded request)
    answer zeros. q: unit stride in E. num_splits: a power of two; None: chosen from T, the table's width and the
    device. Two numbers of splits differ in rounding only. Raises ValueError where shapes do not fit.
    """
    check_attention(q_THE, pages, heads)
    num_rows, num_heads, key_size = q_THE.shape
    num_requests, value_size = lengths_B.shape[0], pages.v_PKSF.shape[-1]
    if num_requests != pages.table_BL.shape[0] or (num_requests and num_rows % num_requests):
        raise ValueError(f"{num_rows} rows, {num_requests} lengths and {pages.table_BL.shape[0]} page tables")
    out = q_THE.new_empty(num_rows, num_heads, value_size) if out is None else out
    if num_rows == 0:
        return out
    tokens = num_rows // num_requests
    if tokens * heads.group > MAX_ROWS:
        raise ValueError(f"{tokens} tokens x {heads.group} heads a group are over {MAX_ROWS} rows: use paged_prefill")
    target = target_of(q_THE)
    launch = launch_of("paged_decode", target, max(key_size, value_size), variant=pages.variant(q_THE))
    page_size = pages.k_PKSE.shape[2]
    if num_splits is None:
        programs = num_requests * heads.num_kv_heads
        num_splits = plan_splits(programs, pages.table_BL.shape[1] * page_size, target.num_multiprocessors)
    part = part_lse = out
    if num_splits > 1:
        part = torch.empty(num_rows, num_heads, num_splits, value_size, dtype=torch.float32, device=q_THE.device)
        part_lse = torch.empty(num_rows, num_heads, num_splits, dtype=torch.float32, device=q_THE.device)
    k, v = pages.as_bits()
    _decode[(num_requests, heads.num_kv_heads, num_splits)](
        *(q_THE, k, v, pages.table_BL, lengths_B, heads.first_query_K1, out, part, part_lse),
        *(*q_THE.stride()[:2], *k.stride()[:3], *v.stride()[:3], pages.table_BL.stride(0), *out.stride()[:2]),
        *(heads.scale * pages.k_scale * LOG2_E, pages.v_scale, heads.window or 0, num_heads),
        G=tokens,
        GROUP=heads.group,
        SPLITS=num_splits,
        PAGE=page_size,
        E=key_size,
        F=value_size,
        BLOCK_M=max(MIN_DOT, triton.next_power_of_2(tokens * heads.group)),
        BLOCK_N=launch.block_n,
        BLOCK_E=max(MIN_DOT, triton.next_power_of_2(key_size)),
        BLOCK_F=max(MIN_DOT, triton.next_power_of_2(value_size)),
        WINDOWED=heads.window is not None,
        E4M3=pages.is_e4m3,
        NATIVE=target.has_native_e4m3,
        **launch.options(target),
    )
    if num_splits > 1:
        merge(part, part_lse, out)
    return out


def merge(part_THCF: Tensor, lse_THC: Tensor, out_THF: Tensor) -> None:
    """out = what the C splits of each row and head make together; lse in units of log2 e, -inf for an empty split."""
    num_rows, num_heads, num_splits, value_size = part_THCF.shape
    target = target_of(out_THF)
    launch = launch_of("merge", target, value_size)
    block_f = min(launch.block_n, triton.next_power_of_2(value_size))
    _merge[(num_rows, num_heads, triton.cdiv(value_size, block_f))](
        *(part_THCF, lse_THC, out_THF, *out_THF.stride()[:2], num_heads),
        SPLITS=num_splits,
        F=value_size,
        BLOCK_F=block_f,
        **launch.options(target),
    )


def plan_splits(num_programs: int, max_context: int, num_multiprocessors: int) -> int:
    """How many splits fill the device about twice over: a power of two, none shorter than MIN_SPLIT tokens."""
    wanted = 2 * num_multiprocessors // max(num_programs, 1)
    return 1 << max(1, min(wanted, max_context // MIN_SPLIT, MAX_SPLITS)).bit_length() - 1


def reference(q_THE: Tensor, pages: Pages, lengths_B: Tensor, heads: Heads) -> Tensor:
    """In float64, a request at a time."""
    num_requests = lengths_B.shape[0]
    rows = []
    for b, q_GHE in enumerate(q_THE.view(num_requests, -1, *q_THE.shape[1:]) if num_requests else ()):
        length = int(lengths_B[b])
        keys_XKE = gather(pages.k_PKSE, pages.table_BL[b], length, pages.k_scale)
        values_XKF = gather(pages.v_PKSF, pages.table_BL[b], length, pages.v_scale)
        rows.append(attend_dense(q_GHE, keys_XKE, values_XKF, first=length - len(q_GHE), heads=heads))
    return torch.cat(rows) if rows else q_THE.new_zeros(*q_THE.shape[:2], pages.v_PKSF.shape[-1], dtype=torch.float64)
