"""Latent attention, decode and prefill, is softmax over the latents that each token may see."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from pd.kernels import mla
from pd.kernels.paged import Pages
from tests.kernels.bench import TOLERANCE, Fenced, error, randn, tables

BF16, E4M3 = torch.bfloat16, torch.float8_e4m3fn
SCALE = 192**-0.5


def pages_of(lengths: list[int], sizes: tuple[int, int], dtype: torch.dtype, device: torch.device) -> Pages:
    latent, rotated = sizes
    num_pages = sum(-(-length // 16) for length in lengths) + 1
    kv = randn(num_pages, 1, 16, latent + rotated, seed=1, device=device).to(dtype)
    table_BL = tables(lengths, 16, num_pages=num_pages, seed=2, device=device)
    return Pages(kv, kv[..., :latent], table_BL, *((0.5, 0.5) if dtype == E4M3 else ()))


def ints(values: list[int], device: torch.device) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


@pytest.mark.parametrize(
    ("heads", "sizes", "contexts", "tokens", "splits", "dtype", "kv"),
    [
        (3, (32, 16), [40, 1, 0], 1, 1, torch.float32, None),
        (16, (512, 64), [150], 1, 1, BF16, None),
        (5, (32, 16), [300, 7], 2, 2, torch.float32, None),
        (20, (64, 16), [90], 1, 1, BF16, E4M3),
        (4, (48, 8), [], 1, 1, torch.float32, None),
    ],
)
def test_decode(
    heads: int,
    sizes: tuple[int, int],
    contexts: list[int],
    tokens: int,
    splits: int,
    dtype: torch.dtype,
    kv: torch.dtype | None,
    device: torch.device,
) -> None:
    pages = pages_of(contexts, sizes, kv or dtype, device)
    q_THE = randn(len(contexts) * tokens, heads, sum(sizes), seed=3, dtype=dtype, device=device)
    out = Fenced((len(q_THE), heads, sizes[0]), dtype, device)
    lengths_B = ints(contexts, device)
    mla.mla_decode(q_THE, pages, lengths_B, scale=SCALE, num_splits=splits, out=out.tensor)
    out.check()
    first_rows = ints([tokens * b for b in range(len(contexts) + 1)], device)
    assert error(out.tensor, mla.reference(q_THE, pages, (first_rows, lengths_B), scale=SCALE)) < TOLERANCE[dtype]


@pytest.mark.parametrize(
    ("heads", "requests", "dtype"),
    [(5, [(20, 20), (40, 3), (9, 0), (130, 1)], torch.float32), (16, [(30, 9)], BF16), (130, [(17, 2)], BF16)],
)
def test_prefill(heads: int, requests: list[tuple[int, int]], dtype: torch.dtype, device: torch.device) -> None:
    """Ragged, cached prefixes, more heads than a tile has rows."""
    contexts = [context for context, _ in requests]
    pages = pages_of(contexts, (64, 16), dtype, device)
    spans = ints([0, *itertools.accumulate(new for _, new in requests)], device), ints(contexts, device)
    q_THE = randn(sum(new for _, new in requests), heads + 1, 80, seed=3, dtype=dtype, device=device)[:, :heads]
    out = Fenced((len(q_THE), heads, 64), dtype, device)
    mla.mla_prefill(q_THE, pages, spans, scale=SCALE, out=out.tensor)
    out.check()
    assert error(out.tensor, mla.reference(q_THE, pages, spans, scale=SCALE)) < TOLERANCE[dtype]


def test_values_that_are_no_part_of_the_keys_are_refused(device: torch.device) -> None:
    pages = pages_of([5], (32, 16), torch.float32, device)
    q_THE = randn(1, 2, 48, seed=1, device=device)
    wrong = Pages(pages.k_PKSE, pages.v_PKSF.clone(), pages.table_BL)
    with pytest.raises(ValueError, match="a view of the same memory"):
        mla.mla_decode(q_THE, wrong, ints([5], device), scale=SCALE)
