"""KV from one arrangement to another: between pools, or between a pool and a staging buffer that travels as one piece.

    dst[dst page, head, layer, dst token + i, dim] = as dst's dtype(src[src page, head, layer, src token + i, dim])

for each place (src page, src token, dst page, dst token) and i below `unit`. Both sides have strides of their own, so a
gather, a scatter, another axis order and another page size (unit: their greatest common divisor) are one kernel; heads
and layers are chosen by slicing the views. Staging is a pool whose pages are its pieces.

Alike dtypes are moved as bits, whatever they mean. bfloat16, float16 and float32 become each other, rounded to the
nearest, or e4m3fn bits and come back: a value is divided by the scale on the way in and multiplied on the way out.

`copy_spans` is the same for those who know bytes alone: (src offset, dst offset, nbytes) each.
"""

import math
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from pd.kernels import e4m3
from pd.kernels.paged import as_bits
from pd.kernels.target import target_of
from pd.kernels.tuning import launch_of

# P pages, H heads, L layers, S tokens a page, E elements; N places

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
COPY, NARROW, WIDEN, CAST = range(4)


@triton.jit
def _reshard(
    src, dst, places, scale, num_layers, src_page, src_head, src_layer, src_token, dst_page, dst_head, dst_layer,
    dst_token, UNIT: tl.constexpr, E: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_E: tl.constexpr, HOW: tl.constexpr,
    NATIVE: tl.constexpr,
):  # fmt: skip
    place = places + tl.program_id(0).to(tl.int64) * 4
    head, layer = (tl.program_id(1) // num_layers).to(tl.int64), (tl.program_id(1) % num_layers).to(tl.int64)
    src += tl.load(place).to(tl.int64) * src_page + tl.load(place + 1).to(tl.int64) * src_token
    dst += tl.load(place + 2).to(tl.int64) * dst_page + tl.load(place + 3).to(tl.int64) * dst_token
    src += head * src_head + layer * src_layer
    dst += head * dst_head + layer * dst_layer
    e = tl.arange(0, BLOCK_E)
    for start in range(0, UNIT, BLOCK_S):
        s = start + tl.arange(0, BLOCK_S)
        mask = (s < UNIT)[:, None] & (e < E)[None, :]
        x = tl.load(src + (s.to(tl.int64) * src_token)[:, None] + e[None, :], mask=mask, other=0)
        if HOW == 1:
            x = e4m3.narrow(x.to(tl.float32) / scale)
        elif HOW == 2:
            x = (e4m3.widen(x, NATIVE) * scale).to(dst.dtype.element_ty)
        elif HOW == 3:
            x = x.to(tl.float32).to(dst.dtype.element_ty)
        tl.store(dst + (s.to(tl.int64) * dst_token)[:, None] + e[None, :], x, mask=mask)


@triton.jit
def _copy_spans(src, dst, spans, BLOCK: tl.constexpr, VECTOR: tl.constexpr):
    """Offsets and sizes in words, multiples of VECTOR."""
    span = spans + tl.program_id(0).to(tl.int64) * 3
    at = tl.multiple_of(tl.load(span), VECTOR)
    to = tl.multiple_of(tl.load(span + 1), VECTOR)
    num_words = tl.load(span + 2)
    for start in range(tl.program_id(1).to(tl.int64) * BLOCK, num_words, tl.num_programs(1) * BLOCK):
        n = start + tl.arange(0, BLOCK)
        tl.store(dst + to + n, tl.load(src + at + n, mask=n < num_words, other=0), mask=n < num_words)


def reshard(src_PHLSE: Tensor, dst_PHLSE: Tensor, places_N4: Tensor, *, unit: int, scale: float = 1.0) -> None:
    """Move `unit` tokens at each place, all heads and layers of the views. places: int32. Unit stride in E.

    The views may be of different pools and dtypes, as the module says. Raises ValueError where they do not fit.
    """
    how = _how(src_PHLSE, dst_PHLSE)
    num_heads, num_layers, size = (src_PHLSE.shape[dim] for dim in (1, 2, 4))
    faults = []
    if dst_PHLSE.shape[1:3] != src_PHLSE.shape[1:3] or dst_PHLSE.shape[4] != size:
        faults.append(f"src is {tuple(src_PHLSE.shape)}, dst {tuple(dst_PHLSE.shape)}: heads, layers, elements differ")
    if not 1 <= unit <= min(src_PHLSE.shape[3], dst_PHLSE.shape[3]):
        faults.append(f"{unit} tokens a place, pages have {src_PHLSE.shape[3]} and {dst_PHLSE.shape[3]}")
    if places_N4.dtype != torch.int32 or places_N4.shape[1:] != (4,) or not places_N4.is_contiguous():
        faults.append(f"places are {places_N4.dtype} {tuple(places_N4.shape)}, not rows of four int32")
    if src_PHLSE.stride(4) != 1 or dst_PHLSE.stride(4) != 1:
        faults.append("elements of a head must have stride 1 on both sides")
    if faults:
        raise ValueError("; ".join(faults))
    if not len(places_N4) or not num_heads * num_layers:
        return
    src, dst = (as_bits(x) for x in (src_PHLSE, dst_PHLSE))
    if how == COPY:
        src, dst = (x.view(_BITS[x.itemsize]) for x in (src, dst))
    target = target_of(dst)
    launch = launch_of("kv_reshard", target, size)
    _reshard[(len(places_N4), num_heads * num_layers)](
        *(src, dst, places_N4, scale, num_layers, *src.stride()[:4], *dst.stride()[:4]),
        UNIT=unit,
        E=size,
        BLOCK_S=min(launch.block_m, triton.next_power_of_2(unit)),
        BLOCK_E=triton.next_power_of_2(size),
        HOW=how,
        NATIVE=target.has_native_e4m3,
        **launch.options(target),
    )


def copy_spans(src: Tensor, dst: Tensor, spans: Sequence[tuple[int, int, int]]) -> None:
    """Copy bytes on the device: (src offset, dst offset, nbytes) each; destinations do not overlap.

    src, dst: contiguous uint8 on one device. One launch, of the widest words that all offsets and sizes allow.
    """
    reach = max((at + nbytes for at, _, nbytes in spans), default=0), max((to + n for _, to, n in spans), default=0)
    if reach[0] > src.numel() or reach[1] > dst.numel() or src.dtype != torch.uint8 or dst.dtype != torch.uint8:
        raise ValueError(f"spans reach to bytes {reach} of {src.numel()} {src.dtype} and {dst.numel()} {dst.dtype}")
    if not spans:
        return
    addresses = (src.data_ptr(), dst.data_ptr())
    common = math.gcd(16, *addresses, *(number for span in spans for number in span))
    word = min(common, 8)
    target = target_of(dst)
    launch = launch_of("copy_spans", target, 1)
    longest = max(nbytes for *_, nbytes in spans) // word
    host = torch.tensor(spans, dtype=torch.int64) // word
    if dst.is_cuda:
        host = host.pin_memory()
    _copy_spans[(len(spans), max(1, min(triton.cdiv(longest, launch.block_n), 64)))](
        *(x[: x.numel() // word * word].view(_BITS[word]) for x in (src, dst)),
        host.to(dst.device, non_blocking=True),
        BLOCK=launch.block_n,
        VECTOR=common // word,
        **launch.options(target),
    )


def _how(src: Tensor, dst: Tensor) -> int:
    is_bits = [x.dtype in (torch.uint8, torch.float8_e4m3fn) for x in (src, dst)]
    if src.dtype == dst.dtype or all(is_bits):
        return COPY
    if is_bits[1] and src.is_floating_point():
        return NARROW
    if is_bits[0] and dst.is_floating_point():
        return WIDEN
    if src.is_floating_point() and dst.is_floating_point():
        return CAST
    raise ValueError(f"{src.dtype} does not become {dst.dtype} on the way")


def reference(src_PHLSE: Tensor, dst_PHLSE: Tensor, places_N4: Tensor, *, unit: int, scale: float = 1.0) -> None:
    """`reshard` in PyTorch, a place at a time."""
    how = _how(src_PHLSE, dst_PHLSE)
    src, dst = as_bits(src_PHLSE), as_bits(dst_PHLSE)
    for p, s, q, t in places_N4.tolist():
        x = src[p, :, :, s : s + unit]
        if how == NARROW:
            x = e4m3.reference(x.float() / scale)
        elif how == WIDEN:
            x = (x.contiguous().view(torch.float8_e4m3fn).float() * scale).to(dst.dtype)
        elif how == CAST:
            x = x.to(dst.dtype)
        dst[q, :, :, t : t + unit] = x
