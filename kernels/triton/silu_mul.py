"""The gate of a SwiGLU MLP: out = silu(gate) * up, silu(g) = g / (1 + e^-g), of a projection that holds both halves.

In 16 bits the silu is rounded before the product, as transformers' LlamaMLP does.
"""

import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from pd.kernels.target import target_of
from pd.kernels.tuning import launch_of

# T rows, N elements of a half


@triton.jit
def _gate(x, out, x_row, out_row, num_columns, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    gate = tl.load(x + row * x_row + n, mask=n < num_columns, other=0).to(tl.float32)
    up = tl.load(x + row * x_row + num_columns + n, mask=n < num_columns, other=0).to(tl.float32)
    silu = (gate / (1.0 + tl.exp(-gate))).to(out.dtype.element_ty).to(tl.float32)
    tl.store(out + row * out_row + n, (silu * up).to(out.dtype.element_ty), mask=n < num_columns)


def silu_mul(gate_up_T2N: Tensor, *, out: Tensor | None = None) -> Tensor:
    """out_TN of gate_up_T2N, its first half the gate. Unit stride in the last dim."""
    num_rows, width = gate_up_T2N.shape
    if width % 2 or (gate_up_T2N.numel() and gate_up_T2N.stride(1) != 1):
        raise ValueError(f"gate and up are {tuple(gate_up_T2N.shape)} with strides {gate_up_T2N.stride()}")
    out = gate_up_T2N.new_empty(num_rows, width // 2) if out is None else out
    if out.numel() == 0:
        return out
    target = target_of(out)
    launch = launch_of("silu_mul", target, width // 2)
    block = min(launch.block_n, triton.next_power_of_2(width // 2))
    _gate[(num_rows, triton.cdiv(width // 2, block))](
        *(gate_up_T2N, out, gate_up_T2N.stride(0), out.stride(0), width // 2),
        BLOCK=block,
        **launch.options(target),
    )
    return out


def reference(gate_up_T2N: Tensor) -> Tensor:
    gate, up = gate_up_T2N.chunk(2, dim=-1)
    return F.silu(gate) * up
