"""Which experts a token goes to, and with what weight.

    p = softmax(z), or sigmoid(z)          chosen by p + bias (DeepSeek-V3's, not part of the weight)
    of G groups of experts only the best g may give: a group counts as its best expert (softmax) or the sum of its two
    best (sigmoid); DeepSeek-V2, V3, 2024
    the k best of those; weight p, divided by their sum if renormalised, times a factor

The lower expert wins ties.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from pd.kernels.target import target_of
from pd.kernels.tuning import launch_of

# T tokens, X experts, K experts a token, G groups


@dataclass(frozen=True, slots=True)
class Routing:
    """How one model routes."""

    num_chosen: int  # K
    is_sigmoid: bool = False
    is_renormalised: bool = True
    factor: float = 1.0
    num_groups: int = 1
    num_groups_chosen: int = 1


@triton.jit
def _route(
    logits, bias, weights, ids, row_stride, factor,
    X: tl.constexpr, BLOCK_X: tl.constexpr, K: tl.constexpr, SIGMOID: tl.constexpr, BIASED: tl.constexpr,
    RENORMALISED: tl.constexpr, G: tl.constexpr, CHOSEN_G: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0).to(tl.int64)
    x = tl.arange(0, BLOCK_X)
    z = tl.load(logits + t * row_stride + x, mask=x < X, other=float("-inf")).to(tl.float32)
    if SIGMOID:
        p = 1.0 / (1.0 + tl.exp(-z))
    else:
        e = tl.exp(z - tl.max(z, 0))
        p = e / tl.sum(e, 0)
    rank = p
    if BIASED:
        rank += tl.load(bias + x, mask=x < X, other=0.0)
    rank = tl.where(x < X, rank, float("-inf"))
    if G > 1:
        group = x // (X // G)
        g = tl.arange(0, G)
        is_own = group[None, :] == g[:, None]
        inside = tl.where(is_own & (x < X)[None, :], rank[None, :], float("-inf"))
        value, at = tl.max(inside, 1, return_indices=True)
        if SIGMOID:
            value += tl.max(tl.where(x[None, :] == at[:, None], float("-inf"), inside), 1)
        is_kept = tl.zeros((BLOCK_X,), tl.int32)
        for _ in tl.static_range(CHOSEN_G):
            best = tl.argmax(value, 0)
            is_kept = tl.where(group == best, 1, is_kept)
            value = tl.where(g == best, float("-inf"), value)
        rank = tl.where(is_kept != 0, rank, float("-inf"))
    k = tl.arange(0, BLOCK_K)
    chosen = tl.zeros((BLOCK_K,), tl.int32)
    weight = tl.zeros((BLOCK_K,), tl.float32)
    for i in tl.static_range(K):
        best = tl.argmax(rank, 0)
        chosen = tl.where(k == i, best, chosen)
        weight = tl.where(k == i, tl.sum(tl.where(x == best, p, 0.0), 0), weight)
        rank = tl.where(x == best, float("-inf"), rank)
    if RENORMALISED:
        weight /= tl.sum(weight, 0) + 1e-20
    tl.store(weights + t * K + k, weight * factor, mask=k < K)
    tl.store(ids + t * K + k, chosen, mask=k < K)


def route(logits_TX: Tensor, routing: Routing, bias_X: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """(weights_TK float32, ids_TK int32), the best first. logits: any float dtype, unit stride in X; bias: float32."""
    num_tokens, num_experts = logits_TX.shape
    r = routing
    if not 1 <= r.num_chosen <= num_experts // r.num_groups * r.num_groups_chosen or num_experts % r.num_groups:
        raise ValueError(f"{r} of {num_experts} experts")
    if r.num_groups & (r.num_groups - 1):
        raise ValueError(f"{r.num_groups} groups of experts; a power of two is wanted")
    weights_TK = torch.empty(num_tokens, r.num_chosen, dtype=torch.float32, device=logits_TX.device)
    ids_TK = torch.empty(num_tokens, r.num_chosen, dtype=torch.int32, device=logits_TX.device)
    if num_tokens == 0:
        return weights_TK, ids_TK
    target = target_of(logits_TX)
    _route[(num_tokens,)](
        *(logits_TX, logits_TX if bias_X is None else bias_X, weights_TK, ids_TK, logits_TX.stride(0), r.factor),
        X=num_experts,
        BLOCK_X=triton.next_power_of_2(num_experts),
        K=r.num_chosen,
        SIGMOID=r.is_sigmoid,
        BIASED=bias_X is not None,
        RENORMALISED=r.is_renormalised,
        G=r.num_groups,
        CHOSEN_G=r.num_groups_chosen,
        BLOCK_K=triton.next_power_of_2(r.num_chosen),
        **launch_of("moe_route", target, num_experts).options(target),
    )
    return weights_TK, ids_TK


def reference(logits_TX: Tensor, routing: Routing, bias_X: Tensor | None = None) -> tuple[Tensor, Tensor]:
    z_TX = logits_TX.float()
    p_TX = z_TX.sigmoid() if routing.is_sigmoid else z_TX.softmax(-1)
    rank_TX = p_TX if bias_X is None else p_TX + bias_X
    if routing.num_groups > 1:
        grouped_TGX = rank_TX.unflatten(1, (routing.num_groups, -1))
        value_TG = grouped_TGX.topk(2, -1).values.sum(-1) if routing.is_sigmoid else grouped_TGX.amax(-1)
        kept = value_TG.topk(routing.num_groups_chosen, -1).indices
        is_kept_TG = torch.zeros_like(value_TG, dtype=torch.bool).scatter_(1, kept, True)
        rank_TX = grouped_TGX.masked_fill(~is_kept_TG[:, :, None], -torch.inf).flatten(1)
    ids_TK = rank_TX.topk(routing.num_chosen, -1).indices
    weights_TK = p_TX.gather(1, ids_TK)
    if routing.is_renormalised:
        weights_TK = weights_TK / (weights_TK.sum(-1, keepdim=True) + 1e-20)
    return weights_TK * routing.factor, ids_TK.int()
