"""float8 e4m3fn as bits, alike on every GPU: pages written on one vendor's are read on the other's.

    bits  s eeee mmm   value = (-1)^s * 2^(e - 7) * (1 + m/8),   e = 0: (-1)^s * 2^-6 * m/8,   largest 448

Widening is exact and needs no float8 type: shifted by 7 the same fields are a float16 that is 2^8 times smaller (its
exponent's bias is 15, not 7), subnormal ones included. Narrowing rounds to nearest even and saturates at 448. NaN,
which has one code of its own in e4m3fn, becomes 448 here: a page never holds one.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

LARGEST = 448.0


@triton.jit
def widen(bits, NATIVE: tl.constexpr):
    """uint8 codes -> float32 values."""
    if NATIVE:
        return bits.to(tl.float8e4nv, bitcast=True).to(tl.float32)
    wide = bits.to(tl.uint16)
    half = (((wide & 0x80) << 8) | ((wide & 0x7F) << 7)).to(tl.float16, bitcast=True)
    return half.to(tl.float32) * 256.0


@triton.jit
def narrow(x):
    """float32 values -> uint8 codes."""
    bits = x.to(tl.uint32, bitcast=True)
    sign = (bits >> 24) & 0x80
    size = tl.minimum(tl.abs(x), 448.0)
    size_bits = tl.maximum(size, 0.015625).to(tl.uint32, bitcast=True)
    # From 2^-6 up: drop 20 of 23 fraction bits, nearest even, and move the exponent's bias from 127 to 7.
    normal = ((size_bits + 0x7FFFF + ((size_bits >> 20) & 1)) >> 20) - (120 << 3)
    # Below: multiples of 2^-9, which adding 2^23 rounds to.
    tiny = (size * 512.0 + 8388608.0).to(tl.uint32, bitcast=True) & 0xF
    return (sign | tl.where(size < 0.015625, tiny, normal)).to(tl.uint8)


def reference(x: Tensor) -> Tensor:
    """What `narrow` does, for finite x."""
    return x.to(torch.float32).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn).view(torch.uint8)
