"""Builds kernels/cpu into an extension module beside this file, and loads it where it fits.

The module's name carries a hash of the sources, torch's version and Python's: after any of them changes, the
old one is not found and the ops fall back to plain PyTorch until the next build, which `describe()` says.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


class NativeOps(Protocol):
    """The extension module's functions; cpu_ops says what each means. Layouts are checked there, in C++."""

    def pack(self, weight_NI: Tensor, /) -> Tensor: ...
    def linear(self, x_MI: Tensor, panels: Tensor, num_outputs: int, bias_N: Tensor | None, /) -> Tensor: ...
    def paged_decode(
        self,
        q_BHE: Tensor,
        pools: tuple[Tensor, Tensor],
        context: tuple[Tensor, Tensor],
        kv_head_of_query_H: Tensor,
        scale: float,
        window: int,
        /,
    ) -> Tensor: ...
    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, residual: Tensor | None, /) -> Tensor: ...
    def silu_mul(self, gate_up: Tensor, /) -> Tensor: ...
    def rope_and_write(
        self,
        qkv: tuple[Tensor, Tensor, Tensor],
        angles: tuple[Tensor, Tensor],
        pools: tuple[Tensor, Tensor],
        places: tuple[Tensor, Tensor],
        /,
    ) -> None: ...
    def argmax(self, x_BV: Tensor, /) -> Tensor: ...
    def race(self, logits_RV: Tensor, floor_R: Tensor, seed_R: Tensor, position_R: Tensor, /) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class Native:
    module: NativeOps | None
    description: str


@functools.cache
def load() -> Native:
    """The extension module, or why there is none. Looked for once a process."""
    return Native(None, "plain PyTorch (no C++ ops built)")


def build() -> str:
    """Compile if need be. Answers what is there now, in words."""
    return load().description


@functools.cache
def has_bf16_gemm() -> bool:
    """Whether oneDNN multiplies bf16 matrices at full speed here."""
    return bool(torch.cpu._is_avx512_bf16_supported())
