"""A mixture of experts: each token goes through the MLPs of a few of them, and the sum of those, weighted, comes out.

    p = softmax(router x), or the sigmoid of each
    chosen: the k largest p, or p + bias; where experts stand in groups, of the best groups only. A group is as good as
            its best expert (softmax), or its two best (sigmoid)
    out = sum over those of w_e * down_e(silu(gate_e x) * up_e x)      w = p, made to sum to 1 where the model says so,
                                                                           times its factor

Every rank holds a part of each expert's columns, and the whole router: so all ranks choose alike, and their parts are
summed as an MLP's are. A token's choice and sum depend on nothing but the token: experts are added in their order, in
float32, and of two that tie the lower one is taken. Source: transformers' modeling_qwen3_moe.py, modeling_mixtral.py,
modeling_deepseek_v2.py, modeling_deepseek_v3.py.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from pd.runtime.engine import cpu_ops
from pd.runtime.engine.expert_spec import ExpertSpec
from pd.runtime.engine.layers import Gated, Linear, make_linear
from pd.runtime.engine.weights import Reader

# T tokens, X experts, G groups of them, K chosen ones a token, I hidden, N columns of gate and up together,
# C of one of them

LEAST_SUM = 1e-20
"""Where all chosen sigmoids are 0, weights are 0 and not 0 / 0; it changes no other sum."""


@dataclass(frozen=True, slots=True)
class Experts:
    """One layer's, of one rank, in the form that its operators read; the other form is empty."""

    spec: ExpertSpec
    router: Linear  # logits, in its own dtype
    bias_X: Tensor | None  # on scores, float32
    gate_up_XNI: Tensor | None
    down_XIC: Tensor | None
    each: tuple[Gated, ...]
    shared: Gated | None  # what every token goes through beside; whoever adds up a layer's parts adds this too


def read_experts(spec: ExpertSpec, reader: Reader, layer: str, *, stacked: bool) -> Experts:
    """`layer`: its name in the checkpoint, "model.layers.3.". `stacked`: as one tensor, as kernels want it."""
    at, (gate, up, down) = f"{layer}{spec.at}", spec.gate_up_down
    router = _make_router(reader.read(f"{at}gate.weight"))
    bias_X = reader.read(f"{at}gate.e_score_correction_bias") if spec.has_bias else None
    shared = None
    if spec.shared_size:
        own = f"{at}shared_experts."
        gate_up = reader.stack(f"{own}{name}.weight" for name in ("gate_proj", "up_proj"))
        shared = make_linear(gate_up), make_linear(reader.read(f"{own}down_proj.weight"))
    experts = [f"{at}experts.{x}." for x in range(spec.num_experts)]
    if not stacked:
        pairs = tuple(
            (
                make_linear(reader.stack((f"{own}{gate}.weight", f"{own}{up}.weight"))),
                make_linear(reader.read(f"{own}{down}.weight")),
            )
            for own in experts
        )
        return Experts(spec, router, bias_X, None, None, pairs, shared)
    all_gate_up = reader.stack(f"{own}{name}.weight" for own in experts for name in (gate, up))
    all_down = reader.stack(f"{own}{down}.weight" for own in experts)
    gate_up_XNI, down_XIC = (x.view(spec.num_experts, -1, x.shape[1]) for x in (all_gate_up, all_down))
    return Experts(spec, router, bias_X, gate_up_XNI, down_XIC, (), shared)


def _make_router(weight_XI: Tensor) -> Linear:
    dtype, linear = weight_XI.dtype, make_linear(weight_XI)
    return lambda x_TI: linear(x_TI.to(dtype))


def mix(x_TI: Tensor, experts: Experts) -> Tensor:
    """out_TI in PyTorch, and C++ where it was built. On a GPU every expert computes every token, so that nothing is
    asked of the device: this is what stands in where kernels cannot run.
    """
    weights_TK, ids_TK = choose(experts.router(x_TI), experts.spec, experts.bias_X)
    out_TI = torch.zeros_like(x_TI, dtype=torch.float32, memory_format=torch.contiguous_format)
    if not x_TI.is_cpu:
        weights_TX = weights_TK.new_zeros(len(x_TI), experts.spec.num_experts).scatter_(1, ids_TK, weights_TK)
        for x, pair in enumerate(experts.each):
            out_TI += weights_TX[:, x, None] * _through(x_TI, pair)
        return out_TI.to(x_TI.dtype)
    for x in sorted(set(ids_TK.flatten().tolist())):
        rows_N, places_N = (ids_TK == x).nonzero(as_tuple=True)
        y_NI = _through(x_TI[rows_N], experts.each[x])
        out_TI.index_add_(0, rows_N, y_NI * weights_TK[rows_N, places_N, None])
    return out_TI.to(x_TI.dtype)


def choose(logits_TX: Tensor, spec: ExpertSpec, bias_X: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """(weights_TK float32, ids_TK int64), the best first; the lower expert, and the lower group, wins ties."""
    wide_TX = logits_TX.to(torch.float32)
    score_TX = _sigmoid(wide_TX) if spec.is_sigmoid else wide_TX.softmax(dim=-1)
    rank_TX = score_TX if bias_X is None else score_TX + bias_X
    if spec.num_groups > 1:
        rank_TX = _of_best_groups(rank_TX, spec)
    ids_TK = rank_TX.sort(dim=-1, descending=True, stable=True).indices[:, : spec.num_chosen]
    weights_TK = score_TX.gather(1, ids_TK)
    if spec.is_renormalised:
        weights_TK = weights_TK / (weights_TK.sum(dim=-1, keepdim=True) + LEAST_SUM)
    return weights_TK * spec.factor, ids_TK


def _sigmoid(x_TX: Tensor) -> Tensor:
    """As a softmax over x and 0. torch's own rounds an element at the end of a tensor otherwise than elsewhere, so that
    a token's scores would depend on how many tokens there are; a softmax keeps to its row.
    """
    return torch.stack((x_TX, torch.zeros_like(x_TX)), dim=-1).softmax(dim=-1)[..., 0]


def _of_best_groups(rank_TX: Tensor, spec: ExpertSpec) -> Tensor:
    """Experts of other groups are worth nothing."""
    inside_TGX = rank_TX.view(len(rank_TX), spec.num_groups, -1)
    value_TG = inside_TGX.topk(2, -1).values.sum(-1) if spec.is_sigmoid else inside_TGX.amax(-1)
    best_TG = value_TG.sort(dim=-1, descending=True, stable=True).indices[:, : spec.num_groups_chosen]
    is_out_TG = torch.ones_like(value_TG, dtype=torch.bool).scatter_(1, best_TG, value=False)
    return inside_TGX.masked_fill(is_out_TG[:, :, None], -torch.inf).flatten(1)


def _through(x_NI: Tensor, pair: Gated) -> Tensor:
    gate_up, down = pair
    return down(cpu_ops.silu_mul(gate_up(x_NI))).to(torch.float32)
