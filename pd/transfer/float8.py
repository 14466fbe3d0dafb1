"""float8 e4m3fn in PyTorch, whose own cast makes NaN of what is too large and whose indexing does not know the type.

Alike on every GPU and CPU: pages hold the bits of e4m3fn, also where the hardware means e4m3fnuz by them (gfx942).
"""

from __future__ import annotations

import torch
from torch import Tensor

E4M3 = torch.float8_e4m3fn
LARGEST = 448.0


def cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x in this dtype, rounded to nearest even. In e4m3fn what is beyond 448 is 448, as in `pd.kernels.e4m3`."""
    if x.dtype is dtype:
        return x
    return (x.clamp(-LARGEST, LARGEST) if dtype is E4M3 else x).to(dtype)


def bits(x: Tensor) -> Tensor:
    """x itself, or e4m3fn's bytes: what can be indexed on any device."""
    return x.view(torch.uint8) if x.dtype is E4M3 else x
