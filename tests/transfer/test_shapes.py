"""Any shape of prefill to any shape of decode: each element lands once."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

import numpy as np
import pytest

from pd.transfer.layout import DEFAULT_ORDER, KVKind, KVLayout, Shard, pool_nbytes, split, strides, tp_shards
from pd.transfer.plan import routes_between
from pd.transfer.transport import Span


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
    for route in routes_between(theirs, src_group, ours, dst_group):
        spans = route.spans(src_pages, dst_pages, 0, num_tokens)
        assert_merged(spans, seed)
        for span in spans:
            a, b, count = (value // ours.itemsize for value in span)
            got[route.dst][b : b + count] = sources[route.src][a : a + count]
            num_writes[route.dst][b : b + count] += 1
    unit = math.gcd(theirs.page_size, ours.page_size)
    num_moved = -(-num_tokens // unit) * unit
    for shard, pool, writes in zip(dst_group, got, num_writes, strict=True):
        due = filled(ours, shard, dst_pages, num_tokens=num_moved)
        assert np.array_equal(pool, due), f"seed {seed}: {theirs} -> {ours}"
        assert np.array_equal(writes, due != 0), f"seed {seed}: an element was written twice, or beside"


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
