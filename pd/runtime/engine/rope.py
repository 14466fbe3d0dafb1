"""Rotary embeddings' angles, number for number as transformers computes them (modeling_rope_utils, 5.24).

In float32 on the CPU whatever the model's dtype: a device's own powers and cosines differ in the last bit.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from pd.runtime.engine.rope_spec import RopeSpec, mscale

# N positions, D half a head's elements


def angles(rope: RopeSpec, head_dim: int, num_positions: int) -> tuple[Tensor, Tensor]:
    """cos_ND and sin_ND, float32, times the kind's attention factor."""
    frequencies_D, factor = inverse_frequencies(rope, head_dim)
    angles_ND = torch.arange(num_positions).to(torch.float32)[:, None] * frequencies_D
    return angles_ND.cos() * factor, angles_ND.sin() * factor


def inverse_frequencies(rope: RopeSpec, head_dim: int) -> tuple[Tensor, float]:
    """Radians a position for each pair of elements, and what cosines and sines are multiplied by."""
    plain_D = 1.0 / _wavelengths(rope.theta, head_dim)
    match rope.kind:
        case "linear":
            return plain_D / rope.factor, 1.0
        case "llama3":
            return _llama3(rope, plain_D), 1.0
        case "yarn":
            return _yarn(rope, head_dim), _yarn_attention_factor(rope)
        case _:  # default, and dynamic up to the trained length: see RopeSpec.stretched
            return plain_D, 1.0


def _wavelengths(theta: float, head_dim: int) -> Tensor:
    return theta ** (torch.arange(0, head_dim, 2).to(torch.float32) / head_dim)


def _llama3(rope: RopeSpec, plain_D: Tensor) -> Tensor:
    """Long waves slowed by `factor`, short ones kept, a smooth step between (Llama 3.1)."""
    low, high = rope.low_freq_factor, rope.high_freq_factor
    wavelength_D = 2 * math.pi / plain_D
    slowed_D = torch.where(wavelength_D > rope.original_max_positions / low, plain_D / rope.factor, plain_D)
    smooth_D = (rope.original_max_positions / wavelength_D - low) / (high - low)
    between_D = (1 - smooth_D) * slowed_D / rope.factor + smooth_D * slowed_D
    is_short_D = wavelength_D < rope.original_max_positions / high
    is_long_D = wavelength_D > rope.original_max_positions / low
    return torch.where(~is_short_D & ~is_long_D, between_D, slowed_D)


def _yarn(rope: RopeSpec, head_dim: int) -> Tensor:
    """NTK by parts: fast pairs extrapolate, slow ones interpolate, a ramp between (Peng et al. 2023, §3.2)."""
    waves_D = _wavelengths(rope.theta, head_dim)
    low, high = (_yarn_pair(rope, head_dim, turns) for turns in (rope.beta_fast, rope.beta_slow))
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001
    ramp_D = ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    kept_D = 1 - ramp_D
    return 1.0 / (rope.factor * waves_D) * (1 - kept_D) + 1.0 / waves_D * kept_D


def _yarn_pair(rope: RopeSpec, head_dim: int, turns: float) -> float:
    """Which pair of elements turns `turns` times over the original length; fractional."""
    ratio = rope.original_max_positions / (turns * 2 * math.pi)
    return head_dim * math.log(ratio) / (2 * math.log(rope.theta))


def _yarn_attention_factor(rope: RopeSpec) -> float:
    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.mscale and rope.mscale_all_dim:
        return mscale(rope.factor, rope.mscale) / mscale(rope.factor, rope.mscale_all_dim)
    return mscale(rope.factor, 1.0)
