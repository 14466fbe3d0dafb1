"""The loop that paged attention kernels share: online softmax over a range of a request's tokens.

    s_n = q . k_n * scale (in units of log2 e)      peak' = max(peak, max s_n)      w_n = 2^(s_n - peak')
    total' = total 2^(peak - peak') + sum w_n       acc' = acc 2^(peak - peak') + sum w_n v_n

so that acc / total is softmax(q k^T) v whatever the order and the tile, and log2(total) + peak is its log-sum-exp
(Milakov, Gimelshein 2018; Dao et al., FlashAttention, 2022). Query rows of one KV head, all tokens and all heads of its
group, are the rows of one tile: keys and values are read once for all of them.
"""

import triton
import triton.language as tl

from pd.kernels.e4m3 import widen


@triton.jit
def load_tokens(pool, table, tokens, is_there, page_stride, token_stride, PAGE: tl.constexpr):
    """Where each token's first element is: pointers of 64 bits."""
    pages = tl.load(table + tokens // PAGE, mask=is_there, other=0).to(tl.int64)
    return pool + pages * page_stride + (tokens % PAGE) * token_stride


@triton.jit
def as_query(x, like, E4M3: tl.constexpr, NATIVE: tl.constexpr):
    """A tile of the pool in the query's dtype."""
    if E4M3:
        return widen(x, NATIVE).to(like.dtype)
    else:
        return x


@triton.jit
def attend_span(
    acc, peak, total, q, positions, begin, end, k, v, table, k_page, k_token, v_page, v_token, scale, window,
    PAGE: tl.constexpr, E: tl.constexpr, F: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_E: tl.constexpr,
    BLOCK_F: tl.constexpr, MASKED: tl.constexpr, WINDOWED: tl.constexpr, E4M3: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """Add tokens [begin, end). Unmasked: a whole number of tiles, and every row sees all of them."""
    e = tl.arange(0, BLOCK_E)
    f = tl.arange(0, BLOCK_F)
    for start in range(begin, end, BLOCK_N):
        tokens = start + tl.arange(0, BLOCK_N)
        is_there = tokens < end
        k_at = load_tokens(k, table, tokens, is_there, k_page, k_token, PAGE)
        keys = tl.load(k_at[None, :] + e[:, None], mask=is_there[None, :] & (e < E)[:, None], other=0)
        scores = tl.dot(q, as_query(keys, q, E4M3, NATIVE), input_precision="ieee") * scale
        if MASKED:
            seen = is_there[None, :] & (tokens[None, :] <= positions[:, None])
            if WINDOWED:
                seen = seen & (tokens[None, :] > positions[:, None] - window)
            scores = tl.where(seen, scores, float("-inf"))
        higher = tl.maximum(peak, tl.max(scores, 1))
        base = tl.where(higher == float("-inf"), 0.0, higher)  # a row that has seen nothing: no inf - inf
        decay = tl.exp2(peak - base)
        weights = tl.exp2(scores - base[:, None])
        v_at = load_tokens(v, table, tokens, is_there, v_page, v_token, PAGE)
        values = tl.load(v_at[:, None] + f[None, :], mask=is_there[:, None] & (f < F)[None, :], other=0)
        values = as_query(values, q, E4M3, NATIVE)
        acc = acc * decay[:, None] + tl.dot(weights.to(q.dtype), values, input_precision="ieee")
        total = total * decay + tl.sum(weights, 1)
        peak = higher
    return acc, peak, total


@triton.jit
def attend_range(
    q, positions, begin, first, end, k, v, table, k_page, k_token, v_page, v_token, scale, window,
    PAGE: tl.constexpr, E: tl.constexpr, F: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_E: tl.constexpr,
    BLOCK_F: tl.constexpr, WINDOWED: tl.constexpr, E4M3: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """Attend to tokens [begin, end). `first`: the least position of a row, so that what lies before needs no mask.

    Returns the normed share [M, F] and its log-sum-exp [M] in units of log2 e, -inf for rows that saw nothing.
    """
    acc = tl.zeros((q.shape[0], BLOCK_F), tl.float32)
    peak = tl.full((q.shape[0],), float("-inf"), tl.float32)
    total = tl.zeros((q.shape[0],), tl.float32)
    whole = begin
    if not WINDOWED:
        whole += tl.maximum(tl.minimum(end, first + 1) - begin, 0) // BLOCK_N * BLOCK_N
        acc, peak, total = attend_span(
            acc, peak, total, q, positions, begin, whole, k, v, table, k_page, k_token, v_page, v_token, scale, window,
            PAGE, E, F, BLOCK_N, BLOCK_E, BLOCK_F, False, WINDOWED, E4M3, NATIVE,
        )  # fmt: skip
    acc, peak, total = attend_span(
        acc, peak, total, q, positions, whole, end, k, v, table, k_page, k_token, v_page, v_token, scale, window,
        PAGE, E, F, BLOCK_N, BLOCK_E, BLOCK_F, True, WINDOWED, E4M3, NATIVE,
    )  # fmt: skip
    filled = tl.where(total > 0, total, 1.0)
    return acc / filled[:, None], tl.where(total > 0, peak + tl.log2(filled), float("-inf"))
