"""Root-mean-square norm, and the residual sum before it.

    residual += x (in place, where there is one)        out = weight * (s / sqrt(mean(s^2) + eps)),  s = that sum, or x

(Zhang, Sennrich 2019.) In 16 bits the sum and the normed value are rounded before the weight, as transformers'
LlamaRMSNorm does; the mean is of the rounded sum, in float32.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from pd.kernels.target import target_of
from pd.kernels.tuning import launch_of

# T rows, H heads of a row where each has a norm of its own, I elements


@triton.jit
def _norm(
    x, weight, residual, out, num_heads, x_row, x_head, residual_row, eps,
    SIZE: tl.constexpr, BLOCK: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
):  # fmt: skip
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    i = tl.arange(0, BLOCK)
    values = tl.load(x + row * x_row + head * x_head + i, mask=i < SIZE, other=0).to(tl.float32)
    if HAS_RESIDUAL:
        at = residual + row * residual_row + i
        values += tl.load(at, mask=i < SIZE, other=0).to(tl.float32)
        rounded = values.to(residual.dtype.element_ty)
        tl.store(at, rounded, mask=i < SIZE)
        values = rounded.to(tl.float32)
    normed = values * tl.rsqrt(tl.sum(values * values, 0) / SIZE + eps)
    w = tl.load(weight + i, mask=i < SIZE, other=0)
    normed = normed.to(out.dtype.element_ty).to(tl.float32) * w.to(tl.float32)
    tl.store(out + (row * num_heads + head) * SIZE + i, normed.to(out.dtype.element_ty), mask=i < SIZE)


def rms_norm(
    x: Tensor, weight_I: Tensor, eps: float, residual_TI: Tensor | None = None, *, out: Tensor | None = None
) -> Tensor:
    """Norm over the last dim of x_TI or x_THI, contiguous. `residual_TI += x` first, in place. x is not changed.

    Unit stride in the last dim; a residual goes with x_TI. Raises ValueError where shapes do not fit.
    """
    if x.shape[-1] != weight_I.shape[0] or x.ndim not in (2, 3) or (x.numel() and x.stride(-1) != 1):
        raise ValueError(f"x is {tuple(x.shape)}, strides {x.stride()}; the weight has {weight_I.shape[0]} elements")
    if residual_TI is not None and residual_TI.shape != x.shape:
        raise ValueError(f"x is {tuple(x.shape)}, the residual {tuple(residual_TI.shape)}")
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device) if out is None else out
    if x.numel() == 0:
        return out
    num_heads = x.shape[1] if x.ndim == 3 else 1
    target = target_of(x)
    _norm[(x.shape[0], num_heads)](
        *(x, weight_I, x if residual_TI is None else residual_TI, out, num_heads, x.stride(0)),
        *(x.stride(1) if x.ndim == 3 else 0, 0 if residual_TI is None else residual_TI.stride(0), eps),
        SIZE=x.shape[-1],
        BLOCK=triton.next_power_of_2(x.shape[-1]),
        HAS_RESIDUAL=residual_TI is not None,
        **launch_of("rms_norm", target, x.shape[-1]).options(target),
    )
    return out


def reference(x: Tensor, weight_I: Tensor, eps: float, residual_TI: Tensor | None = None) -> Tensor:
    if residual_TI is not None:
        x = residual_TI.add_(x)
    wide = x.to(torch.float32)
    inverse = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return weight_I * (wide * inverse).to(x.dtype)
