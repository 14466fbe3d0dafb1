"""KV between arrangements: gather and scatter, other orders, page sizes and dtypes; bytes alone by spans."""

from __future__ import annotations

import math
import random

import pytest
import torch
from torch import Tensor

from pd.kernels import kv_reshard
from pd.runtime.engine.operators import _triton_reshard
from pd.transfer import reshard as packing
from pd.transfer.layout import DEFAULT_ORDER, KVLayout, Shard, pool_nbytes
from pd.transfer.pairs import Pair
from pd.transfer.reshard import DTYPES, views
from tests.kernels.bench import randn

BF16, F16, E4M3, U8 = torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.uint8
SPLIT_HEADS = ("page", "dim", "head", "layer", "kv", "token")
"""The elements of a head apart: no kernel's layout."""


def pool(num_pages: int, page: int, order: str, dtype: torch.dtype, device: torch.device) -> Tensor:
    """3 heads, 2 layers, 24 elements; `order` names the axes of memory, outermost first."""
    sizes = {"P": num_pages, "H": 3, "L": 2, "S": page, "E": 24}
    x = randn(*(sizes[axis] for axis in order), seed=page, device=device).to(dtype)
    return x.permute(*(order.index(axis) for axis in "PHLSE"))


@pytest.mark.parametrize(
    ("src", "dst", "scale"),
    [
        *((BF16, BF16, 1.0), (torch.float32, torch.float32, 1.0), (BF16, E4M3, 0.5), (U8, BF16, 2.0), (E4M3, U8, 1.0)),
        *((torch.float32, BF16, 1.0), (BF16, torch.float32, 1.0), (torch.float32, F16, 1.0), (BF16, F16, 1.0)),
    ],
)
@pytest.mark.parametrize(("src_order", "dst_order"), [("PHLSE", "PHLSE"), ("PHLSE", "LPSHE"), ("LPSHE", "HPLSE")])
def test_tokens_arrive_converted_in_their_places_alone(
    src_order: str, dst_order: str, src: torch.dtype, dst: torch.dtype, scale: float, device: torch.device
) -> None:
    a = pool(4, 8, src_order, E4M3 if src == U8 else src, device)
    b = pool(3, 16, dst_order, E4M3 if dst == U8 else dst, device)
    a, b = (x.view(U8) if dtype == U8 else x for x, dtype in ((a, src), (b, dst)))
    expected = b.view(U8).clone() if b.dtype == E4M3 else b.clone()
    places = torch.tensor([[3, 0, 0, 8], [0, 0, 2, 0], [2, 0, 1, 8]], dtype=torch.int32, device=device)
    kv_reshard.reshard(a[:, 1:], b[:, 1:], places, unit=8, scale=scale)
    kv_reshard.reference(a[:, 1:], expected[:, 1:], places, unit=8, scale=scale)
    assert torch.equal(b.view(U8) if b.dtype == E4M3 else b, expected)


def test_what_does_not_fit_is_named(device: torch.device) -> None:
    a, places = pool(2, 8, "PHLSE", BF16, device), torch.zeros(1, 4, dtype=torch.int32, device=device)
    with pytest.raises(ValueError, match="heads, layers, elements differ"):
        kv_reshard.reshard(a, a[:, 1:], places, unit=8)
    with pytest.raises(ValueError, match="9 tokens a place, pages have 8 and 8"):
        kv_reshard.reshard(a, a, places, unit=9)
    with pytest.raises(ValueError, match=r"torch.int32 does not become torch.bfloat16"):
        kv_reshard.reshard(a.int(), a, places, unit=8)
    octet = torch.zeros(8, dtype=U8, device=device)
    with pytest.raises(ValueError, match="spans reach to bytes"):
        kv_reshard.copy_spans(octet, octet.clone(), [(4, 0, 5)])


@pytest.mark.parametrize("word", [1, 4, 16])
def test_spans_copy_their_bytes_and_no_others(word: int, device: torch.device) -> None:
    dice = random.Random(word)
    src = torch.randint(0, 256, (5000,), generator=torch.Generator().manual_seed(1), dtype=U8).to(device)
    dst = torch.full((5000,), 99, dtype=U8, device=device)
    edges = sorted(dice.sample(range(1, 5000 // word), 8))
    spans = [
        (dice.randrange((5000 - (b - a) * word) // word) * word, a * word, (b - a) * word)
        for a, b in zip(edges[::2], edges[1::2], strict=True)
    ]
    expected = dst.clone()
    for at, to, nbytes in spans:
        expected[to : to + nbytes] = src[at : at + nbytes]
    kv_reshard.copy_spans(src, dst, spans)
    assert torch.equal(dst, expected)


@pytest.mark.parametrize("seed", range(12))
def test_the_kernel_repacks_as_pytorch_does(seed: int, device: torch.device) -> None:
    """What a rank on a GPU packs with, and what one on a CPU does: any two layouts, heads in one piece or not."""
    dice = random.Random(seed)
    theirs, ours = (
        KVLayout(
            *(2, 3, 8, dice.choice((2, 4, 6)), dice.choice(("float32", "bfloat16", "float16"))),
            order=dice.choice((DEFAULT_ORDER, ("layer", "kv", "page", "token", "head", "dim"), SPLIT_HEADS)),
        )
        for _ in range(2)
    )
    box = Pair(0, 0, range(2), range(1, 3))
    pools = []
    for layout in (theirs, ours):
        shard = Shard(0, 2, 0, 3, 6)
        raw = randn(pool_nbytes(layout, shard) // layout.itemsize, seed=seed, device=device).to(DTYPES[layout.dtype])
        pools.append(views(raw.view(torch.uint8), layout, shard, box))
    unit = math.gcd(theirs.page_size, ours.page_size)
    num_units = 6 * min(theirs.page_size, ours.page_size) // unit
    at, to = ([divmod(u * unit, layout.page_size) for u in range(num_units)] for layout in (theirs, ours))
    dice.shuffle(to)
    places = [(*a, *b) for a, b in zip(at, to, strict=True)]
    for src, dst in zip(*pools, strict=True):
        before = dst.clone()
        packing.reshard(src, dst, places, unit=unit)
        expected = dst.clone()
        dst.copy_(before)
        _triton_reshard()(src, dst, places, unit=unit)
        assert torch.equal(dst, expected), f"seed {seed}: {theirs} -> {ours}"
