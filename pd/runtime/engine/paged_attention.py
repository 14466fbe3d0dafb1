"""Attention of a step by the Triton kernels: requests of one token by one launch, all longer chunks by another."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pd.runtime.engine.inputs import StepInputs
from pd.runtime.engine.shards import RankShare
from pd.runtime.engine.spec import ModelSpec

# T tokens of the step, B of them single, H query heads, K kv heads, E head size, P pages of the pool, S tokens a page


class PagedAttention:
    """One rank's attention over its pool; holds no scratch."""

    def __init__(
        self, spec: ModelSpec, share: RankShare, *, device: torch.device, kernels: tuple[Any, Any, Any]
    ) -> None:
        """`kernels`: the modules paged, paged_decode and paged_prefill of pd.kernels."""
        self._paged, decode, prefill = kernels
        self._decode, self._prefill = decode.paged_decode, prefill.paged_prefill
        self._heads = {
            window: self._paged.heads_of(
                share.kv_head_of_query, scale=spec.head_dim**-0.5, device=device, window=window
            )
            for window in spec.windows
        }

    def __call__(
        self, q_THE: Tensor, pools: tuple[Tensor, Tensor], inputs: StepInputs, *, window: int | None
    ) -> Tensor:
        """out_THE. pools: one layer's k_PKSE and v_PKSE. window: tokens seen, the own one included; None: all."""
        heads, num_single = self._heads[window], inputs.num_single
        out_THE = torch.empty_like(q_THE, memory_format=torch.contiguous_format)
        if num_single:
            pages = self._paged.Pages(*pools, inputs.table_BL)
            self._decode(q_THE[:num_single], pages, inputs.lengths_B, heads, out=out_THE[:num_single])
        if (ragged := inputs.ragged) is not None:
            pages = self._paged.Pages(*pools, ragged.table_BL)
            spans = ragged.first_row_B1, ragged.lengths_B
            self._prefill(q_THE[num_single:], pages, spans, heads, out=out_THE[num_single:])
        return out_THE
