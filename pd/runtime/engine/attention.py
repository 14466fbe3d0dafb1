"""Attends each token of a step to its request's pages in plain PyTorch, a request at a time.

Rules
1. The new tokens' K and V are in the pool already.
2. No large temporary: pages are gathered into scratch that stays, queries are taken QUERY_ROWS at a time. A fresh
   32 MB tensor a layer costs more than the attention (facts: 5x at 32 requests of 2,048 tokens). From a float8 pool
   bytes are gathered, and widened into the same scratch.
3. Query heads of one KV head are the heads of one small batch over keys of stride 0: keys are never repeated. Where
   a rank holds an uneven number of query heads a KV head, the fewer are padded with copies, which are dropped.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from pd.runtime.engine.inputs import Extend, StepInputs
from pd.runtime.engine.shards import RankShare
from pd.runtime.engine.spec import ModelSpec
from pd.transfer.float8 import E4M3, bits

# T tokens of the step, B of them single, C of one chunk, N of one piece of it, X context, H query heads, K kv heads,
# G query heads a kv head (the most), E head size, P pages of the pool, S tokens a page, L pages of a request

QUERY_ROWS = 256
"""512 tokens on 0 and on 1,536 (9/3 heads, fp32 and bf16, one Zen 3 core): 128 to 512 are equal within the noise of
20 %, 64 loses 30 % on the long context. One piece of the whole chunk would waste half its square."""


class Attend(Protocol):
    """One rank's attention over its pool."""

    def __call__(
        self, q_THE: Tensor, pools: tuple[Tensor, Tensor], inputs: StepInputs, *, window: int | None
    ) -> Tensor:
        """out_THE. pools: one layer's k_PKSE and v_PKSE. window: tokens seen, the own one included; None: all.

        Of a model with latents: out_THR, sums of their first elements; pools are both the latents, with rotated keys.
        """


class NamedAttend(Attend, Protocol):
    note: str  # for the start-up line


class OverLatents:
    """Attention to latents by one that takes them for keys and values: of its sums the first elements are wanted."""

    def __init__(self, attend: NamedAttend, rank: int) -> None:
        self._attend = attend
        self._rank = rank
        self.note = f"{attend.note}, over latents"

    def __call__(
        self, q_THE: Tensor, pools: tuple[Tensor, Tensor], inputs: StepInputs, *, window: int | None
    ) -> Tensor:
        return self._attend(q_THE, pools, inputs, window=window)[..., : self._rank]


class Attention:
    """Owns the scratch."""

    note = "PyTorch, a request at a time"

    def __init__(
        self, spec: ModelSpec, share: RankShare, *, max_context: int, like: Tensor, kv_dtype: torch.dtype
    ) -> None:
        """`max_context`: tokens of the longest request, rounded up to whole pages. `like`: of the queries' dtype and
        device. `kv_dtype`: of the pool, the same or e4m3fn.
        """
        self._scale = spec.attention_scale
        self._padding = _Padding(share.kv_head_of_query, like.device)
        shape = (len(share.kv_heads), max_context, spec.head_dim)
        self._keys, self._values = (like.new_empty(shape) for _ in range(2))
        self._narrow = like.new_empty(shape, dtype=torch.uint8) if kv_dtype is E4M3 else None

    def __call__(
        self, q_THE: Tensor, pools: tuple[Tensor, Tensor], inputs: StepInputs, *, window: int | None
    ) -> Tensor:
        """out_THE. pools: one layer's k_PKSE and v_PKSE. window: tokens seen, the own one included; None: all."""
        if not inputs.extends:
            return self._singles(q_THE, pools, inputs, window=window)
        out_THE = torch.empty_like(q_THE, memory_format=torch.contiguous_format)
        if num_single := inputs.num_single:
            out_THE[:num_single] = self._singles(q_THE[:num_single], pools, inputs, window=window)
        for extend in inputs.extends:
            rows = slice(extend.row, extend.row + extend.stop - extend.start)
            self._extend(q_THE[rows], pools, extend, window=window, out_CHE=out_THE[rows])
        return out_THE

    # ---- one token a request -------------------------------------------------------------------------------

    def _singles(
        self, q_BHE: Tensor, pools: tuple[Tensor, Tensor], inputs: StepInputs, *, window: int | None
    ) -> Tensor:
        grouped_BKGE = self._padding.group(q_BHE)
        out_BKGE = torch.empty_like(grouped_BKGE)
        table_BL = inputs.table_BL.to(torch.int64)
        for b, length in enumerate(inputs.lengths):
            keys_KXE, values_KXE = self._gather(pools, table_BL[b], _first(length, window), length)
            # The group stands where query rows do: one pass over the keys serves it.
            out_BKGE[b] = F.scaled_dot_product_attention(
                grouped_BKGE[None, b], keys_KXE[None], values_KXE[None], scale=self._scale
            )[0]
        return self._padding.ungroup(out_BKGE)

    # ---- several tokens of one request ---------------------------------------------------------------------

    def _extend(
        self, q_CHE: Tensor, pools: tuple[Tensor, Tensor], extend: Extend, *, window: int | None, out_CHE: Tensor
    ) -> None:
        """Causal attention of a chunk to what stands before it and to itself, a piece of queries at a time."""
        origin = _first(extend.start + 1, window)
        keys_KXE, values_KXE = self._gather(pools, extend.pages, origin, extend.stop)
        for a in range(0, len(q_CHE), QUERY_ROWS):
            num_rows = min(QUERY_ROWS, len(q_CHE) - a)
            start = extend.start + a
            low = _first(start + 1, window)
            seen = slice(low - origin, start + num_rows - origin)
            mask_NX = _causal_mask(num_rows, start - low, window, like=q_CHE)
            # Rows stand last to first, as the mask wants them.
            q_KGNE = self._padding.group(q_CHE[a : a + num_rows].flip(0)).permute(1, 2, 0, 3)
            shape = (*q_KGNE.shape[:2], -1, -1)
            out_KGNE = F.scaled_dot_product_attention(
                q_KGNE,
                keys_KXE[:, None, seen].expand(shape),
                values_KXE[:, None, seen].expand(shape),
                attn_mask=mask_NX,
                scale=self._scale,
            )
            out_CHE[a : a + num_rows] = self._padding.ungroup(out_KGNE.permute(2, 0, 1, 3)).flip(0)

    def _gather(self, pools: tuple[Tensor, Tensor], pages_L: Tensor, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """K and V of positions [start, stop) of a request, in scratch: valid until the next gather."""
        page_size = pools[0].shape[2]
        first, last = start // page_size, -(-stop // page_size)
        skip = start - first * page_size
        pages = pages_L[first:last]
        gathered = []
        scratch = (self._keys,) if pools[0] is pools[1] else (self._keys, self._values)
        for pool_PKSE, scratch_KXE in zip(pools, scratch, strict=False):
            whole_KXE = scratch_KXE[:, : (last - first) * page_size]
            into_KXE = whole_KXE if self._narrow is None else self._narrow[:, : whole_KXE.shape[1]]
            into_KLSE = into_KXE.view(len(into_KXE), last - first, page_size, -1)
            torch.index_select(bits(pool_PKSE).transpose(0, 1), 1, pages, out=into_KLSE)
            if into_KXE is not whole_KXE:
                whole_KXE.copy_(into_KXE.view(E4M3))
            gathered.append(whole_KXE[:, skip : skip + stop - start])
        return gathered[0], gathered[-1]


class _Padding:
    """Query heads by KV head, made of one size."""

    def __init__(self, kv_head_of_query: Sequence[int], device: torch.device) -> None:
        members = [
            [q for q, kv in enumerate(kv_head_of_query) if kv == head] for head in range(max(kv_head_of_query) + 1)
        ]
        most = max(map(len, members))
        self._num_kv_heads = len(members)
        self._is_even = all(len(heads) == most for heads in members)
        padded = [[*heads, *heads[:1] * (most - len(heads))] for heads in members]
        places = [k * most + g for k, heads in enumerate(members) for g in range(len(heads))]
        self._head_of_place = torch.tensor(padded, device=device).flatten()
        self._place_of_head = torch.tensor(places, device=device)

    def group(self, q_THE: Tensor) -> Tensor:
        """q_TKGE."""
        if not self._is_even:
            q_THE = q_THE[:, self._head_of_place]
        return q_THE.view(len(q_THE), self._num_kv_heads, -1, q_THE.shape[-1])

    def ungroup(self, out_TKGE: Tensor) -> Tensor:
        """out_THE."""
        out_THE = out_TKGE.flatten(1, 2)
        return out_THE if self._is_even else out_THE[:, self._place_of_head]


def _first(length: int, window: int | None) -> int:
    """The first position that the last of `length` tokens sees."""
    return 0 if window is None else max(0, length - window)


def _causal_mask(num_rows: int, num_before: int, window: int | None, *, like: Tensor) -> Tensor:
    """Additive mask of `num_rows` queries, last first, over num_before + num_rows keys, first first.

    Whether a key is seen depends on how far it stands from the query alone, so all rows are windows on one line of
    numbers, each one further: nothing of the size of the square is made.

        query row r is position num_before + num_rows - 1 - r; key x is seen if x + r <= num_before + num_rows - 1
        and, with a window, x + r > num_before + num_rows - 1 - window
    """
    num_keys = num_before + num_rows
    line = like.new_zeros(num_keys + num_rows)
    line[num_keys:] = -torch.inf
    if window is not None:
        line[: max(0, num_keys - window)] = -torch.inf
    return line.as_strided((num_rows, num_keys), (1, 1))
