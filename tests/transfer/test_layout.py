"""Offsets against a reference that lays a pool out element by element."""

from __future__ import annotations

import dataclasses
import itertools
import random

import msgspec
import pytest
import torch

from pd.transfer.layout import (
    DEFAULT_ORDER,
    KVKind,
    KVLayout,
    Shard,
    check_can_meet,
    check_shards,
    fingerprint,
    kv_heads_of,
    page_nbytes,
    pool_nbytes,
    split,
    strides,
    tp_shards,
    views,
)
from pd.transfer.transport import LayoutMismatch

DEFAULT_MODEL = KVLayout(30, 3, 64, 16, "bfloat16")


def elements_in_order(layout: KVLayout, shard: Shard) -> list[tuple[int, ...]]:
    """Every (kv, page, head, layer, token, dim) of a pool in memory's order, found by counting."""
    dims = layout.head_dims
    order = layout.order
    is_padded = order.index("dim") < order.index("kv")
    extents = {
        "page": shard.num_pages,
        "head": len(shard.heads),
        "layer": len(shard.layers),
        "kv": len(dims),
        "token": layout.page_size,
        "dim": max(dims),
    }
    found = []
    for index in itertools.product(*(range(extents[axis]) for axis in order)):
        at = dict(zip(order, index, strict=True))
        if at["dim"] < dims[at["kv"]] or is_padded:
            found.append(tuple(at[axis] for axis in ("kv", "page", "head", "layer", "token", "dim")))
    return found


@pytest.mark.parametrize("seed", range(60))
def test_strides_put_every_element_where_counting_puts_it(seed: int) -> None:
    rng = random.Random(seed)
    layout, shard = random_layout(rng), random_shard(rng)
    both = strides(layout, shard)
    places = elements_in_order(layout, shard)
    assert len(places) * layout.itemsize == pool_nbytes(layout, shard), f"seed {seed}"
    for place, (kv, page, head, layer, token, dim) in enumerate(places):
        if dim < layout.head_dims[kv]:
            s = both[kv]
            at = s.offset(page=page, head=head, layer=layer, token=token) + dim * s.dim
            assert at == place * layout.itemsize, f"seed {seed}: {layout} {shard}"


@pytest.mark.parametrize("seed", range(30))
def test_views_are_the_pool_seen_as_pages_heads_tokens_dim(seed: int) -> None:
    rng = random.Random(1000 + seed)
    layout, shard = random_layout(rng), random_shard(rng)
    places = elements_in_order(layout, shard)
    pool = torch.arange(len(places))
    for layer, pair in enumerate(views(layout, shard)):
        assert (pair.v is None) == (layout.kind is KVKind.MLA)
        for kv, view in enumerate(v for v in pair if v is not None):
            assert view.offset % layout.itemsize == 0
            tensor = torch.as_strided(pool, view.shape, view.strides, view.offset // layout.itemsize)
            for index in itertools.product(*map(range, view.shape)):
                page, head, token, dim = index
                expected = (kv, page, head, layer, token, dim)
                assert places[int(tensor[index])] == expected, f"seed {seed}: {layout} {shard}"


def test_default_model_takes_23040_bytes_a_token_and_one_piece_a_page() -> None:
    shard = Shard(0, 30, 0, 3, 7)
    assert DEFAULT_MODEL.token_nbytes == 23_040
    assert page_nbytes(DEFAULT_MODEL, shard) == 368_640
    assert pool_nbytes(DEFAULT_MODEL, shard) == 7 * 368_640
    k, v = strides(DEFAULT_MODEL, shard)
    assert (k.page, k.head, k.layer, k.token, k.dim) == (368_640, 122_880, 4096, 128, 2)
    assert (k.base, v.base) == (0, 2048)


@pytest.mark.parametrize(
    ("n", "parts", "lengths"),
    [
        (9, 2, [5, 4]),
        (9, 4, [3, 2, 2, 2]),
        (9, 8, [2] + [1] * 7),
        (8, 4, [2] * 4),
        (2, 3, [1, 1, 0]),
        (0, 2, [0, 0]),
    ],
)
def test_split_is_balanced_and_contiguous_with_the_longer_first(n: int, parts: int, lengths: list[int]) -> None:
    ranges = split(n, parts)
    assert [len(r) for r in ranges] == lengths
    assert [i for r in ranges for i in r] == list(range(n))


@pytest.mark.parametrize("num_kv_heads", range(1, 33))
@pytest.mark.parametrize("group", [1, 2, 3, 7])
def test_tp_that_divides_gives_the_usual_owners(num_kv_heads: int, group: int) -> None:
    """Source: the formulas that vLLM and SGLang use where heads divide."""
    num_query_heads = num_kv_heads * group
    layout = KVLayout(2, num_kv_heads, 8, 4, "float32")
    for tp in range(1, num_query_heads + 1):
        if num_query_heads % tp or (num_kv_heads % tp and tp % num_kv_heads):
            continue
        for rank, shard in enumerate(tp_shards(layout, num_query_heads, tp, 1)):
            if num_kv_heads >= tp:
                usual = range(rank * num_kv_heads // tp, (rank + 1) * num_kv_heads // tp)
            else:
                usual = range(rank * num_kv_heads // tp, rank * num_kv_heads // tp + 1)
            assert shard.heads == usual
            assert shard.layers == range(2)


@pytest.mark.parametrize(
    ("tp", "heads"),
    [
        (1, [range(3)]),
        (2, [range(2), range(1, 3)]),
        (3, [range(1), range(1, 2), range(2, 3)]),
        (4, [range(1), range(1, 2), range(1, 3), range(2, 3)]),
        (8, [range(1)] * 2 + [range(1, 2)] * 3 + [range(2, 3)] * 3),
    ],
)
def test_nine_query_heads_over_three_kv_heads_on_any_tp(tp: int, heads: list[range]) -> None:
    shards = tp_shards(DEFAULT_MODEL, 9, tp, 4)
    assert [shard.heads for shard in shards] == heads
    assert {shard.num_pages for shard in shards} == {4}


def test_two_kv_heads_on_four_ranks_are_0_0_1_1() -> None:
    assert [s.heads for s in tp_shards(KVLayout(1, 2, 8, 4, "float32"), 4, 4, 1)] == [range(1)] * 2 + [range(1, 2)] * 2


def test_mla_is_replicated_over_tp() -> None:
    layout = KVLayout(5, 1, 576, 16, "bfloat16", kind=KVKind.MLA)
    assert tp_shards(layout, 16, 3, 8) == (Shard(0, 5, 0, 1, 8),) * 3
    assert layout.token_nbytes == 5 * 576 * 2
    assert all(pair.v is None for pair in views(layout, Shard(0, 5, 0, 1, 8)))


@pytest.mark.parametrize("tp", [0, 10])
def test_tp_beyond_the_query_heads_is_refused_with_both_numbers(tp: int) -> None:
    with pytest.raises(ValueError, match=rf"tp {tp} .* 9 query heads"):
        tp_shards(DEFAULT_MODEL, 9, tp, 1)


def test_query_heads_that_do_not_share_evenly_are_refused() -> None:
    with pytest.raises(ValueError, match="10 query heads do not share 3 KV heads"):
        kv_heads_of(range(10), 10, 3)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"num_layers": 29}, "num_layers: theirs is 29, ours is 30"),
        ({"num_kv_heads": 9}, "num_kv_heads: theirs is 9, ours is 3"),
        ({"head_dim": 128, "v_head_dim": 64}, "head_dim: theirs is 128, ours is 64"),
        ({"v_head_dim": 32}, "v_head_dim: theirs is 32, ours is 64"),
        ({"kind": KVKind.MLA, "num_kv_heads": 1}, "kind: theirs is mla, ours is gqa"),
    ],
)
def test_what_cannot_meet_is_refused_with_both_values(change: dict[str, object], told: str) -> None:
    theirs = dataclasses.replace(DEFAULT_MODEL, **change)
    with pytest.raises(LayoutMismatch, match=told):
        check_can_meet(DEFAULT_MODEL, theirs, peer="prefill-0")
    assert fingerprint(DEFAULT_MODEL) != fingerprint(theirs)


def test_page_size_order_and_dtype_may_differ() -> None:
    other = KVLayout(30, 3, 64, 32, "float32", v_head_dim=64, order=("layer", "kv", "page", "token", "head", "dim"))
    check_can_meet(DEFAULT_MODEL, other)
    assert fingerprint(DEFAULT_MODEL) == fingerprint(other)


@pytest.mark.parametrize(
    "shard",
    [
        Shard(0, 31, 0, 3, 1),
        Shard(0, 30, 0, 4, 1),
        Shard(0, 30, 2, 2, 1),
        Shard(-1, 30, 0, 3, 1),
        Shard(0, 30, 0, 3, -1),
    ],
)
def test_a_shard_outside_the_model_is_refused(shard: Shard) -> None:
    check_shards(DEFAULT_MODEL, (Shard(0, 30, 0, 3, 1),))
    with pytest.raises(LayoutMismatch, match="rank 1 of p says"):
        check_shards(DEFAULT_MODEL, (Shard(0, 30, 0, 3, 1), shard), peer="p")


@pytest.mark.parametrize(
    ("broken", "told"),
    [
        ({"order": ("page", "head", "layer", "kv", "token", "token")}, "no permutation"),
        ({"dtype": "int3"}, "int3"),
        ({"page_size": 0}, "1 or more"),
        ({"v_head_dim": -4}, "1 or more"),
        ({"kind": "mla"}, "one latent head"),
    ],
)
def test_a_layout_that_no_pool_can_have_ends_at_the_codec(broken: dict[str, object], told: str) -> None:
    sound = msgspec.to_builtins(DEFAULT_MODEL)
    assert msgspec.convert(sound, KVLayout) == DEFAULT_MODEL
    with pytest.raises(msgspec.ValidationError, match=told):
        msgspec.convert(sound | broken, KVLayout)


def random_layout(rng: random.Random) -> KVLayout:
    kind = rng.choice([KVKind.GQA, KVKind.GQA, KVKind.MLA])
    order = list(DEFAULT_ORDER)
    rng.shuffle(order)
    v_head_dim = None if kind is KVKind.MLA else rng.choice([None, rng.randint(1, 4)])
    num_heads = 1 if kind is KVKind.MLA else rng.randint(1, 4)
    dtype = rng.choice(["float32", "bfloat16", "float16"])
    return KVLayout(4, num_heads, rng.randint(1, 4), rng.randint(1, 4), dtype, v_head_dim, tuple(order), kind)


def random_shard(rng: random.Random) -> Shard:
    """A box by itself; heads need not be of any layout here."""
    layer, head = rng.randrange(3), rng.randrange(3)
    return Shard(layer, layer + rng.randint(1, 3), head, head + rng.randint(1, 3), rng.randint(1, 3))
