"""The device half of packing, in PyTorch: KV from one arrangement to another within one memory.

    dst[dst page, head, layer, dst token + i, dim] = src[src page, head, layer, src token + i, dim]

for each place (src page, src token, dst page, dst token) and i below `unit`; the value is rounded to dst's dtype, in
float8 to 448 at most.
`pd.kernels.kv_reshard` means the same, in one launch: the engine's table of operators says who does it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from pd.transfer.float8 import E4M3, bits, cast
from pd.transfer.layout import KVLayout, Shard, strides
from pd.transfer.pairs import Pair

# P pages, H kv heads, L layers, S tokens a page, E head size; N places


class Reshard(Protocol):
    """`reshard` below, or a kernel that does the same on the current stream."""

    def __call__(
        self, src_PHLSE: Tensor, dst_PHLSE: Tensor, places_N4: Sequence[tuple[int, int, int, int]], *, unit: int
    ) -> None: ...


DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float8_e4m3fn": E4M3,
}


def views(region: Tensor, layout: KVLayout, shard: Shard, pair: Pair, *, base: int = 0) -> tuple[Tensor, ...]:
    """The pair's heads and layers of a pool's K and V (MLA: of its latent alone), each [P, H, L, S, E].

    `region` is bytes; the pool begins at byte `base` of it, a multiple of the itemsize.
    """
    flat = region[base : base + (len(region) - base) // layout.itemsize * layout.itemsize].view(DTYPES[layout.dtype])
    found = []
    for s in strides(layout, shard):
        first = s.offset(
            page=0, head=pair.heads.start - shard.head_start, layer=pair.layers.start - shard.layer_start, token=0
        )
        shape = (shard.num_pages, len(pair.heads), len(pair.layers), layout.page_size, s.num_dims)
        steps = [step // layout.itemsize for step in (s.page, s.head, s.layer, s.token, s.dim)]
        found.append(flat.as_strided(shape, steps, flat.storage_offset() + first // layout.itemsize))
    return tuple(found)


@torch.inference_mode()
def reshard(src_PHLSE: Tensor, dst_PHLSE: Tensor, places_N4: Sequence[tuple[int, int, int, int]], *, unit: int) -> None:
    """Reads src_PHLSE, writes the places of dst_PHLSE. `unit` divides both page sizes and every token of a place."""
    src, dst = _in_units(src_PHLSE, unit), _in_units(dst_PHLSE, unit)
    if not src.is_cuda:  # tried: indexing, as below; it reached 0.32 GB/s where this reaches 0.7
        is_narrowed = dst.dtype is E4M3
        for page, token, other, inside in places_N4:
            piece = src[page, :, :, token // unit]
            dst[other, :, :, inside // unit].copy_(cast(piece, E4M3) if is_narrowed else piece)
        return
    src_page, src_token, dst_page, dst_token = torch.tensor(places_N4, device=src.device).unbind(1)
    moved = bits(src)[src_page, :, :, src_token // unit].view(src.dtype)
    bits(dst)[dst_page, :, :, dst_token // unit] = bits(cast(moved, dst.dtype))


def _in_units(pool_PHLSE: Tensor, unit: int) -> Tensor:
    """The same memory as [P, H, L, S / unit, unit, E]."""
    shape, steps = list(pool_PHLSE.shape), list(pool_PHLSE.stride())
    shape[3:4], steps[3:4] = [shape[3] // unit, unit], [steps[3] * unit, steps[3]]
    return pool_PHLSE.as_strided(shape, steps, pool_PHLSE.storage_offset())
