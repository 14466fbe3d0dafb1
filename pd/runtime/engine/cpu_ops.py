"""The few operations that decide a CPU step's speed: C++ where it was built, else plain PyTorch, with the
same contract.

Rules
1. Every op has its plain PyTorch form beside it, `*_reference`: the meaning, the fallback and what the
   tests compare with. It runs on any device; the C++ only on CPU tensors. No gradients.
2. `describe()` says which of the two a process uses; it is chosen once, when the first op is called.
3. C++ results do not depend on the number of threads. `linear` gives a row the same bits in any batch, and
   attention (cpu_attention.py) a token in any batch and chunk.
4. bfloat16 is widened to float32, accumulated there, and rounded to nearest even once on the way out, but
   where a docstring names a rounding in between (there to follow transformers' bf16 modules).

Built by `python -m pd.runtime.engine.cpu_ops build` from kernels/cpu/.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from pd.runtime.engine import cpu_build, noise
from pd.runtime.engine.cpu_build import native_for
from pd.transfer.float8 import bits, cast

# M rows, N outputs, I inputs of a linear; B requests, T tokens, H query heads, K kv heads, E head size, D = E/2,
# P pages, S tokens a page, V vocabulary, R rows drawn at random

FEW_ROWS = 32
"""With avx512_bf16: up to here a linear waits for its weights, beyond it oneDNN's blocking, or AMX, pays."""
WIDEN_FROM_ROWS = 4
"""Without C++ and without avx512_bf16: from here on widening the weight and a float32 GEMM beat torch's
bf16 linear (0.44 against 0.81 ms at 4 rows of 576 -> 1536, 16 against 118 ms at 512 rows, one Zen 3
core)."""
WIDEN_OUTPUTS = 1024
"""Outputs widened at a time: the scratch stays in cache and out of mmap's reach."""


def describe() -> str:
    """For the start-up line: what the ops of this process run on, and if not on C++, why not."""
    return cpu_build.load().description


# ---- linear ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Packed:
    """A linear layer's weight in the order its fastest form reads. Made by `pack`."""

    num_outputs: int
    num_inputs: int
    dtype: torch.dtype
    panels: Tensor | None  # C++'s: 16 outputs side by side, inputs in pairs
    onednn: Tensor | None  # oneDNN's, opaque
    weight_NI: Tensor | None  # the given tensor itself, where neither takes it


def pack(weight_NI: Tensor) -> Packed:
    """Prepare a weight for `linear`. With C++ the result is a copy and the given tensor may be freed.

    With C++ and avx512_bf16 it is two: one for few rows, one in oneDNN's order for many.
    """
    num_outputs, num_inputs = weight_NI.shape
    native = native_for(weight_NI)
    onednn = None
    if weight_NI.is_cpu and weight_NI.dtype == torch.bfloat16 and cpu_build.has_bf16_gemm():
        onednn = torch.ops.mkldnn._reorder_linear_weight(weight_NI.to_mkldnn())
    panels = None if native is None else native.pack(weight_NI.contiguous())
    given_NI = weight_NI if panels is None and onednn is None else None
    return Packed(num_outputs, num_inputs, weight_NI.dtype, panels, onednn, given_NI)


def linear(x_MI: Tensor, packed: Packed, bias_N: Tensor | None = None) -> Tensor:
    """x @ weight.T + bias, in x's dtype. x: any leading dims, unit stride in the last; x and bias of the weight's
    dtype.

    In C++ each output is one chain of fused multiply-adds over the inputs in order, in float32 (with avx512_bf16:
    over pairs of inputs), then bias, then one rounding. So a row's bits are the same for every number of rows and
    threads; with avx512_bf16 for up to FEW_ROWS rows, beyond which oneDNN computes.
    """
    num_rows = x_MI.numel() // packed.num_inputs
    if packed.panels is not None and (packed.onednn is None or num_rows <= FEW_ROWS):
        native = cpu_build.load().module
        assert native is not None
        return native.linear(x_MI, packed.panels, packed.num_outputs, bias_N)
    if packed.onednn is not None:
        out: Tensor = torch.ops.mkldnn._linear_pointwise(x_MI, packed.onednn, bias_N, "none", [], "")
        return out
    assert packed.weight_NI is not None
    if x_MI.dtype == torch.bfloat16 and x_MI.is_cpu and num_rows >= WIDEN_FROM_ROWS:
        return _widened_linear(x_MI, packed.weight_NI, bias_N)
    return linear_reference(x_MI, packed.weight_NI, bias_N)


def linear_reference(x_MI: Tensor, weight_NI: Tensor, bias_N: Tensor | None = None) -> Tensor:
    return F.linear(x_MI, weight_NI, bias_N)


def _widened_linear(x_MI: Tensor, weight_NI: Tensor, bias_N: Tensor | None) -> Tensor:
    """bf16 through float32 GEMMs, a slice of outputs at a time."""
    wide_MI = x_MI.to(torch.float32)
    out_MN = x_MI.new_empty(*x_MI.shape[:-1], weight_NI.shape[0])
    for start in range(0, weight_NI.shape[0], WIDEN_OUTPUTS):
        part = slice(start, start + WIDEN_OUTPUTS)
        bias = None if bias_N is None else bias_N[part].to(torch.float32)
        out_MN[..., part] = F.linear(wide_MI, weight_NI[part].to(torch.float32), bias)
    return out_MN


# ---- the small ones of a layer ---------------------------------------------------------------------------


def rms_norm(x_TI: Tensor, weight_I: Tensor, eps: float, residual_TI: Tensor | None = None) -> Tensor:
    """Root-mean-square norm over the last dim, times weight (Zhang, Sennrich 2019), as transformers'
    LlamaRMSNorm.

    With a residual: first `residual += x` in place, then the norm of that sum. x may have any leading dims
    and strides of rows; it is not changed. In bf16 the sum and the normed value are rounded before the
    weight, as transformers do.
    """
    native = native_for(x_TI)
    if native is None:
        return rms_norm_reference(x_TI, weight_I, eps, residual_TI)
    return native.rms_norm(x_TI, weight_I, eps, residual_TI)


def rms_norm_reference(x_TI: Tensor, weight_I: Tensor, eps: float, residual_TI: Tensor | None = None) -> Tensor:
    if residual_TI is not None:
        x_TI = residual_TI.add_(x_TI)
    wide_TI = x_TI.to(torch.float32)
    inverse_T1 = torch.rsqrt(wide_TI.square().mean(-1, keepdim=True) + eps)
    return weight_I * (wide_TI * inverse_T1).to(x_TI.dtype)


def silu_mul(gate_up_TI: Tensor) -> Tensor:
    """silu(first half of the last dim) * second half. In bf16 the silu is rounded before the product."""
    native = native_for(gate_up_TI)
    if native is None:
        return silu_mul_reference(gate_up_TI)
    return native.silu_mul(gate_up_TI)


def silu_mul_reference(gate_up_TI: Tensor) -> Tensor:
    gate, up = gate_up_TI.chunk(2, dim=-1)
    return F.silu(gate) * up


def rope_and_write(
    qkv: tuple[Tensor, Tensor, Tensor],
    angles: tuple[Tensor, Tensor],
    pools: tuple[Tensor, Tensor],
    *,
    pages_T: Tensor,
    offsets_T: Tensor,
) -> None:
    """Rotate q in place, and write rotated k, and v, into their places in one layer of the pool.

    qkv: q_THE, k_TKE, v_TKE, unit stride in E, else any (parts of one projection's output). Only q is
    changed. angles: cos_TD, sin_TD, float32, D = half of the rotated elements: element d pairs with d + D,
    as transformers' rotate_half; elements from 2D on pass unrotated. pools: k_PKSE, v_PKSE, views with unit
    stride in E. pages_T, offsets_T: int64; token t goes to (page, offset in page).
    """
    native = native_for(qkv[0])
    if native is None:
        rope_and_write_reference(qkv, angles, pools, pages_T=pages_T, offsets_T=offsets_T)
    else:
        native.rope_and_write(qkv, angles, pools, (pages_T, offsets_T))


def rope_and_write_reference(
    qkv: tuple[Tensor, Tensor, Tensor],
    angles: tuple[Tensor, Tensor],
    pools: tuple[Tensor, Tensor],
    *,
    pages_T: Tensor,
    offsets_T: Tensor,
) -> None:
    """Takes float8 pools as well."""
    q_THE, k_TKE, v_TKE = qkv
    q_THE.copy_(_rotate(q_THE, angles))
    for x_TKE, pool_PKSE in zip((_rotate(k_TKE, angles), v_TKE), pools, strict=True):
        bits(pool_PKSE)[pages_T, :, offsets_T] = bits(cast(x_TKE, pool_PKSE.dtype))


def _rotate(x_THE: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
    cos_T1D, sin_T1D = angles[0][:, None], angles[1][:, None]
    half = cos_T1D.shape[-1]
    wide_THE = x_THE.to(torch.float32)
    low, high, rest = wide_THE[..., :half], wide_THE[..., half : 2 * half], wide_THE[..., 2 * half :]
    turned = (low * cos_T1D - high * sin_T1D, high * cos_T1D + low * sin_T1D, rest)
    return torch.cat(turned, dim=-1).to(x_THE.dtype)


# ---- sampling --------------------------------------------------------------------------------------------


def argmax(x_BV: Tensor) -> Tensor:
    """The largest of each row, the lowest index on ties. int64."""
    native = native_for(x_BV)
    if native is None:
        return argmax_reference(x_BV)
    return native.argmax(x_BV)


def argmax_reference(x_BV: Tensor) -> Tensor:
    return x_BV.argmax(dim=-1)


def race(logits_RV: Tensor, floor_R: Tensor, seed_R: Tensor, position_R: Tensor) -> Tensor:
    """`noise.race`, to which this is equal but where two scores agree to the last bits of a logarithm."""
    native = native_for(logits_RV)
    if native is None:
        return noise.race(logits_RV, floor_R, seed_R, position_R)
    return native.race(logits_RV, floor_R, seed_R, position_R)


def main(argv: Sequence[str]) -> int:
    """`build`: compile for this machine's Python and torch. `describe`: say what would be used."""
    match list(argv):
        case ["build"]:
            try:
                sys.stdout.write(f"{cpu_build.build()}\n")
            except cpu_build.BuildError as error:
                sys.stderr.write(f"error: {error}\n")
                return 1
        case ["describe"]:
            sys.stdout.write(f"{describe()}\n")
        case _:
            sys.stderr.write("usage: python -m pd.runtime.engine.cpu_ops build | describe\n")
            return 2
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
