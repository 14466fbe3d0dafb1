"""How near to exact an op in C++ must come, and what it is tried on."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from pd.runtime.engine.cpu_build import native_for

DTYPES = (torch.float32, torch.bfloat16)


def normal(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def distance(got: Tensor, want: Tensor) -> float:
    """Relative, by norm, in float64. NaN where got has any."""
    return float((got.double() - want.double()).norm() / want.double().norm().clamp(min=1e-30))


LIMIT = {torch.float32: 2e-6, torch.bfloat16: 2**-8}
"""bf16 keeps 8 bits: one rounding errs by at most 2**-8 of the value."""

needs_cpp = pytest.mark.skipif(
    native_for(torch.empty(0)) is None,
    reason="the C++ ops are not built here (python -m pd.runtime.engine.cpu_ops build); PyTorch promises less",
)
