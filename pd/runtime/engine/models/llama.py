"""The Llama-like decoder: RMSNorm, rotary GQA attention, gated SiLU MLP, as one rank of a tensor-parallel group.

One file serves Llama, Mistral, Qwen2, Qwen3 and Qwen3-MoE: they differ in which tensors there are, which `ModelSpec`
says, not in what is computed with them. Source: transformers' modeling_llama.py, modeling_qwen3.py,
modeling_qwen3_moe.py. Where a layer has experts they stand for the MLP.

                 ┌───────────────── residual ──────────────────┐        ┌──────── residual ───────┐
    tokens ─embed┴─norm─qkv─(q,k norm)─rope─►pool─attend─o─Σ ──+─norm───┴─gate,up─silu·mul─down─Σ─+─ …
                                                            over ranks                        over ranks
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pd.runtime.engine.experts import Experts, read_experts
from pd.runtime.engine.inputs import StepInputs
from pd.runtime.engine.layers import Embedding, Linear, make_linear
from pd.runtime.engine.mesh import Mesh
from pd.runtime.engine.operators import Operators
from pd.runtime.engine.rope import angles
from pd.runtime.engine.shards import RankShare
from pd.runtime.engine.spec import ModelSpec
from pd.runtime.engine.weights import Reader

# T tokens of the step, B sampled rows, I hidden, H query heads and K kv heads of this rank, E head size,
# D half of it, V vocabulary, W vocabulary of the widest rank

Pools = tuple[Tensor, Tensor]
"""One layer's k_PKSE and v_PKSE."""


@dataclass(frozen=True, slots=True)
class _Layer:
    input_norm_I: Tensor
    qkv: Linear
    query_norm_E: Tensor | None
    key_norm_E: Tensor | None
    output: Linear
    mlp_norm_I: Tensor
    mlp: tuple[Linear, Linear] | Experts  # gate and up as one, and down
    window: int | None


class Llama:
    """Holds one rank's weights; owns no KV."""

    def __init__(
        self, spec: ModelSpec, share: RankShare, mesh: Mesh, *, reader: Reader, max_model_len: int, stacks: bool = False
    ) -> None:
        """Read the rank's weights. `max_model_len`: how far positions reach, in tokens. `stacks`: kernels compute the
        experts, see `read_experts`.
        """
        self._spec = spec
        self._share = share
        self._mesh = mesh
        rows_VI = reader.read("model.embed_tokens.weight")
        self._embedding = Embedding(rows_VI, share.vocabulary.start, is_whole=share.tp == 1)
        self._layers = [_read_layer(spec, layer, reader, stacks=stacks) for layer in range(spec.num_layers)]
        self._norm_I = reader.read("model.norm.weight")
        self._head = make_linear(rows_VI if spec.is_tied else reader.read("lm_head.weight"))
        cos_ND, sin_ND = angles(spec.rope, spec.head_dim, max_model_len)
        self._cos_ND, self._sin_ND = cos_ND.to(rows_VI.device), sin_ND.to(rows_VI.device)

    def forward(
        self, inputs: StepInputs, pools: Sequence[Pools], ops: Operators, on_kv: Callable[[int], None] | None = None
    ) -> Tensor:
        """Hidden states after the last norm, x_TI. Writes the tokens' K and V into `pools`, one a layer.

        `on_kv` hears of each layer of ours, from 0, when its K and V are written, or on a GPU queued to be.
        """
        reduce, eps = self._mesh.all_reduce, self._spec.rms_norm_eps
        turns = self._cos_ND[inputs.positions_T], self._sin_ND[inputs.positions_T]
        residual_TI = reduce(self._embedding(inputs.tokens_T))
        x_TI = ops.rms_norm(residual_TI, self._layers[0].input_norm_I, eps)
        following = [layer.input_norm_I for layer in self._layers[1:]] + [self._norm_I]
        for index, (layer, pool, next_norm_I) in enumerate(zip(self._layers, pools, following, strict=True)):
            q_THE = self._write_kv(layer, x_TI, ops, turns=turns, pool=pool, inputs=inputs)
            if on_kv is not None:
                on_kv(index)
            seen_THE = ops.attention(q_THE, pool, inputs, window=layer.window)
            x_TI = reduce(layer.output(seen_THE.flatten(1)))
            x_TI = ops.rms_norm(x_TI, layer.mlp_norm_I, eps, residual_TI)
            x_TI = reduce(_mlp(layer.mlp, x_TI, ops))
            x_TI = ops.rms_norm(x_TI, next_norm_I, eps, residual_TI)
        return x_TI

    def logits(self, x_BI: Tensor) -> Tensor | None:
        """logits_BV on rank 0, None elsewhere. x_BI: rows of what `forward` returned."""
        own_BV = self._head(x_BI)
        if self._share.tp == 1:
            return own_BV
        sizes = [len(held) for held in self._share.vocabularies]
        padded_BW = own_BV.new_zeros(own_BV.shape[0], max(sizes))
        padded_BW[:, : own_BV.shape[1]] = own_BV
        parts = self._mesh.gather_to_first(padded_BW)
        if parts is None:
            return None
        return torch.cat([part_BW[:, :size] for part_BW, size in zip(parts, sizes, strict=True)], dim=1)

    def _write_kv(
        self,
        layer: _Layer,
        x_TI: Tensor,
        ops: Operators,
        *,
        turns: tuple[Tensor, Tensor],
        pool: Pools,
        inputs: StepInputs,
    ) -> Tensor:
        """Project, rotate, and put K and V into their pages. Returns the rotated q_THE."""
        num_q, num_kv = len(self._share.query_heads), len(self._share.kv_heads)
        qkv = layer.qkv(x_TI).view(-1, num_q + 2 * num_kv, self._spec.head_dim)
        q_THE, k_TKE, v_TKE = torch.split_with_sizes(qkv, (num_q, num_kv, num_kv), dim=1)
        if layer.query_norm_E is not None and layer.key_norm_E is not None:
            q_THE = ops.rms_norm(q_THE, layer.query_norm_E, self._spec.rms_norm_eps)
            k_TKE = ops.rms_norm(k_TKE, layer.key_norm_E, self._spec.rms_norm_eps)
        places = {"pages_T": inputs.pages_T, "offsets_T": inputs.offsets_T}
        ops.rope_and_write((q_THE, k_TKE, v_TKE), turns, pool, **places)
        return q_THE


def _mlp(mlp: tuple[Linear, Linear] | Experts, x_TI: Tensor, ops: Operators) -> Tensor:
    if isinstance(mlp, Experts):
        return ops.experts(x_TI, mlp)
    gate_up, down = mlp
    return down(ops.silu_mul(gate_up(x_TI)))


def _read_layer(spec: ModelSpec, layer: int, reader: Reader, *, stacks: bool) -> _Layer:
    at = f"model.layers.{layer}."

    def linear(*names: str) -> Linear:
        weight = reader.stack(f"{at}{name}.weight" for name in names)
        return make_linear(weight, reader.find(f"{at}{name}.bias" for name in names))

    def mlp() -> tuple[Linear, Linear] | Experts:
        if spec.experts is not None and spec.has_experts(layer):
            return read_experts(spec.experts, reader, f"{at}mlp.", stacked=stacks)
        return linear("mlp.gate_proj", "mlp.up_proj"), linear("mlp.down_proj")

    return _Layer(
        input_norm_I=reader.read(f"{at}input_layernorm.weight"),
        qkv=linear("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        query_norm_E=reader.find([f"{at}self_attn.q_norm.weight"]),
        key_norm_E=reader.find([f"{at}self_attn.k_norm.weight"]),
        output=linear("self_attn.o_proj"),
        mlp_norm_I=reader.read(f"{at}post_attention_layernorm.weight"),
        mlp=mlp(),
        window=spec.windows[layer],
    )
