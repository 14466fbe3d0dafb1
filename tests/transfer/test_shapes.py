"""Any shape of prefill to any shape of decode: who sends what, how evenly, and that each element lands once."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest

from pd.transfer.layout import DEFAULT_ORDER, KVKind, KVLayout, Shard, pool_nbytes, split, strides, tp_shards
from pd.transfer.plan import Pair, Route, pair_up
from pd.transfer.transport import Span

SIZES = range(1, 17)


@pytest.mark.parametrize("num_kv_heads", SIZES)
def test_for_all_tp_up_to_16_each_head_has_one_source_and_no_holder_idles(num_kv_heads: int) -> None:
    layout = KVLayout(2, num_kv_heads, 8, 4, "float32")
    num_query_heads = num_kv_heads * math.ceil(16 / num_kv_heads)
    groups = {tp: tp_shards(layout, num_query_heads, tp, 1) for tp in SIZES}
    for tp_src, src in groups.items():
        for tp_dst, dst in groups.items():
            pairs = pair_up(src, dst)
            told = f"{num_kv_heads} heads, tp {tp_src} -> {tp_dst}: {pairs}"
            assert_each_once(pairs, src, dst, told)
            assert_level(pairs, src, told)


@pytest.mark.parametrize("seed", range(100))
def test_pipeline_stages_and_tp_on_either_side_meet(seed: int) -> None:
    rng = random.Random(seed)
    layout = random_layout(rng, num_layers=rng.randint(2, 12), num_kv_heads=rng.randint(1, 16))
    src, dst = random_group(rng, layout), random_group(rng, layout)
    pairs = pair_up(src, dst)
    assert_each_once(pairs, src, dst, f"seed {seed}: {src} -> {dst}")


@pytest.mark.parametrize("seed", range(150))
def test_every_element_lands_once_where_it_belongs_and_nothing_else_changes(seed: int) -> None:
    """Up to 16 heads and 16 ranks, stages, MLA, K and V of other size, other pages and orders on either side."""
    rng = random.Random(seed)
    theirs = random_layout(rng, num_layers=rng.randint(1, 4), num_kv_heads=rng.randint(1, 16))
    ours = random_partner(rng, theirs)
    num_tokens = rng.randint(1, 3 * max(theirs.page_size, ours.page_size))
    src_group, dst_group = random_group(rng, theirs), random_group(rng, ours)
    src_pages = rng.sample(range(30), -(-num_tokens // theirs.page_size))
    dst_pages = rng.sample(range(30), -(-num_tokens // ours.page_size))
    sources = [filled(theirs, shard, src_pages) for shard in src_group]
    got = [np.zeros(pool_nbytes(ours, shard) // ours.itemsize, np.int64) for shard in dst_group]
    num_writes = [np.zeros_like(pool) for pool in got]
    for pair in pair_up(src_group, dst_group):
        route = Route(theirs, src_group[pair.src], ours, dst_group[pair.dst], pair)
        spans = route.spans(src_pages, dst_pages, 0, num_tokens)
        assert_merged(spans, seed)
        for span in spans:
            a, b, count = (value // ours.itemsize for value in span)
            got[pair.dst][b : b + count] = sources[pair.src][a : a + count]
            num_writes[pair.dst][b : b + count] += 1
    unit = math.gcd(theirs.page_size, ours.page_size)
    num_moved = -(-num_tokens // unit) * unit
    for shard, pool, writes in zip(dst_group, got, num_writes, strict=True):
        due = filled(ours, shard, dst_pages, num_tokens=num_moved)
        assert np.array_equal(pool, due), f"seed {seed}: {theirs} -> {ours}"
        assert np.array_equal(writes, due != 0), f"seed {seed}: an element was written twice, or beside"


def assert_each_once(pairs: Sequence[Pair], src: Sequence[Shard], dst: Sequence[Shard], told: str) -> None:
    got = Counter((pair.dst, layer, head) for pair in pairs for layer in pair.layers for head in pair.heads)
    assert set(got.values()) == {1}, told
    assert got.keys() == {(d, layer, head) for d, s in enumerate(dst) for layer in s.layers for head in s.heads}, told
    for pair in pairs:
        assert set(pair.layers) <= set(src[pair.src].layers) and set(pair.heads) <= set(src[pair.src].heads), told


def assert_level(pairs: Sequence[Pair], src: Sequence[Shard], told: str) -> None:
    """No source sends a head that another holder, with two heads less to send, could."""
    load = Counter[int]()
    for pair in pairs:
        load[pair.src] += len(pair.heads)
    for pair in pairs:
        for head in pair.heads:
            least = min(load[s] for s, shard in enumerate(src) if head in shard.heads)
            assert load[pair.src] - least < 2, told


def assert_merged(spans: Sequence[Span], seed: int) -> None:
    starts = {(span.src, span.dst) for span in spans}
    touching = [span for span in spans if (span.src + span.nbytes, span.dst + span.nbytes) in starts]
    assert not touching, f"seed {seed}: {touching} could be one span with what follows"


def filled(layout: KVLayout, shard: Shard, pages: Sequence[int], *, num_tokens: int | None = None) -> np.ndarray:
    """A pool whose every element of these tokens says which of the model's it is; all else is 0."""
    count = len(pages) * layout.page_size if num_tokens is None else num_tokens
    pool = np.zeros(pool_nbytes(layout, shard) // layout.itemsize, np.int64)
    heads, layers, tokens = np.array(shard.heads), np.array(shard.layers), np.arange(count)
    for kv, s in enumerate(strides(layout, shard)):
        page, inside = np.array(pages)[tokens // layout.page_size], tokens % layout.page_size
        grids = np.ix_(heads, layers, tokens, np.arange(s.num_dims))
        label = ((grids[0] * 100 + grids[1]) * 100 + grids[2]) * 100 + grids[3]
        row = s.base + page * s.page + inside * s.token
        at = grids[0] * s.head + grids[1] * s.layer + row[None, None, :, None] + grids[3] * s.dim
        first = shard.head_start * s.head + shard.layer_start * s.layer
        pool[(at - first) // layout.itemsize] = 2 * label + kv + 1
    return pool


def random_layout(rng: random.Random, *, num_layers: int, num_kv_heads: int) -> KVLayout:
    kind = rng.choice([KVKind.GQA, KVKind.GQA, KVKind.GQA, KVKind.MLA])
    return KVLayout(
        num_layers,
        1 if kind is KVKind.MLA else num_kv_heads,
        rng.randint(1, 5),
        rng.choice([1, 2, 3, 4, 6, 8]),
        rng.choice(["float32", "bfloat16", "float16"]),
        None if kind is KVKind.MLA else rng.choice([None, rng.randint(1, 5)]),
        random_order(rng),
        kind,
    )


def random_partner(rng: random.Random, a: KVLayout) -> KVLayout:
    """A layout that can meet `a`."""
    page_size = rng.choice([a.page_size, 4 * a.page_size, rng.choice([1, 2, 3, 4, 6, 8])])
    order = rng.choice([a.order, random_order(rng)])
    return KVLayout(a.num_layers, a.num_kv_heads, a.head_dim, page_size, a.dtype, a.v_head_dim, order, a.kind)


def random_order(rng: random.Random) -> tuple[str, ...]:
    return tuple(rng.sample(DEFAULT_ORDER, len(DEFAULT_ORDER))) if rng.random() < 0.7 else DEFAULT_ORDER


def random_group(rng: random.Random, layout: KVLayout) -> tuple[Shard, ...]:
    """Ranks of one to four pipeline stages, cut anywhere, each split over its own TP size."""
    num_query_heads = layout.num_kv_heads * rng.randint(1, 4)
    stages = list(split(layout.num_layers, rng.randint(1, min(4, layout.num_layers))))
    shards: list[Shard] = []
    for stage in stages:
        tp = rng.randint(1, min(16, num_query_heads))
        held = tp_shards(layout, num_query_heads, tp, 30)
        shards += [Shard(stage.start, stage.stop, s.head_start, s.head_stop, 30) for s in held]
    return tuple(shards)
