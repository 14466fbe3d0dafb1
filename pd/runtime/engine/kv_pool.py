"""The pages of one rank: one region of bytes that peers may write, seen as a K and a V tensor a layer."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from pd.runtime.config import ConfigError, KVConfig
from pd.runtime.engine.room import free_nbytes
from pd.transfer.layout import KVLayout, Shard, View, page_nbytes, pool_nbytes, views
from pd.transfer.transport import Transport

# P pages, K kv heads of this rank, S tokens a page, E head size

DEFAULT_CPU_NBYTES = 2 << 30
DEFAULT_GPU_FRACTION = 0.9


@dataclass(frozen=True, slots=True)
class KVPool:
    """Views over the region. They must be gone before the transport frees it."""

    shard: Shard
    region: Tensor  # all bytes that the transport knows: the pool's, then those of staging
    layers: tuple[tuple[Tensor, Tensor], ...]
    """k_PKSE and v_PKSE, strided by the layout's order; of MLA the latents, one tensor twice."""


def count_pages(kv: KVConfig, layout: KVLayout, shard: Shard, *, device: torch.device, num_sharing: int) -> int:
    """Pages that `kv` asks for, or that fit its memory; 0 if not one fits.

    `num_sharing`: ranks that draw on the same host memory. `shard.num_pages` is not read.
    """
    if kv.num_pages is not None:
        return kv.num_pages
    free = free_nbytes(device) // (num_sharing if device.type == "cpu" else 1)
    match kv.kv_memory:
        case None if device.type == "cpu":
            nbytes = min(DEFAULT_CPU_NBYTES, free // 2)
        case None:
            nbytes = int(free * DEFAULT_GPU_FRACTION)
        case fraction if fraction <= 1:
            nbytes = int(free * fraction)
        case asked:
            nbytes = int(asked)
    return nbytes // page_nbytes(layout, shard)


def make_pool(
    layout: KVLayout,
    shard: Shard,
    *,
    dtype: torch.dtype,
    device: torch.device,
    transport: Transport,
    staging_nbytes: int = 0,
) -> KVPool:
    """Take the region from the transport (CPU) or make it and register it (GPU). Zeroed, staging behind the pool.

    Raises ConfigError where the memory is not to be had.
    """
    nbytes = staging_base(layout, shard) + staging_nbytes
    try:
        if device.type == "cpu":
            region = torch.frombuffer(transport.allocate(nbytes), dtype=torch.uint8)
        else:
            whole = torch.zeros(nbytes + transport.spare_nbytes, dtype=torch.uint8, device=device)
            if device.type == "cuda":
                torch.cuda.synchronize(device)  # no peer's bytes before the zeros
            transport.register(whole.data_ptr(), len(whole), whole.device.index)
            region = whole[:nbytes]
    except (MemoryError, OSError, torch.OutOfMemoryError) as error:
        raise ConfigError(
            f"a KV pool of {shard.num_pages} pages, {nbytes / 2**20:.0f} MiB, is not to be had: {error}",
            hint="lower --kv-memory or --num-pages",
        ) from error
    flat = region[: pool_nbytes(layout, shard)].view(dtype)
    layers = []
    for k, v in views(layout, shard):
        keys = _view(flat, k)
        layers.append((keys, keys if v is None else _view(flat, v)))
    return KVPool(shard, region, tuple(layers))


def staging_base(layout: KVLayout, shard: Shard) -> int:
    """Where staging begins in the region: behind the pool, at a multiple of every dtype's size."""
    return -(-pool_nbytes(layout, shard) // 256) * 256


def _view(flat: Tensor, view: View) -> Tensor:
    return flat.as_strided(view.shape, view.strides, view.offset // flat.itemsize)
