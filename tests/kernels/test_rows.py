"""Norms, the gate, rotation and KV writes do what their formula says, to all of the output and nothing beside it."""

from __future__ import annotations

import pytest
import torch

from pd.kernels import e4m3, kv_write, rms_norm, silu_mul
from tests.kernels.bench import DTYPES, Fenced, error, heads_outermost_pool, randn

BF16, E4M3 = torch.bfloat16, torch.float8_e4m3fn


def close(dtype: torch.dtype) -> float:
    """One rounding of the dtype, where a sum in another order falls on the other side of a tie."""
    return {torch.float32: 2e-7, torch.float16: 5e-4, BF16: 4e-3}[dtype]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 8), (5, 576), (3, 1000)])
@pytest.mark.parametrize("has_residual", [False, True])
def test_norm_equals_its_reference(
    shape: tuple[int, int], has_residual: bool, dtype: torch.dtype, device: torch.device
) -> None:
    x = randn(shape[0], shape[1] + 3, seed=1, dtype=dtype, device=device)[:, : shape[1]]
    weight = randn(shape[1], seed=2, dtype=dtype, device=device)
    residual = randn(*shape, seed=3, dtype=dtype, device=device) if has_residual else None
    expected_sum = None if residual is None else residual.clone()
    expected = rms_norm.reference(x, weight, 1e-5, expected_sum)
    out = Fenced(shape, dtype, device)
    rms_norm.rms_norm(x, weight, 1e-5, residual, out=out.tensor)
    out.check()
    assert error(out.tensor, expected) < close(dtype)
    if residual is not None:
        assert torch.equal(residual, expected_sum)


def test_norm_of_heads_reads_a_strided_projection(device: torch.device) -> None:
    qkv = randn(4, 12, 64, seed=1, dtype=BF16, device=device)
    weight = randn(64, seed=2, dtype=BF16, device=device)
    out = rms_norm.rms_norm(qkv[:, 9:12], weight, 1e-6)
    assert out.is_contiguous()
    assert error(out, rms_norm.reference(qkv[:, 9:12], weight, 1e-6)) < close(BF16)


def test_no_rows_are_no_work(device: torch.device) -> None:
    assert rms_norm.rms_norm(torch.empty(0, 8, device=device), torch.ones(8, device=device), 1e-5).shape == (0, 8)
    assert silu_mul.silu_mul(torch.empty(0, 8, device=device)).shape == (0, 4)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1, 100, 1025])
def test_gate_equals_its_reference(size: int, dtype: torch.dtype, device: torch.device) -> None:
    x = randn(3, 2 * size + 5, seed=size, dtype=dtype, device=device)[:, : 2 * size] * 4
    out = Fenced((3, size), dtype, device)
    silu_mul.silu_mul(x, out=out.tensor)
    out.check()
    assert error(out.tensor, silu_mul.reference(x)) < close(dtype)


PLACES = ([5, 0, 3, 5], [0, 7, 3, 7])  # page and offset of four tokens


def pools_of(dtype: torch.dtype, num_kv: int, size: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    k, v = heads_outermost_pool(6, (num_kv, 8, size, size), dtype=dtype, device=device, seed=9)
    return (k, v) if dtype != E4M3 else (k.view(torch.uint8), v.view(torch.uint8))


@pytest.mark.parametrize("pages", [PLACES[0], [-1, 0, -1, 5]])
@pytest.mark.parametrize(("dtype", "kv"), [(torch.float32, torch.float32), (BF16, BF16), (BF16, E4M3)])
def test_kv_write_fills_its_places_alone(
    dtype: torch.dtype, kv: torch.dtype, pages: list[int], device: torch.device
) -> None:
    pool, _ = pools_of(kv, 3, 80, device)
    expected = pool.clone(memory_format=torch.contiguous_format)
    x = randn(4, 6, 80, seed=4, dtype=dtype, device=device)[:, 3:] * 30
    places = {"pages_T": torch.tensor(pages, device=device), "offsets_T": torch.tensor(PLACES[1], device=device)}
    kv_write.kv_write(x, pool, **places, scale=0.5 if kv == E4M3 else 1.0)
    kv_write.reference(x, expected, **places, scale=0.5 if kv == E4M3 else 1.0)
    assert torch.equal(pool, expected)
    storage = pool.as_strided((6, 3, 1, 16 * 80), pool.stride(), 0)  # the other layer, before ours
    assert storage.isnan().all() if storage.is_floating_point() else (storage & 0x7F == 0x7F).all()


@pytest.mark.parametrize(("dtype", "kv"), [(torch.float32, torch.float32), (BF16, BF16), (torch.float16, E4M3)])
@pytest.mark.parametrize(("size", "half"), [(8, 4), (80, 40), (64, 16)])
def test_rotated_keys_and_queries(
    dtype: torch.dtype, kv: torch.dtype, size: int, half: int, device: torch.device
) -> None:
    """Whole heads, odd sizes, and heads that are rotated in part."""
    k_pool, v_pool = pools_of(kv, 3, size, device)
    k_before, v_before = (pool.clone(memory_format=torch.contiguous_format) for pool in (k_pool, v_pool))
    qkv = randn(4, 15, size, seed=6, dtype=dtype, device=device)
    q, k, v = qkv.split_with_sizes((9, 3, 3), dim=1)
    turns = randn(4, half, seed=7, device=device)
    angles = turns.cos(), turns.sin()
    q_expected, k_expected = (kv_write.rope_reference(x, angles).to(dtype) for x in (q, k))
    k_kept, v_kept = k.clone(), v.clone()
    pages, offsets = (torch.tensor(values, device=device) for values in PLACES)
    kv_write.rope_and_write((q, k, v), angles, (k_pool, v_pool), pages_T=pages, offsets_T=offsets)
    assert torch.equal(k, k_kept) and torch.equal(v, v_kept)
    assert error(q, q_expected) < close(dtype) / 4
    kv_write.reference(v, v_before, pages_T=pages, offsets_T=offsets)
    kv_write.reference(k_expected, k_before, pages_T=pages, offsets_T=offsets)
    assert torch.equal(v_pool, v_before)
    written, expected = k_pool[pages, :, offsets], k_before[pages, :, offsets]
    if kv == E4M3:  # a tie may fall on the other side after rotating in float32
        written, expected = (x.view(E4M3).float() for x in (written, expected))
    assert error(written, expected) < (0.01 if kv == E4M3 else close(dtype) / 4)
    k_pool[pages, :, offsets] = k_before[pages, :, offsets]
    assert torch.equal(k_pool, k_before), "written beside its places"


def test_every_e4m3_code_and_every_rounding(device: torch.device) -> None:
    """All codes widen to their value; values between codes, ties among them, narrow as PyTorch's cast does."""
    codes = torch.arange(256, dtype=torch.uint8, device=device)
    codes = codes[(codes & 0x7F) != 0x7F]  # NaN
    exact = codes.view(E4M3).float()
    between = torch.cat([(exact[:-1] + exact[1:]) / 2, exact * 1.01, exact * 0.99, torch.tensor([1e9, -500.0, 1e-9])])
    values = torch.cat([exact, between])
    pool = torch.zeros(1, 1, 1, len(values), dtype=torch.uint8, device=device)
    place = torch.zeros(1, dtype=torch.int64, device=device)
    kv_write.kv_write(values[None, None], pool, pages_T=place, offsets_T=place)
    assert torch.equal(pool.flatten(), e4m3.reference(values))
    assert torch.equal(pool.flatten()[: len(codes)], codes)
