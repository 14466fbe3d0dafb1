"""One number for KV in any arrangement: equal where the KV is, and another for every change that a fault could make."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from pd.transfer.digest import Digester, total, whole
from pd.transfer.layout import KVKind, KVLayout, Shard, pool_nbytes, tp_shards
from pd.transfer.packed import End
from pd.transfer.pairs import Pair, pair_up
from pd.transfer.reshard import DTYPES, views
from tests.transfer.kit import cpp
from tests.transfer.test_plan import random_layout, random_order

NUM_PAGES = 9


class Pool:
    """One rank's, full of noise until it is filled."""

    def __init__(self, layout: KVLayout, shard: Shard) -> None:
        self.end = End(layout, shard)
        self.region = torch.randint(0, 256, (pool_nbytes(layout, shard) + 64,), dtype=torch.uint8)

    def views(self) -> tuple[Tensor, ...]:
        return views(self.region, *self.end, whole(self.end))

    def fill(self, truth: Sequence[Tensor], pages: Sequence[int], start: int) -> None:
        """With `truth` of K and of V, [heads, layers, tokens, dim], whose first token is at position `start`."""
        shard, size = self.end.shard, self.end.layout.page_size
        for pool_PHLSE, all_HLTE in zip(self.views(), truth, strict=True):
            own = all_HLTE[shard.head_start : shard.head_stop, shard.layer_start : shard.layer_stop]
            for t in range(start, all_HLTE.shape[2]):
                place = t - start
                pool_PHLSE[pages[place // size], :, :, place % size] = own[:, :, t].to(pool_PHLSE.dtype)

    def digest(self, pages: Sequence[int], tokens: range, *, box: Pair | None = None, dtype: str | None = None) -> int:
        digester = Digester(self.region, self.end, box or whole(self.end), dtype or self.end.layout.dtype)
        return total([int(part) for part in digester.parts(pages, tokens)])


def group(rng: random.Random, layout: KVLayout) -> tuple[Shard, ...]:
    """Any TP, and now and then two pipeline stages."""
    num_query_heads = layout.num_kv_heads * rng.randint(1, 3)
    shards = tp_shards(layout, num_query_heads, rng.randint(1, num_query_heads), NUM_PAGES)
    if layout.num_layers == 1 or rng.random() < 0.6:
        return shards
    cut = rng.randint(1, layout.num_layers - 1)
    stages = ((0, cut), (cut, layout.num_layers))
    return tuple(Shard(a, b, s.head_start, s.head_stop, NUM_PAGES) for a, b in stages for s in shards)


def sides(rng: random.Random) -> tuple[KVLayout, KVLayout]:
    """Two layouts that can meet: of the same model, and anything else."""
    src = replace(random_layout(rng), dtype=rng.choice(list(DTYPES)), head_dim=rng.randint(1, 9))
    dst = replace(src, page_size=rng.randint(1, 5), order=random_order(rng), dtype=rng.choice([src.dtype, *DTYPES]))
    return src, dst


def random_truth(layout: KVLayout, num_tokens: int) -> list[Tensor]:
    """K and V as the layout's dtype can say them, in float32."""
    shape = (layout.num_kv_heads, layout.num_layers, num_tokens)
    return [torch.randn(*shape, dim).to(DTYPES[layout.dtype]).float() for dim in layout.head_dims]


@pytest.mark.parametrize("seeds", [range(i, i + 25) for i in range(0, 300, 25)], ids=str)
def test_what_is_sent_and_what_landed_have_one_digest_in_any_two_shapes(seeds: range) -> None:
    for seed in seeds:
        rng = random.Random(seed)
        torch.manual_seed(seed)
        src, dst = sides(rng)
        unit = src.page_size * dst.page_size
        num_tokens = rng.randint(1, NUM_PAGES * min(src.page_size, dst.page_size))
        start = rng.randrange(0, num_tokens, unit)  # what was held before is not sent
        truth = random_truth(src, num_tokens)
        sent, landed = ([Pool(layout, shard) for shard in group(rng, layout)] for layout in (src, dst))
        pages = [rng.sample(range(NUM_PAGES), NUM_PAGES) for _ in range(2)]
        for pool in sent:
            pool.fill(truth, pages[0], start)
        for pool in landed:
            pool.fill(truth, pages[1], start)
        pairs = pair_up([pool.end.shard for pool in sent], [pool.end.shard for pool in landed])
        tokens = range(start, num_tokens)
        there = total([sent[p.src].digest(pages[0], tokens, box=p, dtype=dst.dtype) for p in pairs])
        here = total([pool.digest(pages[1], tokens) for pool in landed])
        assert there == here, f"seed {seed}: {src} -> {dst}"
        cut = rng.randrange(start, num_tokens + 1, dst.page_size)
        halves = [
            pool.digest(pages[1][(part.start - start) // dst.page_size :], part)
            for part in (range(start, cut), range(cut, num_tokens))
            for pool in landed
        ]
        assert total(halves) == here, f"seed {seed}: in two parts, cut at {cut}"


@pytest.mark.parametrize("seeds", [range(i, i + 50) for i in range(0, 400, 50)], ids=str)
def test_cpp_makes_of_any_pool_the_number_that_torch_makes(seeds: range) -> None:
    """Any dtype, axis order, page size, head size, box of heads and layers, pages, and tokens of them."""
    cpp()
    for seed in seeds:
        rng = random.Random(seed)
        torch.manual_seed(seed)
        sizes = {"head_dim": rng.choice([1, 3, 7, 8, 40, 64, 100]), "dtype": rng.choice(list(DTYPES))}
        layout = replace(random_layout(rng), order=random_order(rng), page_size=rng.choice([1, 3, 4, 16]), **sizes)
        if layout.kind is KVKind.GQA:
            layout = replace(layout, v_head_dim=rng.choice([None, 1, 5, 24, 33]))
        shard = rng.choice(group(rng, layout))
        pool = Pool(layout, shard)
        heads, layers = (some(rng, every) for every in (shard.heads, shard.layers))
        digester = Digester(pool.region, pool.end, Pair(0, 0, layers, heads), layout.dtype)
        pages = rng.sample(range(NUM_PAGES), NUM_PAGES)
        start = rng.choice([0, 5, 1 << 20]) * layout.page_size
        tokens = range(start, start + rng.randint(0, NUM_PAGES * layout.page_size))
        by_torch = total([int(part) for part in digester.parts_by_torch(pages, tokens)])
        assert total([int(part) for part in digester.parts(pages, tokens)]) == by_torch, f"seed {seed}: {pool.end}"


@pytest.mark.parametrize("page", [-1, NUM_PAGES])
def test_a_page_that_the_pool_has_not_is_refused(page: int) -> None:
    pool, _ = full()
    with pytest.raises(IndexError):
        pool.digest([0, page], range(2 * LAYOUT.page_size))


def some(rng: random.Random, every: range) -> range:
    start = rng.randrange(every.start, every.stop)
    return range(start, rng.randint(start + 1, every.stop))


LAYOUT = KVLayout(3, 2, 8, 4, "bfloat16", v_head_dim=6)
TOKENS = range(30)


def full(layout: KVLayout = LAYOUT, seed: int = 0) -> tuple[Pool, list[int]]:
    torch.manual_seed(seed)
    pool = Pool(layout, Shard(0, layout.num_layers, 0, layout.num_kv_heads, NUM_PAGES))
    pages = random.Random(seed).sample(range(NUM_PAGES), NUM_PAGES)
    pool.fill(random_truth(layout, len(TOKENS)), pages, 0)
    return pool, pages


def test_any_flipped_bit_of_a_token_changes_it_and_none_behind_the_last_token_does() -> None:
    pool, pages = full()
    before = pool.digest(pages, TOKENS)
    rng = random.Random(1)
    for view_PHLSE in pool.views():
        for _ in range(150):
            t, head, layer, element = (rng.randrange(n) for n in (len(TOKENS), 2, 3, view_PHLSE.shape[4]))
            cell = view_PHLSE[pages[t // 4], head, layer, t % 4, element : element + 1].view(torch.int16)
            cell ^= 1 << rng.randrange(15) if rng.random() < 0.7 else -(1 << 15)
            after = pool.digest(pages, TOKENS)
            assert after != before, f"token {t}, head {head}, layer {layer}, element {element}"
            before = after
        view_PHLSE[pages[7], :, :, 2:] += 1.0
    assert pool.digest(pages, TOKENS) == before, "tokens 30 and 31 are not asked for"


def test_signs_that_change_in_pairs_change_it() -> None:
    """The top bits of two words: their products' top bits would cancel out, were they only added."""
    pool, pages = full()
    k_PHLSE, _ = pool.views()
    before = pool.digest(pages, TOKENS)
    k_PHLSE[pages[0], 0, 0, 0, [3, 7]] *= -1.0
    assert pool.digest(pages, TOKENS) != before
    k_PHLSE[pages[0], 0, 0, 0, [3, 7]] *= -1.0
    assert pool.digest(pages, TOKENS) == before


def test_the_same_bit_flipped_in_two_rows_changes_it() -> None:
    pool, pages = full()
    before = pool.digest(pages, TOKENS)
    rng = random.Random(2)
    k_PHLSE, _ = pool.views()
    for _ in range(200):
        bit, element = rng.randrange(-1, 15), rng.randrange(8)
        mask = -(1 << 15) if bit < 0 else 1 << bit
        for t in rng.sample(TOKENS, 2):
            k_PHLSE[pages[t // 4], 1, 2, t % 4, element : element + 1].view(torch.int16).bitwise_xor_(mask)
        after = pool.digest(pages, TOKENS)
        assert after != before, f"bit {bit} of element {element}"
        before = after


def swapped(view: Tensor, a: tuple[object, ...], b: tuple[object, ...]) -> None:
    view[a], view[b] = view[b].clone(), view[a].clone()


@pytest.mark.parametrize(
    ("what", "a", "b"),
    [
        ("two heads", (slice(None), 0), (slice(None), 1)),
        ("two layers", (slice(None), slice(None), 0), (slice(None), slice(None), 2)),
        ("two tokens", (slice(None), slice(None), slice(None), 0), (slice(None), slice(None), slice(None), 1)),
        ("two pages", (0,), (1,)),
        ("two rows", (0, 0, 0, 0), (1, 1, 1, 1)),
        ("two elements of all rows", (..., 0), (..., 4)),
    ],
)
def test_whatever_stands_in_anothers_place_changes_it(what: str, a: tuple[object, ...], b: tuple[object, ...]) -> None:
    pool, _ = full()
    pages, tokens = list(range(NUM_PAGES)), range(4 * NUM_PAGES)
    before = pool.digest(pages, tokens)
    swapped(pool.views()[0], a, b)
    assert pool.digest(pages, tokens) != before, what
    swapped(pool.views()[0], a, b)
    assert pool.digest(pages, tokens) == before


def test_k_in_the_place_of_v_and_tokens_moved_by_a_page_change_it() -> None:
    pool, pages = full(KVLayout(2, 2, 8, 4, "float32"))
    before = pool.digest(pages, TOKENS)
    k_PHLSE, v_PHLSE = pool.views()
    both = k_PHLSE.clone(), v_PHLSE.clone()
    k_PHLSE.copy_(both[1])
    v_PHLSE.copy_(both[0])
    assert pool.digest(pages, TOKENS) != before
    k_PHLSE.copy_(both[0])
    v_PHLSE.copy_(both[1])
    assert pool.digest(pages, TOKENS) == before
    assert pool.digest(pages, range(4, 34)) != before, "the same KV at later positions"


def test_it_means_the_same_on_every_machine() -> None:
    """Of a pool of known bytes, by the formula in words of Python."""
    layout = KVLayout(1, 1, 4, 2, "float32")
    pool = Pool(layout, Shard(0, 1, 0, 1, 1))
    k_PHLSE, v_PHLSE = pool.views()
    k_PHLSE.copy_(torch.arange(8.0).view(1, 1, 1, 2, 4))
    v_PHLSE.copy_(-torch.arange(8.0).view(1, 1, 1, 2, 4))
    assert pool.digest([0], range(2)) == by_hand([k_PHLSE[0, 0, 0], v_PHLSE[0, 0, 0]])


def by_hand(tensors: Sequence[Tensor]) -> int:
    mask = (1 << 64) - 1

    def weight(place: int) -> int:
        x = place * 0x9E3779B97F4A7C15 & mask
        x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & mask
        x = (x ^ x >> 27) * 0x94D049BB133111EB & mask
        return (x ^ x >> 31) | 1

    def signed(x: int) -> int:
        return (x & mask) - (1 << 64) if x & 1 << 63 else x & mask

    def mix(x: int) -> int:
        x = signed(x)
        x = signed((x ^ x >> 32) * 0xBF58476D1CE4E5B9)
        return x ^ x >> 29

    digest = 0
    for kv, rows_SE in enumerate(tensors):
        for position, row_E in enumerate(rows_SE):
            found = position * 0xC2B2AE3D27D4EB4F + kv * 0x165667B19E3779F9
            numbers = row_E.contiguous().view(torch.uint8).tolist()
            for place in range(0, len(numbers), 8):
                word = int.from_bytes(bytes(numbers[place : place + 8]), "little")
                word ^= word >> 32
                found += word * weight(place // 8 + 1)
            digest += mix(found)
    return digest & mask
