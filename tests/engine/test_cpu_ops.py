"""Every CPU op against its plain PyTorch form or float64, on each instruction set this machine runs."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from pd.runtime.engine import cpu_build, cpu_ops, noise
from tests.engine.exact import DTYPES, LIMIT, distance, normal

pytestmark = pytest.mark.usefixtures("one_thread_and_poisoned_memory")


# ---- linear ---------------------------------------------------------------------------------------------------


def exact_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    out = x.double() @ weight.double().T
    return out if bias is None else out + bias.double()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_outputs", [1, 7, 16, 17, 64, 250])
@pytest.mark.parametrize("num_inputs", [1, 2, 33, 576])
def test_linear_equals_float64(isa: str, num_outputs: int, num_inputs: int, dtype: torch.dtype) -> None:
    weight = normal(num_outputs, num_inputs, seed=1, dtype=dtype)
    bias = normal(num_outputs, seed=2, dtype=dtype)
    packed = cpu_ops.pack(weight)
    for num_rows in (1, 2, 3, 4, 5, 6, 7, 11, 12, 13, 16, 29):
        x = normal(num_rows, num_inputs, seed=num_rows, dtype=dtype)
        for some_bias in (None, bias):
            got = cpu_ops.linear(x, packed, some_bias)
            assert got.dtype == dtype and got.shape == (num_rows, num_outputs)
            assert distance(got, exact_linear(x, weight, some_bias)) < LIMIT[dtype], num_rows


@pytest.mark.parametrize("dtype", DTYPES)
def test_linear_of_many_rows_and_long_inputs_equals_float64(isa: str, dtype: torch.dtype) -> None:
    weight = normal(96, 4099, seed=1, dtype=dtype)
    x = normal(150, 4099, seed=2, dtype=dtype)
    got, want = cpu_ops.linear(x, cpu_ops.pack(weight)), exact_linear(x, weight, None)
    assert distance(got, want) < LIMIT[dtype]
    if dtype == torch.bfloat16:  # rounded once: nearly always to the bf16 nearest to the true value
        assert float((got != want.to(dtype)).double().mean()) < 0.01


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_of_a_linear_has_the_same_bits_in_any_batch(isa: str, dtype: torch.dtype) -> None:
    packed = cpu_ops.pack(normal(200, 333, seed=1, dtype=dtype))
    x = normal(101, 333, seed=2, dtype=dtype)
    alone = torch.cat([cpu_ops.linear(x[i : i + 1], packed) for i in range(101)])
    most = cpu_ops.FEW_ROWS if packed.onednn is not None else 101
    for num_rows in (2, 3, 5, 6, 7, 12, 32, 40, 101):
        if num_rows > most:
            break
        assert torch.equal(cpu_ops.linear(x[:num_rows], packed), alone[:num_rows]), num_rows


def test_threads_change_no_bit_of_a_linear(isa: str) -> None:
    packed = cpu_ops.pack(normal(333, 64, seed=1, dtype=torch.bfloat16))
    x = normal(32, 64, seed=2, dtype=torch.bfloat16)
    one = cpu_ops.linear(x, packed)
    torch.set_num_threads(3)
    assert torch.equal(cpu_ops.linear(x, packed), one)


def test_linear_takes_leading_dims_strided_rows_and_no_rows(isa: str) -> None:
    weight = normal(20, 8, seed=1)
    packed = cpu_ops.pack(weight)
    wide = normal(2, 3, 40, seed=2)
    got = cpu_ops.linear(wide[..., 16:24], packed)
    assert got.shape == (2, 3, 20)
    assert distance(got, exact_linear(wide[..., 16:24], weight, None)) < 2e-6
    every_second = wide.view(6, 40)[::2, 8:16]
    assert distance(cpu_ops.linear(every_second, packed), exact_linear(every_second, weight, None)) < 2e-6
    assert cpu_ops.linear(wide.view(6, 40)[:0, :8], packed).shape == (0, 20)


def test_linear_rounds_to_the_nearest_even_bfloat16(isa: str) -> None:
    """1 + 2**-8 lies between two bf16 values, the even one is 1; 1 + 3 * 2**-8 goes up."""
    packed = cpu_ops.pack(torch.ones(17, 2, dtype=torch.bfloat16))
    x = torch.tensor([[1.0, 2**-8], [1.0, 3 * 2**-8], [-1.0, -(2**-8)], [torch.inf, 1.0]], dtype=torch.bfloat16)
    assert cpu_ops.linear(x, packed)[:, 16].tolist() == [1.0, 1 + 2**-6, -1.0, torch.inf]


def test_linear_names_shapes_that_do_not_fit(isa: str) -> None:
    packed = cpu_ops.pack(normal(20, 8, seed=1))
    with pytest.raises(RuntimeError, match="9 inputs"):
        cpu_ops.linear(normal(1, 9, seed=1), packed)
    with pytest.raises(RuntimeError, match="bias has 19 elements for 20 outputs"):
        cpu_ops.linear(normal(1, 8, seed=1), packed, torch.zeros(19))
    with pytest.raises(RuntimeError, match="BFloat16"):
        cpu_ops.linear(normal(1, 8, seed=1, dtype=torch.bfloat16), packed)


@pytest.mark.parametrize("num_rows", [1, 5, 40])
def test_linear_without_cpp_equals_float64(num_rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_build, "load", lambda: cpu_build.Native(None, "plain"))
    weight, bias = normal(2500, 64, seed=1, dtype=torch.bfloat16), normal(2500, seed=2, dtype=torch.bfloat16)
    x = normal(num_rows, 64, seed=3, dtype=torch.bfloat16)
    got = cpu_ops.linear(x, cpu_ops.pack(weight), bias)
    assert distance(got, exact_linear(x, weight, bias)) < LIMIT[torch.bfloat16]


# ---- the small ones -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1, 7, 8, 16, 33, 576, 1000])
@pytest.mark.parametrize("with_residual", [False, True])
def test_rms_norm_equals_the_reference(isa: str, size: int, with_residual: bool, dtype: torch.dtype) -> None:
    x = normal(5, 2 * size, seed=1, dtype=dtype)[:, size:]
    weight = normal(size, seed=2, dtype=dtype)
    given = x.clone()
    residual = normal(5, size, seed=3, dtype=dtype) if with_residual else None
    want_residual = residual.clone() if residual is not None else None
    want = cpu_ops.rms_norm_reference(x.clone(), weight, 1e-5, want_residual)
    got = cpu_ops.rms_norm(x, weight, 1e-5, residual)
    # The square root's last bit may tip a bf16 rounding over: rarely, and by one step.
    assert distance(got, want) < {torch.float32: 5e-7, torch.bfloat16: 1e-3}[dtype]
    assert torch.equal(x, given)
    if residual is not None and want_residual is not None:
        assert torch.equal(residual, want_residual)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1, 7, 16, 33, 1536])
def test_silu_mul_equals_the_reference(isa: str, size: int, dtype: torch.dtype) -> None:
    gate_up = normal(3, 2 * size, seed=size, dtype=dtype) * 8
    got, want = cpu_ops.silu_mul(gate_up), cpu_ops.silu_mul_reference(gate_up)
    assert got.shape == (3, size)
    assert distance(got, want) < {torch.float32: 5e-7, torch.bfloat16: 1e-3}[dtype]


def test_silu_mul_of_very_large_gates_is_finite(isa: str) -> None:
    gate_up = torch.tensor([[-1e4, -90.0, 0.0, 90.0, 1e4, 1.0, 1.0, 1.0, 1.0, 1.0]])
    assert cpu_ops.silu_mul(gate_up)[0].tolist() == pytest.approx([0, 0, 0, 90, 1e4], abs=1e-30)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("head_size", "half"), [(64, 32), (10, 5), (24, 6), (6, 1), (128, 64)])
def test_rope_and_write_equals_the_reference(isa: str, head_size: int, half: int, dtype: torch.dtype) -> None:
    num_tokens, heads, kv_heads, page_size = 11, 3, 2, 4
    qkv = normal(num_tokens, (heads + 2 * kv_heads) * head_size, seed=1, dtype=dtype)
    angle = normal(num_tokens, half, seed=2) * 3
    places = torch.randperm(8 * page_size, generator=torch.Generator().manual_seed(3))[:num_tokens]
    got, want = (
        rope(qkv.clone(), angle, places, head_size=head_size, shape=(heads, kv_heads, page_size), plain=plain)
        for plain in (False, True)
    )
    for name, ours, reference in zip(("qkv", "pool"), got, want, strict=True):
        assert torch.equal(ours.isnan(), reference.isnan()), name
        gap = distance(ours.nan_to_num(), reference.nan_to_num())
        assert gap < {torch.float32: 2e-7, torch.bfloat16: 1e-3}[dtype], name


def rope(
    qkv: Tensor,
    angle: Tensor,
    places: Tensor,
    *,
    head_size: int,
    shape: tuple[int, int, int],
    plain: bool,
) -> tuple[Tensor, Tensor]:
    """Rotates and writes into a pool of NaN; answers qkv and the pool."""
    heads, kv_heads, page_size = shape
    pool = torch.full((8, kv_heads, 3, 2, page_size, head_size), torch.nan, dtype=qkv.dtype)
    parts = qkv.view(len(qkv), -1, head_size).split([heads, kv_heads, kv_heads], dim=1)
    op = cpu_ops.rope_and_write_reference if plain else cpu_ops.rope_and_write
    op(
        (parts[0], parts[1], parts[2]),
        (angle.cos(), angle.sin()),
        (pool[:, :, 1, 0], pool[:, :, 1, 1]),
        pages_T=places // page_size,
        offsets_T=places % page_size,
    )
    return qkv, pool


def test_rope_refuses_a_place_outside_the_pool(isa: str) -> None:
    with pytest.raises(RuntimeError, match="goes to page 8 offset 1"):
        rope(normal(1, 40, seed=1), torch.zeros(1, 4), torch.tensor([33]), head_size=8, shape=(3, 1, 4), plain=False)


# ---- choosing -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1, 7, 8, 9, 100, 4099])
def test_argmax_equals_the_reference_ties_included(isa: str, size: int, dtype: torch.dtype) -> None:
    x = normal(20, size + 3, seed=size, dtype=dtype)[:, 3:]
    x[:10] = x[:10].round()
    x[10] = -torch.inf
    assert torch.equal(cpu_ops.argmax(x), cpu_ops.argmax_reference(x))


@pytest.mark.parametrize("spread", [0.0, 1.0, 10.0, 100.0])
@pytest.mark.parametrize("size", [1, 3, 31, 32, 33, 5000])
def test_race_equals_the_reference(isa: str, size: int, spread: float) -> None:
    logits = normal(40, size, seed=size) * spread
    floor = torch.where(torch.arange(40) % 2 == 0, -torch.inf, logits.median(dim=-1).values)
    logits[:, 0] = torch.where(torch.arange(40) % 4 < 2, -torch.inf, logits[:, 0]) if size > 1 else 0.0
    seed = torch.arange(40) * 0x123456789ABCDEF - 2**62
    position = torch.arange(40) * 12345
    want = noise.race(logits, floor, seed, position)
    assert torch.equal(cpu_ops.race(logits, floor, seed, position), want)


# ---- which ones are used --------------------------------------------------------------------------------------


def test_describe_says_what_runs() -> None:
    said = cpu_ops.describe()
    native = cpu_build.load().module
    if native is None:
        assert said.startswith("plain PyTorch (")
    else:
        assert said == f"C++ ops ({native.available()[0]})"


def test_a_changed_source_asks_for_another_module(tmp_path: object, monkeypatch: pytest.MonkeyPatch) -> None:
    before = cpu_build.module_path()
    if before is None:
        pytest.skip("no C++ ops on this kind of machine")
    monkeypatch.setattr(torch, "__version__", "0.0")
    assert cpu_build.module_path() != before
