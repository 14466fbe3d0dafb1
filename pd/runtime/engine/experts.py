"""A mixture of experts: each token goes through the MLPs of a few of them, and the sum of those, weighted, comes out.

    p = softmax(router x)        the k largest p, divided by their sum where the model says so
    out = sum over those of p_e * down_e(silu(gate_e x) * up_e x)

Every rank holds a part of each expert's columns, and the whole router: so all ranks choose alike, and their parts are
summed as an MLP's are. A token's choice and sum depend on nothing but the token: experts are added in their order, in
float32, and of two that tie the lower one is taken.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from pd.runtime.engine import cpu_ops
from pd.runtime.engine.layers import Linear, make_linear
from pd.runtime.engine.spec import ExpertSpec
from pd.runtime.engine.weights import Reader

# T tokens, X experts, K chosen ones a token, I hidden, N columns of gate and up together, C of one of them


@dataclass(frozen=True, slots=True)
class Experts:
    """One layer's, of one rank, in the form that its operators read; the other form is empty."""

    spec: ExpertSpec
    router: Linear
    gate_up_XNI: Tensor | None
    down_XIC: Tensor | None
    each: tuple[tuple[Linear, Linear], ...]  # gate and up as one, and down


def read_experts(spec: ExpertSpec, reader: Reader, at: str, *, stacked: bool) -> Experts:
    """`at`: the layer's name in the checkpoint, "model.layers.3.mlp.". `stacked`: as one tensor, as kernels want it."""
    router = make_linear(reader.read(f"{at}gate.weight"))
    if not stacked:
        pairs = tuple(
            (make_linear(reader.stack(_names(at, x, "gate", "up"))), make_linear(reader.stack(_names(at, x, "down"))))
            for x in range(spec.num_experts)
        )
        return Experts(spec, router, None, None, pairs)
    experts = range(spec.num_experts)
    gate_up = reader.stack(name for x in experts for name in _names(at, x, "gate", "up"))
    down = reader.stack(name for x in experts for name in _names(at, x, "down"))
    gate_up_XNI, down_XIC = (x.view(spec.num_experts, -1, x.shape[1]) for x in (gate_up, down))
    return Experts(spec, router, gate_up_XNI, down_XIC, ())


def _names(at: str, expert: int, *kinds: str) -> Iterator[str]:
    return (f"{at}experts.{expert}.{kind}_proj.weight" for kind in kinds)


def mix(x_TI: Tensor, experts: Experts) -> Tensor:
    """out_TI in PyTorch, and C++ where it was built. On a GPU every expert computes every token, so that nothing is
    asked of the device: this is what stands in where kernels cannot run.
    """
    weights_TK, ids_TK = choose(experts.router(x_TI), experts.spec)
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


def choose(logits_TX: Tensor, spec: ExpertSpec) -> tuple[Tensor, Tensor]:
    """(weights_TK float32, ids_TK int64), the best first; the lower expert wins ties."""
    best_TX = logits_TX.softmax(dim=-1, dtype=torch.float32).sort(dim=-1, descending=True, stable=True)
    weights_TK, ids_TK = best_TX.values[:, : spec.num_chosen], best_TX.indices[:, : spec.num_chosen]
    if spec.is_renormalised:
        weights_TK = weights_TK / weights_TK.sum(dim=-1, keepdim=True)
    return weights_TK, ids_TK


def _through(x_NI: Tensor, pair: tuple[Linear, Linear]) -> Tensor:
    gate_up, down = pair
    return down(cpu_ops.silu_mul(gate_up(x_NI))).to(torch.float32)
