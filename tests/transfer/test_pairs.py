"""Who sends what: once each, by somebody who has it, and no source with much more to send than there must be."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Sequence

import pytest

from pd.transfer.layout import KVKind, KVLayout, Shard, split, tp_shards
from pd.transfer.pairs import Pair, pair_up
from pd.transfer.transport import LayoutMismatch

SIZES = range(1, 17)


@pytest.mark.parametrize("num_kv_heads", SIZES)
def test_for_all_tp_up_to_16_each_part_has_one_source_and_no_source_has_much_more_than_it_must(
    num_kv_heads: int,
) -> None:
    layout = KVLayout(30, num_kv_heads, 8, 4, "float32")
    num_query_heads = num_kv_heads * math.ceil(16 / num_kv_heads)
    groups = {tp: tp_shards(layout, num_query_heads, tp, 1) for tp in SIZES}
    for tp_src, src in groups.items():
        for tp_dst, dst in groups.items():
            pairs = pair_up(src, dst)
            told = f"{num_kv_heads} heads, tp {tp_src} -> {tp_dst}: {pairs}"
            assert_each_once(pairs, src, dst, told)
            load = loads(pairs, src)
            assert max(load) <= 1.2 * least_peak(src, dst) + 1, told
            for pair in pairs:
                least = min(load[s] for s, shard in enumerate(src) if set(pair.heads) & set(shard.heads))
                assert load[pair.src] - least <= max(2, layout.num_layers // 3), told


@pytest.mark.parametrize("seed", range(300))
def test_pipeline_stages_and_tp_on_either_side_meet(seed: int) -> None:
    rng = random.Random(seed)
    num_layers, num_kv_heads = rng.randint(1, 12), rng.randint(1, 16)
    layout = KVLayout(num_layers, num_kv_heads, 8, 4, "float32")
    src, dst = random_stages(rng, layout), random_stages(rng, layout)
    pairs = pair_up(src, dst)
    assert_each_once(pairs, src, dst, f"seed {seed}: {src} -> {dst}")


@pytest.mark.parametrize(
    ("num_kv_heads", "tp_src", "tp_dst"),
    [
        (num_kv_heads, tp_src, tp_dst)
        for num_kv_heads in (1, 2, 4, 8, 12)
        for tp_src in (1, 2, 3, 4, 6, 8, 12)
        for tp_dst in (1, 2, 3, 4, 6, 8, 12, 24)
        if tp_dst % tp_src == 0 and all(num_kv_heads % tp == 0 or tp % num_kv_heads == 0 for tp in (tp_src, tp_dst))
    ],
)
def test_where_decode_tp_is_a_multiple_each_has_the_usual_one_source(
    num_kv_heads: int, tp_src: int, tp_dst: int
) -> None:
    """Source: facts of unequal TP; D >= P: rank r reads from r·P // D."""
    layout = KVLayout(30, num_kv_heads, 8, 4, "float32")
    src, dst = (tp_shards(layout, num_kv_heads * 48, tp, 1) for tp in (tp_src, tp_dst))
    assert [(p.dst, p.src) for p in sorted(pair_up(src, dst), key=lambda p: p.dst)] == [
        (rank, rank * tp_src // tp_dst) for rank in range(tp_dst)
    ]


def test_those_who_hold_the_same_head_send_a_part_of_its_layers_each() -> None:
    layout = KVLayout(30, 2, 8, 4, "float32")
    src, dst = tp_shards(layout, 4, 4, 1), tp_shards(layout, 4, 1, 1)
    assert pair_up(src, dst) == (
        Pair(0, 0, range(15), range(1)),
        Pair(1, 0, range(15, 30), range(1)),
        Pair(2, 0, range(15), range(1, 2)),
        Pair(3, 0, range(15, 30), range(1, 2)),
    )


@pytest.mark.parametrize(
    ("tp_src", "tp_dst", "load"),
    [
        (1, 8, [488]),
        (8, 8, [61] * 8),
        (8, 1, [8, 7, 8, 7, 8, 8, 7, 8]),
        (8, 4, [30, 31, 30, 31, 30, 31, 30, 31]),
        (4, 6, [92, 91, 92, 91]),
        (16, 2, [8, 7, 8, 7, 8, 8, 7, 8] * 2),
    ],
)
def test_a_latent_that_all_hold_is_sent_by_all(tp_src: int, tp_dst: int, load: list[int]) -> None:
    layout = KVLayout(61, 1, 576, 16, "bfloat16", kind=KVKind.MLA)
    src, dst = tp_shards(layout, 128, tp_src, 1), tp_shards(layout, 128, tp_dst, 1)
    assert sorted(loads(pair_up(src, dst), src)) == sorted(load)


def test_a_rank_with_much_to_send_leaves_what_it_shares_to_the_other() -> None:
    """Rank 0 holds heads 0, 1 and 2, rank 1 holds 2 and 3: head 2 is due from rank 1."""
    src = (Shard(0, 1, 0, 3, 1), Shard(0, 1, 2, 4, 1))
    assert pair_up(src, (Shard(0, 1, 0, 4, 1),)) == (
        Pair(0, 0, range(1), range(2)),
        Pair(1, 0, range(1), range(2, 4)),
    )


def test_a_cut_that_levels_next_to_nothing_is_not_made() -> None:
    """Rank 0 holds one more layer than rank 1 alone holds; both hold 24 layers of head 1, which one of them sends."""
    src = (Shard(0, 24, 0, 2, 1), Shard(0, 24, 1, 2, 1), Shard(24, 27, 0, 2, 1))
    dst = (Shard(0, 27, 0, 1, 1), Shard(0, 27, 1, 2, 1))
    assert pair_up(src, dst) == (
        Pair(0, 0, range(24), range(1)),
        Pair(1, 1, range(24), range(1, 2)),
        Pair(2, 0, range(24, 27), range(1)),
        Pair(2, 1, range(24, 27), range(1, 2)),
    )


def test_pipeline_stages_that_cut_layers_elsewhere_meet() -> None:
    src = (Shard(0, 3, 0, 2, 1), Shard(3, 4, 0, 2, 1))
    dst = (Shard(0, 2, 0, 2, 1), Shard(2, 4, 0, 2, 1))
    assert pair_up(src, dst) == (
        Pair(0, 0, range(2), range(2)),
        Pair(0, 1, range(2, 3), range(2)),
        Pair(1, 1, range(3, 4), range(2)),
    )


def test_a_part_that_nobody_holds_is_named() -> None:
    with pytest.raises(LayoutMismatch, match=r"rank 0 needs layers 2\.\.3 of KV head 1"):
        pair_up((Shard(0, 4, 0, 1, 1), Shard(0, 2, 1, 2, 1)), (Shard(0, 4, 0, 2, 1),))


def assert_each_once(pairs: Sequence[Pair], src: Sequence[Shard], dst: Sequence[Shard], told: str) -> None:
    got = Counter((pair.dst, layer, head) for pair in pairs for layer in pair.layers for head in pair.heads)
    assert set(got.values()) == {1}, told
    assert got.keys() == {(d, layer, head) for d, s in enumerate(dst) for layer in s.layers for head in s.heads}, told
    for pair in pairs:
        assert set(pair.layers) <= set(src[pair.src].layers) and set(pair.heads) <= set(src[pair.src].heads), told


def loads(pairs: Sequence[Pair], src: Sequence[Shard]) -> list[int]:
    """Layers × heads that each source sends."""
    load = Counter[int]()
    for pair in pairs:
        load[pair.src] += len(pair.layers) * len(pair.heads)
    return [load[s] for s in range(len(src))]


def least_peak(src: Sequence[Shard], dst: Sequence[Shard]) -> float:
    """What the busiest of equally long stages must send at least, however finely it is cut: ranks that hold a head are
    neighbours, so the tightest group of ranks is a run of them, with all that nobody outside it holds."""
    demand = []
    for head in {head for shard in dst for head in shard.heads}:
        held_by = [i for i, shard in enumerate(src) if head in shard.heads]
        num = sum(len(shard.layers) for shard in dst if head in shard.heads)
        demand.append((held_by[0], held_by[-1], num))
    ranks = range(len(src))
    return max(
        sum(num for a, b, num in demand if first <= a and b <= last) / (last - first + 1)
        for first in ranks
        for last in ranks[first:]
    )


def random_stages(rng: random.Random, layout: KVLayout) -> tuple[Shard, ...]:
    """Ranks of one to four pipeline stages, each split over its own TP size."""
    num_query_heads = layout.num_kv_heads * rng.randint(1, 4)
    shards: list[Shard] = []
    for stage in split(layout.num_layers, rng.randint(1, min(4, layout.num_layers))):
        held = tp_shards(layout, num_query_heads, rng.randint(1, min(16, num_query_heads)), 1)
        shards += [Shard(stage.start, stage.stop, s.head_start, s.head_stop, 1) for s in held]
    return tuple(shards)
