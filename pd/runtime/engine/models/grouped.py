"""Grouped-query attention of a layer: query heads share the KV heads whose K and V pages keep."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from pd.runtime.engine.inputs import StepInputs
from pd.runtime.engine.layers import Linear, make_linear
from pd.runtime.engine.operators import Operators
from pd.runtime.engine.shards import RankShare
from pd.runtime.engine.spec import ModelSpec
from pd.runtime.engine.weights import Reader

# T tokens of the step, I hidden, H query heads and K kv heads of this rank, E head size, D half of it


@dataclass(frozen=True, slots=True)
class Grouped:
    """One rank's part of one layer's attention. The parts of all ranks are to be summed."""

    qkv: Linear
    query_norm_E: Tensor | None
    key_norm_E: Tensor | None
    output: Linear
    num_heads: tuple[int, int]  # of queries, and of K
    head_dim: int
    eps: float
    window: int | None

    def write(
        self,
        x_TI: Tensor,
        ops: Operators,
        *,
        turns: tuple[Tensor, Tensor],
        pool: tuple[Tensor, Tensor],
        inputs: StepInputs,
    ) -> Tensor:
        """Project, rotate, and put K and V into their pages. Returns the rotated q_THE."""
        num_q, num_kv = self.num_heads
        qkv = self.qkv(x_TI).view(-1, num_q + 2 * num_kv, self.head_dim)
        q_THE, k_TKE, v_TKE = torch.split_with_sizes(qkv, (num_q, num_kv, num_kv), dim=1)
        if self.query_norm_E is not None and self.key_norm_E is not None:
            q_THE = ops.rms_norm(q_THE, self.query_norm_E, self.eps)
            k_TKE = ops.rms_norm(k_TKE, self.key_norm_E, self.eps)
        places = {"pages_T": inputs.pages_T, "offsets_T": inputs.offsets_T}
        ops.rope_and_write((q_THE, k_TKE, v_TKE), turns, pool, **places)
        return q_THE

    def attend(self, q_THE: Tensor, ops: Operators, *, pool: tuple[Tensor, Tensor], inputs: StepInputs) -> Tensor:
        """What `write` returned to this rank's part of out_TI."""
        return self.output(ops.attention(q_THE, pool, inputs, window=self.window).flatten(1))


def read_grouped(spec: ModelSpec, share: RankShare, reader: Reader, layer: int) -> Grouped:
    at = f"model.layers.{layer}.self_attn."

    def linear(*names: str) -> Linear:
        weight = reader.stack(f"{at}{name}.weight" for name in names)
        return make_linear(weight, reader.find(f"{at}{name}.bias" for name in names))

    return Grouped(
        qkv=linear("q_proj", "k_proj", "v_proj"),
        query_norm_E=reader.find([f"{at}q_norm.weight"]),
        key_norm_E=reader.find([f"{at}k_norm.weight"]),
        output=linear("o_proj"),
        num_heads=(len(share.query_heads), len(share.kv_heads)),
        head_dim=spec.head_dim,
        eps=spec.rms_norm_eps,
        window=spec.windows[layer],
    )
