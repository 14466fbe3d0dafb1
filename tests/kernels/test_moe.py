"""Routing, sorting and the grouped product of a mixture of experts, apart and as one layer."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from pd.kernels import grouped_gemm, moe_route, moe_sort, silu_mul
from pd.kernels.moe_route import Routing
from tests.kernels.bench import TOLERANCE, Fenced, error, randn

BF16 = torch.bfloat16


@pytest.mark.parametrize(
    ("num_experts", "routing", "has_bias"),
    [
        (8, Routing(2), False),
        (60, Routing(4, is_renormalised=False), False),
        (64, Routing(8, factor=2.5, num_groups=8, num_groups_chosen=4, is_sigmoid=True), True),
        (64, Routing(6, is_renormalised=False, factor=16.0, num_groups=8, num_groups_chosen=3), False),
        (5, Routing(5, is_sigmoid=True), True),
        (1, Routing(1), False),
    ],
)
def test_routing_equals_its_reference(num_experts: int, routing: Routing, has_bias: bool, device: torch.device) -> None:
    logits = randn(5, num_experts + 1, seed=num_experts, device=device)[:, :num_experts]
    bias = randn(num_experts, seed=1, device=device) / 10 if has_bias else None
    weights, ids = moe_route.route(logits, routing, bias)
    expected_weights, expected_ids = moe_route.reference(logits, routing, bias)
    assert torch.equal(ids, expected_ids)
    assert error(weights, expected_weights) < 1e-6


def test_routing_of_no_tokens_and_of_too_many_experts(device: torch.device) -> None:
    weights, ids = moe_route.route(torch.empty(0, 8, device=device), Routing(2))
    assert weights.shape == ids.shape == (0, 2)
    with pytest.raises(ValueError, match="of 8 experts"):
        moe_route.route(torch.empty(1, 8, device=device), Routing(3, num_groups=4, num_groups_chosen=1))


@pytest.mark.parametrize(
    ("num_tokens", "chosen", "num_experts", "tile"),
    [(1, 1, 1, 16), (7, 2, 5, 16), (150, 4, 9, 16), (3, 2, 24, 16), (0, 2, 4, 16)],
)
def test_sorting_keeps_order_and_pads_with_nothing(
    num_tokens: int, chosen: int, num_experts: int, tile: int, device: torch.device
) -> None:
    generator = torch.Generator().manual_seed(num_tokens)
    ids = torch.randint(0, max(1, num_experts - 1), (num_tokens, chosen), generator=generator).int().to(device)
    pairs, experts = moe_sort.sort_pairs(ids, num_experts, tile)
    expected_pairs, expected_experts = moe_sort.reference(ids, num_experts, tile)
    assert torch.equal(experts.cpu(), expected_experts)
    assert torch.equal(pairs.cpu(), expected_pairs)


@pytest.mark.parametrize("dtype", [torch.float32, BF16])
@pytest.mark.parametrize("share", [1, 2])
def test_grouped_product_equals_its_reference(share: int, dtype: torch.dtype, device: torch.device) -> None:
    ids = torch.tensor([[0, 3], [3, 1], [0, 3], [3, 0], [1, 3]], dtype=torch.int32, device=device)
    weights = randn(4, 70, 90, seed=2, dtype=dtype, device=device)
    x = randn(10 // share, 90, seed=3, dtype=dtype, device=device)
    out = Fenced((10, 70), dtype, device)
    tiles = moe_sort.sort_pairs(ids, 4, grouped_gemm.tile_rows(10, 4, x))
    grouped_gemm.grouped_gemm(x, weights, tiles, num_pairs=10, share=share, out=out.tensor)
    out.check()
    assert error(out.tensor, grouped_gemm.reference(x, weights, ids, share=share)) < TOLERANCE[dtype]


def test_a_layer_of_experts_is_the_sum_of_their_mlps(device: torch.device) -> None:
    x = randn(6, 32, seed=1, device=device)
    gate_up, down = randn(8, 48, 32, seed=2, device=device) / 6, randn(8, 32, 24, seed=3, device=device) / 5
    weights, ids = moe_route.route(x @ randn(32, 8, seed=4, device=device), Routing(3))
    tiles = moe_sort.sort_pairs(ids, 8, grouped_gemm.tile_rows(18, 8, x))
    inner = silu_mul.silu_mul(grouped_gemm.grouped_gemm(x, gate_up, tiles, num_pairs=18, share=3))
    out = grouped_gemm.combine(grouped_gemm.grouped_gemm(inner, down, tiles, num_pairs=18, share=1), weights)
    expected = torch.zeros(6, 32, dtype=torch.float64, device=device)
    for t in range(6):
        for weight, expert in zip(weights[t].double(), ids[t].tolist(), strict=True):
            gate, up = (gate_up[expert].double() @ x[t].double()).chunk(2)
            expected[t] += weight * (down[expert].double() @ (F.silu(gate) * up))
    assert error(out, expected) < 1e-6
