"""Attention of a step by the Triton kernels: requests of one token by one launch, all longer chunks by another."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pd.runtime.engine.inputs import StepInputs
from pd.runtime.engine.latent_spec import LatentSpec
from pd.runtime.engine.shards import RankShare
from pd.runtime.engine.spec import ModelSpec

# T tokens of the step, B of them single, H query heads, K kv heads, E head size, R latent elements, P pages of the
# pool, S tokens a page


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
                share.kv_head_of_query, scale=spec.attention_scale, device=device, window=window
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


class PagedLatents:
    """The same over latents; holds no scratch."""

    def __init__(self, latent: LatentSpec, *, kernels: tuple[Any, Any]) -> None:
        """`kernels`: the modules paged and mla of pd.kernels."""
        self._spec = latent
        self._paged, self._mla = kernels

    def __call__(
        self, q_THE: Tensor, pools: tuple[Tensor, Tensor], inputs: StepInputs, *, window: int | None
    ) -> Tensor:
        """out_THR. pools: one layer's latents with their rotated keys, twice. window: must be None."""
        assert window is None, "no model has both"
        kv_P1SE, num_single, scale = pools[0], inputs.num_single, self._spec.scale
        both = kv_P1SE, kv_P1SE[..., : self._spec.rank]
        out_THR = q_THE.new_empty(*q_THE.shape[:2], self._spec.rank)
        if num_single:
            pages = self._paged.Pages(*both, inputs.table_BL)
            self._mla.mla_decode(q_THE[:num_single], pages, inputs.lengths_B, scale=scale, out=out_THR[:num_single])
        if (ragged := inputs.ragged) is not None:
            pages = self._paged.Pages(*both, ragged.table_BL)
            spans = ragged.first_row_B1, ragged.lengths_B
            self._mla.mla_prefill(q_THE[num_single:], pages, spans, scale=scale, out=out_THR[num_single:])
        return out_THR
