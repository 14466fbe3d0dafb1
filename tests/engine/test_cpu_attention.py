"""Attention in C++ equals float64, and a token's bits do not depend on its batch, its chunk, or the threads."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from pd.runtime.engine import cpu_attention
from pd.runtime.engine.cpu_attention import Heads
from tests.engine.exact import DTYPES, LIMIT, distance, normal

pytestmark = pytest.mark.usefixtures("one_thread_and_poisoned_memory")


@dataclass(frozen=True, slots=True)
class Case:
    """A pool in the default order, whose every byte that no request owns is NaN."""

    q_BHE: Tensor
    pools: tuple[Tensor, Tensor]
    table_BL: Tensor
    lengths_B: Tensor
    contexts: list[tuple[Tensor, Tensor]]  # of each request: keys and values, [kv head, token, e]


def make_case(
    lengths: list[int], *, heads: int, kv_heads: int, head_size: int, dtype: torch.dtype, page_size: int = 16
) -> Case:
    counts = [(length + page_size - 1) // page_size for length in lengths]
    num_pages = sum(counts) + 3
    order = torch.randperm(num_pages, generator=torch.Generator().manual_seed(7)).tolist()
    pool = torch.full((num_pages, kv_heads, 2, 2, page_size, head_size), torch.nan, dtype=dtype)
    k_PKSE, v_PKSE = pool[:, :, 1, 0], pool[:, :, 1, 1]
    table = torch.full((len(lengths), max(counts) + 1), num_pages - 1, dtype=torch.int32)
    contexts = []
    for b, length in enumerate(lengths):
        keys = normal(kv_heads, length, head_size, seed=10 + b, dtype=dtype)
        values = normal(kv_heads, length, head_size, seed=1000 + b, dtype=dtype)
        contexts.append((keys, values))
        for i in range(counts[b]):
            page = table[b, i] = order.pop()
            part = slice(i * page_size, min(length, (i + 1) * page_size))
            k_PKSE[page, :, : part.stop - part.start] = keys[:, part]
            v_PKSE[page, :, : part.stop - part.start] = values[:, part]
    q_BHE = normal(len(lengths), heads, head_size, seed=3, dtype=dtype)
    return Case(q_BHE, (k_PKSE, v_PKSE), table, torch.tensor(lengths, dtype=torch.int32), contexts)


def exact_attention(case: Case, heads: Heads) -> Tensor:
    out = torch.zeros(case.q_BHE.shape, dtype=torch.float64)
    for b, (keys, values) in enumerate(case.contexts):
        start = 0 if heads.window is None else max(0, keys.shape[1] - heads.window)
        for h, kv in enumerate(heads.kv_head_of_query_H.tolist()):
            scores = keys[kv, start:].double() @ case.q_BHE[b, h].double() * heads.scale
            out[b, h] = scores.softmax(0) @ values[kv, start:].double()
    return out


def decode(case: Case, heads: Heads) -> Tensor:
    return cpu_attention.paged_decode(
        case.q_BHE, case.pools, table_BL=case.table_BL, lengths_B=case.lengths_B, heads=heads
    )


MAPS = {
    "9 of 3": [0, 0, 0, 1, 1, 1, 2, 2, 2],
    "one each": [0, 1],
    "all of one": [0] * 6,
    "uneven": [2, 0, 0, 2, 2, 2, 2],  # as a rank of a tensor parallelism that does not divide the heads
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [None, 1, 17, 600])
@pytest.mark.parametrize("map_name", MAPS)
def test_paged_decode_equals_float64(isa: str, map_name: str, window: int | None, dtype: torch.dtype) -> None:
    of_query = MAPS[map_name]
    lengths = [1, 15, 16, 17, 63, 64, 65, 511, 512, 513, 1100]
    case = make_case(lengths, heads=len(of_query), kv_heads=max(of_query) + 1, head_size=64, dtype=dtype)
    heads = Heads(torch.tensor(of_query, dtype=torch.int32), 0.125, window)
    assert distance(decode(case, heads), exact_attention(case, heads)) < LIMIT[dtype]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("head_size", "page_size"), [(5, 3), (16, 16), (24, 1), (80, 7), (128, 32), (576, 16)])
def test_paged_decode_takes_any_head_and_page_size(
    isa: str, head_size: int, page_size: int, dtype: torch.dtype
) -> None:
    case = make_case([1, 40, 130], heads=4, kv_heads=2, head_size=head_size, dtype=dtype, page_size=page_size)
    heads = Heads(torch.tensor([0, 0, 1, 1], dtype=torch.int32), head_size**-0.5)
    assert distance(decode(case, heads), exact_attention(case, heads)) < LIMIT[dtype]


def test_paged_decode_without_cpp_equals_float64() -> None:
    case = make_case([1, 15, 16, 17, 100], heads=7, kv_heads=3, head_size=24, dtype=torch.float32)
    for window in (None, 1, 20):
        heads = Heads(torch.tensor(MAPS["uneven"], dtype=torch.int32), 0.3, window)
        got = cpu_attention.paged_decode_reference(
            case.q_BHE, case.pools, table_BL=case.table_BL, lengths_B=case.lengths_B, heads=heads
        )
        assert distance(got, exact_attention(case, heads)) < 2e-6


@pytest.mark.parametrize("dtype", DTYPES)
def test_paged_decode_gives_a_row_the_same_bits_in_any_batch_and_on_any_threads(isa: str, dtype: torch.dtype) -> None:
    case = make_case([700, 3, 1300, 64], heads=3, kv_heads=1, head_size=64, dtype=dtype)
    heads = Heads(torch.zeros(3, dtype=torch.int32), 0.125)
    together = decode(case, heads)
    torch.set_num_threads(3)
    assert torch.equal(decode(case, heads), together)
    for b in range(4):
        alone = cpu_attention.paged_decode(
            case.q_BHE[b : b + 1],
            case.pools,
            table_BL=case.table_BL[b : b + 1],
            lengths_B=case.lengths_B[b : b + 1],
            heads=heads,
        )
        assert torch.equal(alone[0], together[b]), b


def test_paged_decode_survives_scores_that_overflow_a_plain_exponential(isa: str) -> None:
    case = make_case([200], heads=1, kv_heads=1, head_size=8, dtype=torch.float32)
    heads = Heads(torch.zeros(1, dtype=torch.int32), 300.0)
    assert distance(decode(case, heads), exact_attention(case, heads)) < 1e-4


def test_paged_decode_answers_zeros_for_a_row_of_no_tokens(isa: str) -> None:
    case = make_case([4, 4], heads=2, kv_heads=1, head_size=8, dtype=torch.float32)
    heads = Heads(torch.zeros(2, dtype=torch.int32), 1.0)
    case.lengths_B[1] = 0
    got = decode(case, heads)
    assert torch.equal(got[1], torch.zeros(2, 8))
    assert distance(got[0], exact_attention(case, heads)[0]) < 2e-6


def test_paged_decode_refuses_a_page_outside_the_pool(isa: str) -> None:
    case = make_case([40], heads=1, kv_heads=1, head_size=8, dtype=torch.float32)
    case.table_BL[0, 1] = 99
    with pytest.raises(RuntimeError, match="names page 99"):
        decode(case, Heads(torch.zeros(1, dtype=torch.int32), 1.0))
    case.table_BL[0, 1] = 0
    with pytest.raises(RuntimeError, match="reads kv head 1 of 1"):
        decode(case, Heads(torch.ones(1, dtype=torch.int32), 1.0))


# ---- chunks -----------------------------------------------------------------------------------------------------


def as_chunks(case: Case, counts: list[int]) -> tuple[Tensor, Tensor, Tensor]:
    """The last so many tokens of each request, a chunk each."""
    first = torch.tensor([0, *counts], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    return first, case.lengths_B, case.table_BL


def one_by_one(case: Case, q_THE: Tensor, counts: list[int], heads: Heads) -> Tensor:
    """The same rows as requests of one token each."""
    lengths = [
        n - count + 1 + i for n, count in zip(case.lengths_B.tolist(), counts, strict=True) for i in range(count)
    ]
    table = case.table_BL.repeat_interleave(torch.tensor(counts), dim=0)
    return cpu_attention.paged_decode(
        q_THE, case.pools, table_BL=table, lengths_B=torch.tensor(lengths, dtype=torch.int32), heads=heads
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [None, 1, 17, 600])
@pytest.mark.parametrize("map_name", MAPS)
def test_a_token_in_a_chunk_has_the_bits_it_has_alone(
    isa: str, map_name: str, window: int | None, dtype: torch.dtype
) -> None:
    of_query = MAPS[map_name]
    lengths, counts = [1, 64, 66, 513, 1100, 40], [1, 64, 3, 2, 150, 0]
    case = make_case(lengths, heads=len(of_query), kv_heads=max(of_query) + 1, head_size=64, dtype=dtype)
    heads = Heads(torch.tensor(of_query, dtype=torch.int32), 0.125, window)
    q_THE = normal(sum(counts), len(of_query), 64, seed=5, dtype=dtype)
    got = cpu_attention.paged_prefill(q_THE, case.pools, as_chunks(case, counts), heads=heads)
    alone = one_by_one(case, q_THE, counts, heads)  # which equals float64, above
    assert torch.equal(got, alone)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("head_size", "page_size"), [(5, 3), (16, 16), (24, 1), (80, 7), (128, 32), (576, 16)])
def test_chunks_take_any_head_and_page_size(isa: str, head_size: int, page_size: int, dtype: torch.dtype) -> None:
    case = make_case([40, 130], heads=7, kv_heads=2, head_size=head_size, dtype=dtype, page_size=page_size)
    heads = Heads(torch.tensor([0, 0, 1, 1, 1, 1, 1], dtype=torch.int32), head_size**-0.5)
    q_THE = normal(70, 7, head_size, seed=5, dtype=dtype)
    got = cpu_attention.paged_prefill(q_THE, case.pools, as_chunks(case, [33, 37]), heads=heads)
    assert torch.equal(got, one_by_one(case, q_THE, [33, 37], heads))


@pytest.mark.parametrize("seed", range(6))
def test_however_a_prompt_is_cut_its_tokens_have_the_same_bits(isa: str, seed: int) -> None:
    dice = random.Random(seed)
    window, length = dice.choice([None, 100, 700]), 900
    case = make_case([length], heads=6, kv_heads=2, head_size=64, dtype=torch.bfloat16)
    heads = Heads(torch.tensor([0, 0, 0, 1, 1, 1], dtype=torch.int32), 0.125, window)
    q_THE = normal(length, 6, 64, seed=seed, dtype=torch.bfloat16)
    whole = cpu_attention.paged_prefill(q_THE, case.pools, as_chunks(case, [length]), heads=heads)
    torch.set_num_threads(3)
    stops = [*sorted(dice.sample(range(1, length), 5)), length]
    for start, stop in zip([0, *stops], stops, strict=False):
        context = torch.tensor([0, stop - start], dtype=torch.int32), torch.tensor([stop], dtype=torch.int32)
        part = cpu_attention.paged_prefill(q_THE[start:stop], case.pools, (*context, case.table_BL), heads=heads)
        assert torch.equal(part, whole[start:stop]), f"seed {seed}: tokens {start} to {stop}"


def test_chunks_without_cpp_equal_float64() -> None:
    case = make_case([17, 100], heads=7, kv_heads=3, head_size=24, dtype=torch.float32)
    heads = Heads(torch.tensor(MAPS["uneven"], dtype=torch.int32), 0.3, 20)
    q_THE = torch.cat([normal(4, 7, 24, seed=5), case.q_BHE[:1], normal(1, 7, 24, seed=6), case.q_BHE[1:]])
    got = cpu_attention.paged_prefill_reference(q_THE, case.pools, as_chunks(case, [5, 2]), heads=heads)
    assert distance(got[[4, 6]], exact_attention(case, heads)) < 2e-6  # each chunk's last token sees the whole context


def test_chunks_that_do_not_fit_are_refused(isa: str) -> None:
    case = make_case([40], heads=1, kv_heads=1, head_size=8, dtype=torch.float32)
    heads, q_THE = Heads(torch.zeros(1, dtype=torch.int32), 1.0), normal(41, 1, 8, seed=5)
    with pytest.raises(RuntimeError, match="chunk 0 of 41 rows has a context of 40"):
        cpu_attention.paged_prefill(q_THE, case.pools, as_chunks(case, [41]), heads=heads)
    with pytest.raises(RuntimeError, match="chunks reach from row 0 to 3, q has 41"):
        cpu_attention.paged_prefill(q_THE, case.pools, as_chunks(case, [3]), heads=heads)
    case.table_BL[0, 1] = 99
    with pytest.raises(RuntimeError, match="names page 99"):
        cpu_attention.paged_prefill(q_THE[:3], case.pools, as_chunks(case, [3]), heads=heads)
