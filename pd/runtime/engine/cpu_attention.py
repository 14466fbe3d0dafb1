"""Attention of a step in C++ on the CPU, and the two operations it is made of, each with its plain form beside it.

A token's result has the same bits in any batch, on any number of threads, and whether it comes alone or in a chunk. So,
with the other ops of `cpu_ops`, an answer in bfloat16 too does not depend on how its prompt was cut, on its neighbours,
or on which instance computed it. The rules are those of cpu_ops.py.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from pd.runtime.engine.cpu_build import native_for
from pd.runtime.engine.inputs import StepInputs
from pd.runtime.engine.shards import RankShare
from pd.runtime.engine.spec import ModelSpec
from pd.transfer.float8 import E4M3, bits

# T tokens of the step, B requests, H query heads, K kv heads, E head size, C context, P pages, S tokens a page, L pages
# of a request's table

MAX_HEAD_SIZE = 576
"""As kernels/cpu/ops.h has it: DeepSeek's latent of 512 with its rotated key of 64."""


class NativeAttention:
    """One rank's attention over its pool; holds no scratch. For queries that `native_for` takes.

    From a float8 pool, which C++ does not read, the pages of a request at a time are widened into one of the queries'
    dtype: so there too the bits of an answer are its own.
    """

    note = "C++"

    def __init__(self, spec: ModelSpec, share: RankShare) -> None:
        kv_head_of_query_H = torch.tensor(share.kv_head_of_query, dtype=torch.int32)
        scale = spec.attention_scale
        self._heads = {window: Heads(kv_head_of_query_H, scale, window) for window in spec.windows}

    def __call__(
        self, q_THE: Tensor, pools: tuple[Tensor, Tensor], inputs: StepInputs, *, window: int | None
    ) -> Tensor:
        """out_THE. pools: one layer's k_PKSE and v_PKSE. window: tokens seen, the own one included; None: all."""
        heads, num_single = self._heads[window], inputs.num_single
        if pools[0].dtype is E4M3:
            return torch.cat(list(_over_float8(q_THE, pools, inputs, heads)))
        parts = []
        if num_single:
            table = {"table_BL": inputs.table_BL, "lengths_B": inputs.lengths_B}
            parts.append(paged_decode(q_THE[:num_single], pools, **table, heads=heads))
        if (ragged := inputs.ragged) is not None:
            chunks = ragged.first_row_B1, ragged.lengths_B, ragged.table_BL
            parts.append(paged_prefill(q_THE[num_single:], pools, chunks, heads=heads))
        return parts[0] if len(parts) == 1 else torch.cat(parts)


def _over_float8(q_THE: Tensor, pools: tuple[Tensor, Tensor], inputs: StepInputs, heads: Heads) -> Iterator[Tensor]:
    """Each request's rows, in order."""
    for b in range(inputs.num_single):
        lengths_B = inputs.lengths_B[b : b + 1]
        wide, table_BL = _widened(pools, inputs.table_BL[b], int(lengths_B), q_THE.dtype)
        yield paged_decode(q_THE[b : b + 1], wide, table_BL=table_BL, lengths_B=lengths_B, heads=heads)
    if (ragged := inputs.ragged) is None:
        return
    for b, (first, last) in enumerate(itertools.pairwise(ragged.first_row_B1.tolist())):
        lengths_B = ragged.lengths_B[b : b + 1]
        wide, table_BL = _widened(pools, ragged.table_BL[b], int(lengths_B), q_THE.dtype)
        chunk = torch.tensor([0, last - first], dtype=torch.int32), lengths_B, table_BL
        rows = slice(inputs.num_single + first, inputs.num_single + last)
        yield paged_prefill(q_THE[rows], wide, chunk, heads=heads)


def _widened(
    pools: tuple[Tensor, Tensor], pages_L: Tensor, length: int, dtype: torch.dtype
) -> tuple[tuple[Tensor, Tensor], Tensor]:
    """A pool of these pages alone, and the table of its one request."""
    num_pages = -(-length // pools[0].shape[2])
    held = pages_L[:num_pages].long()
    k_PKSE = bits(pools[0])[held].view(E4M3).to(dtype)
    v_PKSE = k_PKSE if pools[1] is pools[0] else bits(pools[1])[held].view(E4M3).to(dtype)
    return (k_PKSE, v_PKSE), torch.arange(num_pages, dtype=torch.int32)[None]


@dataclass(frozen=True, slots=True)
class Heads:
    """What attention in one layer knows before any request comes."""

    kv_head_of_query_H: Tensor  # int32: the pool's head that each query head reads; any map
    scale: float
    window: int | None = None  # how many of the last tokens are seen; None: all


def paged_decode(
    q_BHE: Tensor, pools: tuple[Tensor, Tensor], *, table_BL: Tensor, lengths_B: Tensor, heads: Heads
) -> Tensor:
    """Attend one new token a request to its whole context. Returns out_BHE of q's dtype.

    pools: k_PKSE and v_PKSE, views of one layer of the pool, any strides but unit in E; the new token's K and V
    are already there. q and the pools share a dtype. table_BL: int32, of each row the first
    ceil(length / page size) are read. lengths_B: int32, of the context, new token included; a row of length 0
    answers zeros.
    """
    native = native_for(q_BHE)
    if native is None:
        return paged_decode_reference(q_BHE, pools, table_BL=table_BL, lengths_B=lengths_B, heads=heads)
    return native.paged_decode(
        q_BHE, pools, (table_BL, lengths_B), heads.kv_head_of_query_H, heads.scale, heads.window or 0
    )


def paged_decode_reference(
    q_BHE: Tensor, pools: tuple[Tensor, Tensor], *, table_BL: Tensor, lengths_B: Tensor, heads: Heads
) -> Tensor:
    page_size = pools[0].shape[2]
    kv_heads_H = heads.kv_head_of_query_H.long()
    out_BHE = torch.zeros_like(q_BHE, memory_format=torch.contiguous_format)
    for b, length in enumerate(lengths_B.tolist()):
        if length == 0:
            continue
        start = 0 if heads.window is None else max(0, length - heads.window)
        pages_L = table_BL[b, start // page_size : (length + page_size - 1) // page_size].long()
        seen = slice(start % page_size, start % page_size + length - start)
        keys_HCE, values_HCE = (pool[pages_L].transpose(0, 1).flatten(1, 2)[kv_heads_H, seen] for pool in pools)
        out_BHE[b] = F.scaled_dot_product_attention(q_BHE[b, :, None], keys_HCE, values_HCE, scale=heads.scale).squeeze(
            1
        )
    return out_BHE


def paged_prefill(
    q_THE: Tensor, pools: tuple[Tensor, Tensor], chunks: tuple[Tensor, Tensor, Tensor], *, heads: Heads
) -> Tensor:
    """Attend the new tokens of B chunks, each causally to its whole context. Returns out_THE of q's dtype.

    chunks: first_row_B1, the chunks' rows of q one after the other, first the first; lengths_B, of each context, its
    chunk included; table_BL; all int32. Pools and heads as in `paged_decode`, to whose bits those of each row are
    equal in C++: however a prompt is cut, and when a token comes again after it was generated.
    """
    native = native_for(q_THE)
    if native is None:
        return paged_prefill_reference(q_THE, pools, chunks, heads=heads)
    return native.paged_prefill(q_THE, pools, chunks, heads.kv_head_of_query_H, heads.scale, heads.window or 0)


def paged_prefill_reference(
    q_THE: Tensor, pools: tuple[Tensor, Tensor], chunks: tuple[Tensor, Tensor, Tensor], *, heads: Heads
) -> Tensor:
    first_row_B1, lengths_B, table_BL = chunks
    count_B = first_row_B1.diff()
    ahead_B = lengths_B - first_row_B1[1:] + 1
    lengths_T = torch.arange(len(q_THE)) + ahead_B.repeat_interleave(count_B)
    table_TL = table_BL.repeat_interleave(count_B, dim=0)
    return paged_decode_reference(q_THE, pools, table_BL=table_TL, lengths_B=lengths_T, heads=heads)
