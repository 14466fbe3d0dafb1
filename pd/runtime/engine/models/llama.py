"""The Llama-like decoder: RMSNorm, rotary attention, gated SiLU MLP, as one rank of a tensor-parallel group.

One file serves all families: they differ in which tensors there are, which `ModelSpec` says, in their attention
(`grouped`, or DeepSeek's `latent`), and in whether a layer has experts in the MLP's place. Source: transformers'
modeling_llama.py, modeling_qwen3.py, modeling_qwen3_moe.py, modeling_deepseek_v3.py.

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
from pd.runtime.engine.layers import Embedding, Gated, Linear, make_linear
from pd.runtime.engine.mesh import Mesh
from pd.runtime.engine.models.grouped import Grouped, read_grouped
from pd.runtime.engine.models.latent import Latent, read_latent_attention
from pd.runtime.engine.operators import Operators
from pd.runtime.engine.rope import angles
from pd.runtime.engine.shards import RankShare
from pd.runtime.engine.spec import ModelSpec
from pd.runtime.engine.weights import Reader

# T tokens of the step, B sampled rows, I hidden, H query heads and K kv heads of this rank, E head size,
# D half of what is rotated of it, V vocabulary, W vocabulary of the widest rank

Pools = tuple[Tensor, Tensor]
"""One layer's k_PKSE and v_PKSE; of latents, twice those."""


@dataclass(frozen=True, slots=True)
class _Layer:
    input_norm_I: Tensor
    attention: Grouped | Latent
    mlp_norm_I: Tensor
    mlp: Gated | Experts


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
        self._layers = [_read_layer(spec, share, reader, layer, stacks=stacks) for layer in range(spec.num_layers)]
        self._norm_I = reader.read("model.norm.weight")
        self._head = make_linear(rows_VI if spec.is_tied else reader.read("lm_head.weight"))
        cos_ND, sin_ND = angles(spec.rope, spec.rope_dim, max_model_len)
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
            q_THE = layer.attention.write(x_TI, ops, turns=turns, pool=pool, inputs=inputs)
            if on_kv is not None:
                on_kv(index)
            x_TI = reduce(layer.attention.attend(q_THE, ops, pool=pool, inputs=inputs))
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


def _mlp(mlp: Gated | Experts, x_TI: Tensor, ops: Operators) -> Tensor:
    if not isinstance(mlp, Experts):
        return _gated(mlp, x_TI, ops)
    out_TI = ops.experts(x_TI, mlp)
    return out_TI if mlp.shared is None else out_TI + _gated(mlp.shared, x_TI, ops)


def _gated(mlp: Gated, x_TI: Tensor, ops: Operators) -> Tensor:
    gate_up, down = mlp
    return down(ops.silu_mul(gate_up(x_TI)))


def _read_layer(spec: ModelSpec, share: RankShare, reader: Reader, layer: int, *, stacks: bool) -> _Layer:
    at = f"model.layers.{layer}."

    def linear(*names: str) -> Linear:
        weight = reader.stack(f"{at}{name}.weight" for name in names)
        return make_linear(weight, reader.find(f"{at}{name}.bias" for name in names))

    def mlp() -> Gated | Experts:
        if spec.experts is not None and spec.has_experts(layer):
            return read_experts(spec.experts, reader, at, stacked=stacks)
        return linear("mlp.gate_proj", "mlp.up_proj"), linear("mlp.down_proj")

    read_attention = read_grouped if spec.latent is None else read_latent_attention
    return _Layer(
        input_norm_I=reader.read(f"{at}input_layernorm.weight"),
        attention=read_attention(spec, share, reader, layer),
        mlp_norm_I=reader.read(f"{at}post_attention_layernorm.weight"),
        mlp=mlp(),
    )
