"""What kernel tests need: outputs poisoned and fenced, random pages, errors by norm against float64."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

GUARD = 64  # elements on either side of an output
TOLERANCE = {torch.float32: 1e-6, torch.float16: 1.2e-3, torch.bfloat16: 9e-3}
"""Of the error's norm over the result's: two roundings of the dtype (the weights', the output's) and a little."""

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class Fenced:
    """A tensor of NaN within a larger one of a pattern: shows that all of it and nothing beside it was written."""

    def __init__(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> None:
        size = torch.Size(shape).numel()
        whole = torch.full((size + 2 * GUARD,), 7.0 if dtype.is_floating_point else 7, dtype=dtype, device=device)
        self._whole = whole
        self.tensor = whole[GUARD : GUARD + size].view(shape)
        self.tensor.fill_(torch.nan if dtype.is_floating_point else 0x55)

    def check(self) -> None:
        assert (self._whole[:GUARD] == 7).all() and (self._whole[-GUARD:] == 7).all(), "written beside the output"
        assert not self.tensor.is_floating_point() or not self.tensor.isnan().any(), "part of the output is not written"


def error(actual: Tensor, expected: Tensor) -> float:
    """Norm of the difference over the norm of the expected, in float64."""
    actual, expected = actual.double().cpu(), expected.double().cpu()
    scale = expected.norm().item()
    return (actual - expected).norm().item() / (scale if scale > 0 else 1.0)


def randn(*shape: int, seed: int, dtype: torch.dtype = torch.float32, device: torch.device) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(device=device, dtype=dtype)


def tables(lengths: Sequence[int], page_size: int, *, num_pages: int, seed: int, device: torch.device) -> Tensor:
    """Page tables of scattered pages, none shared; beyond a request's length they name a page that does not exist."""
    held = [-(-length // page_size) for length in lengths]
    order = torch.randperm(num_pages, generator=torch.Generator().manual_seed(seed)).to(torch.int32)
    table_BL = torch.full((len(lengths), max([*held, 1])), 1 << 24, dtype=torch.int32)
    for b, pages in enumerate(torch.split(order[: sum(held)], held)):
        table_BL[b, : len(pages)] = pages
    return table_BL.to(device)


def heads_outermost_pool(
    num_pages: int, sizes: tuple[int, int, int, int], *, dtype: torch.dtype, device: torch.device, seed: int
) -> tuple[Tensor, Tensor]:
    """k_PKSE and v_PKSF of one of two layers, in the house's order: page, head, layer, k|v, token, dim.

    sizes: KV heads, tokens a page, elements of a key, of a value. Everything outside the layer is NaN.
    """
    num_heads, page_size, key_size, value_size = sizes
    own = page_size * (key_size + value_size)
    flat = torch.full((num_pages * num_heads * 2 * own,), torch.nan, device=device).to(dtype)
    strides = (num_heads * 2 * own, 2 * own)
    k = flat.as_strided((num_pages, num_heads, page_size, key_size), (*strides, key_size, 1), own)
    v_at = own + page_size * key_size
    v = flat.as_strided((num_pages, num_heads, page_size, value_size), (*strides, value_size, 1), v_at)
    for i, x in enumerate((k, v)):
        x.copy_(randn(*x.shape, seed=seed + i, device=device).to(dtype))
    return k, v
