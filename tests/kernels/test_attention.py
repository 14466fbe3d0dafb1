"""Paged attention, decode and prefill, is softmax(q·k)·v over what each token may see, and writes that alone."""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from pd.kernels import paged_decode, paged_prefill
from pd.kernels.paged import Heads, Pages, heads_of
from tests.kernels.bench import TOLERANCE, Fenced, error, heads_outermost_pool, randn, tables

FP32, BF16, FP16, E4M3 = torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn


@dataclass(frozen=True)
class Case:
    """Query heads by KV head, sizes, and each request's (context, new tokens)."""

    groups: tuple[int, ...] = (4, 4)
    size: tuple[int, int] = (64, 64)
    page: int = 16
    requests: tuple[tuple[int, int], ...] = ((37, 1), (1, 1), (64, 1))
    window: int | None = None
    dtype: torch.dtype = FP32
    kv: torch.dtype | None = None
    splits: int = 1

    def heads(self, device: torch.device) -> Heads:
        of_query = [k for k, size in enumerate(self.groups) for _ in range(size)]
        return heads_of(of_query, scale=self.size[0] ** -0.5, device=device, window=self.window)

    def pages(self, device: torch.device) -> Pages:
        lengths = [context for context, _ in self.requests]
        num_pages = sum(-(-length // self.page) for length in lengths) + 2
        sizes = (len(self.groups), self.page, *self.size)
        k, v = heads_outermost_pool(num_pages, sizes, dtype=self.kv or self.dtype, device=device, seed=1)
        table_BL = tables(lengths, self.page, num_pages=num_pages, seed=2, device=device)
        return Pages(k, v, table_BL, *((0.5, 2.0) if self.kv else (1.0, 1.0)))

    def query(self, device: torch.device) -> Tensor:
        """A part of a wider projection, so that its rows are strided."""
        num_rows, num_heads = sum(new for _, new in self.requests), sum(self.groups)
        wide = randn(num_rows, num_heads + 2, self.size[0], seed=3, dtype=self.dtype, device=device)
        return wide[:, :num_heads]


def ints(values: list[int], device: torch.device) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


def check_decode(case: Case, device: torch.device) -> None:
    q_THE, pages, heads = case.query(device), case.pages(device), case.heads(device)
    lengths_B = ints([context for context, _ in case.requests], device)
    out = Fenced((*q_THE.shape[:2], case.size[1]), case.dtype, device)
    paged_decode.paged_decode(q_THE, pages, lengths_B, heads, num_splits=case.splits, out=out.tensor)
    out.check()
    assert error(out.tensor, paged_decode.reference(q_THE, pages, lengths_B, heads)) < TOLERANCE[case.dtype]


def check_prefill(case: Case, device: torch.device) -> None:
    q_THE, pages, heads = case.query(device), case.pages(device), case.heads(device)
    first_rows = [0, *itertools.accumulate(new for _, new in case.requests)]
    spans = ints(first_rows, device), ints([context for context, _ in case.requests], device)
    out = Fenced((*q_THE.shape[:2], case.size[1]), case.dtype, device)
    paged_prefill.paged_prefill(q_THE, pages, spans, heads, out=out.tensor)
    out.check()
    assert error(out.tensor, paged_prefill.reference(q_THE, pages, spans, heads)) < TOLERANCE[case.dtype]


DECODE = {
    "one token of context": Case(requests=((1, 1),)),
    "no request": Case(requests=()),
    "bf16": Case(dtype=BF16),
    "fp16, MHA, head size 80": Case(groups=(1, 1), size=(80, 80), dtype=FP16),
    "group 3, page of one token": Case(groups=(3,), page=1, requests=((5, 1), (33, 1))),
    "uneven groups of a cut model": Case(groups=(3, 2), requests=((40, 1), (7, 1))),
    "group 16, keys wider than values": Case(groups=(16,), size=(192, 128), dtype=BF16),
    "head size 256": Case(groups=(2,), size=(256, 256), dtype=BF16, requests=((70, 1),)),
    "four splits, one request too short for them": Case(splits=4, requests=((700, 1), (3, 1))),
    "window": Case(window=20, requests=((300, 1), (10, 1))),
    "window over splits": Case(window=200, splits=2, requests=((400, 1), (64, 1))),
    "three tokens a request, one with less context": Case(groups=(4, 4), requests=((150, 3), (3, 3), (2, 3))),
    "three tokens, window and splits": Case(window=130, splits=2, requests=((300, 3),)),
    "padded request": Case(requests=((0, 1), (20, 1))),
    "padded request, splits": Case(requests=((0, 1), (300, 1)), splits=2),
    "fp8 KV": Case(dtype=BF16, kv=E4M3),
    "fp8 KV, fp32 queries": Case(kv=E4M3, requests=((65, 1),)),
}
PREFILL = {
    "one token alone": Case(requests=((1, 1),)),
    "no request": Case(requests=()),
    "ragged, cached prefixes": Case(requests=((40, 40), (50, 3), (129, 1)), dtype=BF16),
    "a request without new tokens between others": Case(requests=((20, 20), (30, 0), (9, 9))),
    "group 3, page 1, fp16, head size 80": Case(groups=(3,), page=1, size=(80, 80), requests=((45, 30),), dtype=FP16),
    "uneven groups": Case(groups=(2, 3), requests=((35, 35), (3, 2))),
    "MHA over several tiles": Case(groups=(1,), requests=((150, 140),)),
    "window": Case(window=10, requests=((90, 50), (8, 8))),
    "window larger than all": Case(window=1000, requests=((90, 30),)),
    "keys wider than values": Case(groups=(8,), size=(192, 128), requests=((33, 20),), dtype=BF16),
    "fp8 KV": Case(requests=((70, 20), (5, 5)), dtype=BF16, kv=E4M3),
}


@pytest.mark.parametrize("name", DECODE)
def test_decode_equals_dense_attention(name: str, device: torch.device) -> None:
    check_decode(DECODE[name], device)


@pytest.mark.parametrize("name", PREFILL)
def test_prefill_equals_dense_attention(name: str, device: torch.device) -> None:
    check_prefill(PREFILL[name], device)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "seed" in metafunc.fixturenames:
        metafunc.parametrize("seed", range(60 if metafunc.config.getoption("--wide") else 2))


def drawn(seed: int, *, is_decode: bool) -> Case:
    """Any sizes that are served; contexts to 3,000 tokens, fewer with many heads."""
    dice = random.Random(seed)
    dtype = dice.choice((FP32, BF16, FP16))
    group = dice.choice((1, 3, 4, 8, 16))
    longest = dice.choice((40, 300, 3000))
    new = dice.choice((1, 1, 2, 4)) if is_decode else 0
    requests = []
    for _ in range(dice.choice((1, 1, 2, 4) if longest < 3000 else (1,))):
        context = dice.randint(1, longest)
        requests.append((context, new if is_decode else dice.randint(1, min(context, 70))))
    return Case(
        groups=(group,) * dice.choice((1, 2)),
        size=dice.choice(((64, 64), (80, 80), (96, 96), (128, 128), (192, 128), (256, 256))),
        page=dice.choice((1, 8, 16, 64)),
        requests=tuple(requests),
        window=dice.choice((None, None, 1, 50, 1000)),
        dtype=dtype,
        kv=dice.choice((None, None, E4M3)),
        splits=dice.choice((1, 2, 8)) if is_decode else 1,
    )


def test_decode_of_any_shape(seed: int, device: torch.device) -> None:
    case = drawn(seed, is_decode=True)
    print(f"seed {seed}: {case}")  # noqa: T201 (pytest shows it with a failure)
    check_decode(case, device)


def test_prefill_of_any_shape(seed: int, device: torch.device) -> None:
    case = drawn(seed, is_decode=False)
    print(f"seed {seed}: {case}")  # noqa: T201
    check_prefill(case, device)


def test_a_page_beyond_2_31_elements_is_reached(device: torch.device) -> None:
    """Pages far apart in a pool whose memory is never touched elsewhere (1 TB of address space would do as well)."""
    case = Case(groups=(1,), requests=((4, 1),), page=4)
    stride = (1 << 31) // 3  # the table's pages are 0, 2 and 4 apart of it: beyond 2^31 elements from the first
    storage = torch.empty(4 * stride + 4096, dtype=FP16, device=device)
    k = storage.as_strided((5, 1, 4, 64), (stride, 256, 64, 1))
    v = storage.as_strided((5, 1, 4, 64), (stride, 256, 64, 1), 512)
    for page in (0, 4):
        for pool in (k, v):
            pool[page] = randn(1, 4, 64, seed=page, dtype=FP16, device=device)
    q_THE = randn(1, 1, 64, seed=5, dtype=FP16, device=device)
    pages = Pages(k, v, ints([4], device)[None])
    heads = case.heads(device)
    out = paged_decode.paged_decode(q_THE, pages, ints([4], device), heads)
    assert error(out, paged_decode.reference(q_THE, pages, ints([4], device), heads)) < TOLERANCE[FP16]


def test_splits_change_nothing_but_rounding(device: torch.device) -> None:
    case = Case(requests=((500, 1), (129, 1)))
    q_THE, pages, heads = case.query(device), case.pages(device), case.heads(device)
    lengths_B = ints([500, 129], device)
    whole, cut = (paged_decode.paged_decode(q_THE, pages, lengths_B, heads, num_splits=n) for n in (1, 4))
    assert error(cut, whole) < 3e-7


@pytest.mark.parametrize(
    ("num_programs", "max_context", "multiprocessors", "expected"),
    [(1, 100, 132, 1), (8, 8192, 132, 32), (8, 1 << 17, 132, 32), (1, 1 << 17, 132, 64), (64, 4096, 304, 8)],
)
def test_splits_fill_the_device_and_no_more(
    num_programs: int, max_context: int, multiprocessors: int, expected: int
) -> None:
    assert paged_decode.plan_splits(num_programs, max_context, multiprocessors) == expected


def test_shapes_that_do_not_fit_are_named(device: torch.device) -> None:
    case = Case()
    q_THE, pages, heads = case.query(device), case.pages(device), case.heads(device)
    lengths_B = ints([37, 1, 64], device)
    with pytest.raises(ValueError, match="queries have 32 elements, keys 64"):
        paged_decode.paged_decode(q_THE[..., :32], pages, lengths_B, heads)
    with pytest.raises(ValueError, match="3 rows, 2 lengths and 3 page tables"):
        paged_decode.paged_decode(q_THE, pages, lengths_B[:2], heads)
    with pytest.raises(ValueError, match=r"queries are torch.float16, keys torch.float32"):
        paged_decode.paged_decode(q_THE.half(), pages, lengths_B, heads)
    with pytest.raises(ValueError, match=r"the page table is torch.int64"):
        paged_decode.paged_decode(q_THE, replace(pages, table_BL=pages.table_BL.long()), lengths_B, heads)
