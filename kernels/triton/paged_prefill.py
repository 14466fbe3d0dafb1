"""Attention of a ragged batch of new tokens, each request's own number of them, to its cached prefix and to themselves.

    out_t = sum_n softmax_n(scale q_t . k_n) v_n      over the n that t sees: n <= t, and n > t - window

1. Prefix and new tokens are read from the same pages: the new ones were written before (`kv_write`).
2. Rows of one tile are consecutive tokens of one request times the query heads of one KV head. No padding between
   requests: request b's tiles begin at first_row[b] // tokens_a_tile + b, which bounds the grid by the shapes alone,
   and a program finds its request by bisection (as in vLLM's unified attention kernel). Surplus programs end at once.
3. Tiles below the first row's own position need no mask; only the last one or two, and windows, do.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from pd.kernels.attend import attend_range
from pd.kernels.paged import LOG2_E, Heads, Pages, attend_dense, check_attention, gather
from pd.kernels.target import MIN_DOT, target_of
from pd.kernels.tuning import launch_of

# T rows of queries, B requests, H query heads, E size of a key, F of a value


@triton.jit
def find_request(first_row, num_requests, pairs, tile, TILE: tl.constexpr):
    """The last b with first_row[b] * pairs // TILE + b <= tile."""
    low = 0
    high = num_requests
    while low < high:
        middle = (low + high) // 2
        is_before = tl.load(first_row + middle) * pairs // TILE + middle <= tile
        low = tl.where(is_before, middle + 1, low)
        high = tl.where(is_before, high, middle)
    return low - 1


@triton.jit(do_not_specialize=["num_requests", "table_row"])
def _prefill(
    q, k, v, table, first_row, lengths, first_query, out, num_requests, q_row, q_head, k_page, k_head, k_token, v_page,
    v_head, v_token, table_row, out_row, out_head, scale, v_scale, window,
    GROUP: tl.constexpr, PAGE: tl.constexpr, E: tl.constexpr, F: tl.constexpr, TILE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_F: tl.constexpr,
    WINDOWED: tl.constexpr, E4M3: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    tile, kv_head = tl.program_id(0), tl.program_id(1)
    request = find_request(first_row, num_requests, 1, tile, TILE)
    row_from = tl.load(first_row + request)
    num_new = tl.load(first_row + request + 1) - row_from
    offset = (tile - row_from // TILE - request) * TILE
    if offset >= num_new:
        return
    length = tl.load(lengths + request)
    head_from = tl.load(first_query + kv_head)
    num_own = tl.load(first_query + kv_head + 1) - head_from
    m = tl.arange(0, BLOCK_M)
    token, head = offset + m // GROUP, m % GROUP
    is_row = (m < TILE * GROUP) & (token < num_new) & (head < num_own)
    positions = tl.where(is_row, length - num_new + token, -1)
    row, head = (row_from + token).to(tl.int64), head_from + head
    e = tl.arange(0, BLOCK_E)
    f = tl.arange(0, BLOCK_F)
    query = tl.load(
        q + (row * q_row + head * q_head)[:, None] + e[None, :], mask=is_row[:, None] & (e < E)[None, :], other=0
    )
    first = length - num_new + offset
    begin = 0
    if WINDOWED:
        begin = tl.maximum(first + 1 - window, 0) // BLOCK_N * BLOCK_N
    share, _ = attend_range(
        query, positions, begin, first, tl.minimum(first + TILE, length), k + kv_head.to(tl.int64) * k_head,
        v + kv_head.to(tl.int64) * v_head, table + request.to(tl.int64) * table_row, k_page, k_token, v_page, v_token,
        scale, window, PAGE, E, F, BLOCK_N, BLOCK_E, BLOCK_F, WINDOWED, E4M3, NATIVE,
    )  # fmt: skip
    out_at = out + (row * out_row + head * out_head)[:, None] + f[None, :]
    tl.store(out_at, (share * v_scale).to(out.dtype.element_ty), mask=is_row[:, None] & (f < F)[None, :])


def paged_prefill(
    q_THE: Tensor,
    pages: Pages,
    spans: tuple[Tensor, Tensor],
    heads: Heads,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """out_THF: every row attends to its request's tokens up to itself; K and V of all are in the pages.

    spans: (first_row_B1, lengths_B), int32: request b's new tokens are the rows [first_row[b], first_row[b + 1]) and
    the last of its lengths_B[b] tokens. Requests without new tokens are allowed. q: unit stride in E. Raises
    ValueError where shapes do not fit.
    """
    check_attention(q_THE, pages, heads)
    first_row_B1, lengths_B = spans
    num_rows, num_heads, key_size = q_THE.shape
    num_requests, value_size = lengths_B.shape[0], pages.v_PKSF.shape[-1]
    if first_row_B1.shape[0] != num_requests + 1 or pages.table_BL.shape[0] != num_requests:
        raise ValueError(
            f"{num_requests} lengths, {first_row_B1.shape[0]} first rows (one more belongs there) and "
            f"{pages.table_BL.shape[0]} page tables"
        )
    out = q_THE.new_empty(num_rows, num_heads, value_size) if out is None else out
    if num_rows == 0:
        return out
    target = target_of(q_THE)
    launch = launch_of("paged_prefill", target, max(key_size, value_size), variant=pages.variant(q_THE))
    block_m = max(launch.block_m, MIN_DOT, triton.next_power_of_2(heads.group))
    tile = block_m // heads.group
    k, v = pages.as_bits()
    _prefill[(num_rows // tile + num_requests, heads.num_kv_heads)](
        *(q_THE, k, v, pages.table_BL, first_row_B1, lengths_B, heads.first_query_K1, out, num_requests),
        *(*q_THE.stride()[:2], *k.stride()[:3], *v.stride()[:3], pages.table_BL.stride(0), *out.stride()[:2]),
        *(heads.scale * pages.k_scale * LOG2_E, pages.v_scale, heads.window or 0),
        GROUP=heads.group,
        PAGE=pages.k_PKSE.shape[2],
        E=key_size,
        F=value_size,
        TILE=tile,
        BLOCK_M=block_m,
        BLOCK_N=launch.block_n,
        BLOCK_E=max(MIN_DOT, triton.next_power_of_2(key_size)),
        BLOCK_F=max(MIN_DOT, triton.next_power_of_2(value_size)),
        WINDOWED=heads.window is not None,
        E4M3=pages.is_e4m3,
        NATIVE=target.has_native_e4m3,
        **launch.options(target),
    )
    return out


def reference(q_THE: Tensor, pages: Pages, spans: tuple[Tensor, Tensor], heads: Heads) -> Tensor:
    """In float64, a request at a time."""
    rows = spans[0].tolist()
    out_THF = q_THE.new_zeros(*q_THE.shape[:2], pages.v_PKSF.shape[-1], dtype=torch.float64)
    for b, length in enumerate(spans[1].tolist()):
        own = slice(rows[b], rows[b + 1])
        keys_XKE = gather(pages.k_PKSE, pages.table_BL[b], length, pages.k_scale)
        values_XKF = gather(pages.v_PKSF, pages.table_BL[b], length, pages.v_scale)
        first = length - (rows[b + 1] - rows[b])
        out_THF[own] = attend_dense(q_THE[own], keys_XKE, values_XKF, first=first, heads=heads)
    return out_THF
