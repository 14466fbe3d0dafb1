"""Spans against a reference that labels every byte of both pools."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator, Sequence

import pytest

from pd.transfer import many
from pd.transfer.layout import DEFAULT_ORDER, KVKind, KVLayout, Shard, pool_nbytes, strides, tp_shards
from pd.transfer.pairs import pair_up
from pd.transfer.plan import Route, routes_between
from pd.transfer.region import check_spans
from pd.transfer.rows import Rows
from pd.transfer.transport import Span, TransferError
from tests.transfer.kit import cpp

DEFAULT_MODEL = KVLayout(30, 3, 64, 16, "bfloat16")


# ---- spans -------------------------------------------------------------------------------------------------

Label = tuple[int, int, int, int, int]  # layer, head, k|v, token, byte of the row


@pytest.fixture(params=["C++", "numpy"])
def planner(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """Of any number of pieces."""
    found = cpp() if request.param == "C++" else None
    monkeypatch.setattr(many, "load", lambda: found)
    monkeypatch.setattr(many, "_MANY", 1)
    monkeypatch.setattr(many, "_MANY_FOR_NUMPY", 1)


@pytest.mark.parametrize("seeds", [range(i, i + 50) for i in range(0, 2000, 50)], ids=str)
def test_every_destination_byte_is_written_once_with_the_right_one_and_nothing_outside(seeds: range) -> None:
    for seed in seeds:
        check_one_meeting(seed)


@pytest.mark.usefixtures("planner")
def test_planned_as_an_array_spans_are_the_same() -> None:
    for seed in range(2000):
        case = Case(random.Random(seed))
        for route in case.routes:
            found = many.plan(route, *case.job)
            assert isinstance(found, Rows) and list(found) == route.spans(*case.job), f"seed {seed}"


class Case:
    """Two groups of ranks that can meet, and the pages of one request."""

    def __init__(self, rng: random.Random) -> None:
        self.theirs, self.ours = random_meeting(rng)
        self.num_tokens = rng.randint(1, 3 * max(self.theirs.page_size, self.ours.page_size))
        start = rng.randrange(3) * self.theirs.page_size * self.ours.page_size
        self.src_group, self.dst_group = random_group(rng, self.theirs), random_group(rng, self.ours)
        src_pages = rng.sample(range(12), -(-self.num_tokens // self.theirs.page_size))
        dst_pages = rng.sample(range(12), -(-self.num_tokens // self.ours.page_size))
        if rng.random() < 0.5:  # as a fresh pool hands them out
            src_pages, dst_pages = sorted(src_pages), sorted(dst_pages)
        self.job = (src_pages, dst_pages, start, start + self.num_tokens)
        self.routes = routes_between(self.theirs, self.src_group, self.ours, self.dst_group)


def check_one_meeting(seed: int) -> None:
    case = Case(random.Random(seed))
    theirs, ours, (src_pages, dst_pages, *_) = case.theirs, case.ours, case.job
    written = [Counter[int]() for _ in case.dst_group]
    for route in case.routes:
        src, dst = case.src_group[route.src], case.dst_group[route.dst]
        spans = route.spans(*case.job)
        unit_tokens = -(-case.num_tokens // route.unit) * route.unit
        labels_src = labels(theirs, src, src_pages, unit_tokens)
        labels_dst = labels(ours, dst, dst_pages, unit_tokens)
        for span in spans:
            for i in range(span.nbytes):
                assert labels_src[span.src + i] == labels_dst[span.dst + i], f"seed {seed}"
                written[route.dst][span.dst + i] += 1
        assert spans == merged_by_hand(spans), f"seed {seed}: {theirs} -> {ours}"
    for shard, counts in zip(case.dst_group, written, strict=True):
        due = labels(ours, shard, dst_pages, unit_tokens)
        assert counts == Counter(dict.fromkeys(due, 1)), f"seed {seed}: {theirs} -> {ours}"
        assert max(counts) < pool_nbytes(ours, shard), f"seed {seed}"


@pytest.mark.parametrize(("tp_src", "tp_dst"), [(1, 1), (1, 2), (2, 1), (3, 2), (2, 3), (8, 1), (4, 8)])
def test_a_page_between_two_ranks_is_one_span_even_when_heads_differ(tp_src: int, tp_dst: int) -> None:
    src, dst = tp_shards(DEFAULT_MODEL, 9, tp_src, 300), tp_shards(DEFAULT_MODEL, 9, tp_dst, 300)
    for route in routes_between(DEFAULT_MODEL, src, DEFAULT_MODEL, dst):
        spans = route.spans(range(0, 256, 2), range(40, 296, 2), 0, 2048)
        assert len(spans) == 128
        assert {span.nbytes for span in spans} == {
            sum(len(pair.heads) * len(pair.layers) * 4096 for pair in route.pairs)
        }


def test_neighbouring_pages_are_one_span() -> None:
    (shard,) = tp_shards(DEFAULT_MODEL, 9, 1, 300)
    (pair,) = pair_up((shard,), (shard,))
    route = Route(DEFAULT_MODEL, shard, DEFAULT_MODEL, shard, (pair,))
    page = 368_640
    assert route.spans([3, 4, 5], [7, 8, 9], 0, 33) == [Span(3 * page, 7 * page, 3 * page)]
    assert route.spans([5, 3, 4], [0, 8, 9], 0, 48) == [
        Span(3 * page, 8 * page, 2 * page),
        Span(5 * page, 0, page),
    ]


@pytest.mark.parametrize(
    ("src_pages", "dst_pages", "start", "stop", "told"),
    [
        ([0], [0], 8, 16, "begin at no source page"),
        ([0], [0, 1], 0, 16, "2 destination pages of 16 for tokens"),
        ([0, 1], [0], 0, 16, "2 source pages of 16 for tokens"),
        ([4], [0], 0, 16, r"source pages 4\.\.4 are not within 0\.\.3"),
        ([0], [-1], 0, 16, r"destination pages -1\.\.-1"),
        ([0], [2**63], 0, 16, r"destination pages 9223372036854775808\.\."),
        ([0], [0], 16, 0, r"tokens \[16, 0\)"),
    ],
)
@pytest.mark.usefixtures("planner")
def test_pages_that_do_not_fit_are_refused(
    src_pages: list[int], dst_pages: list[int], start: int, stop: int, told: str
) -> None:
    (shard,) = tp_shards(DEFAULT_MODEL, 9, 1, 4)
    (pair,) = pair_up((shard,), (shard,))
    route = Route(DEFAULT_MODEL, shard, DEFAULT_MODEL, shard, (pair,))
    with pytest.raises(ValueError, match=told):
        route.spans(src_pages, dst_pages, start, stop)
    with pytest.raises(ValueError, match=told):
        many.plan(route, src_pages, dst_pages, start, stop)


@pytest.mark.parametrize("row", [(-1, 0, 5), (0, -1, 5), (96, 0, 5), (0, 196, 5), (0, 0, 0), (0, 0, -1)])
def test_an_array_with_one_span_outside_is_refused_by_its_values(row: tuple[int, int, int]) -> None:
    sound = [(0, 0, 100), (95, 195, 5), (99, 199, 1)]
    assert check_spans(rows(sound), src_nbytes=100, dst_nbytes=200) == 106
    with pytest.raises(TransferError, match=rf"Span\(src={row[0]}, dst={row[1]}, nbytes={row[2]}\) leaves a region"):
        check_spans(rows([*sound, row]), src_nbytes=100, dst_nbytes=200)


def rows(spans: Sequence[tuple[int, int, int]]) -> Rows:
    return Rows.of([Span(*span) for span in spans])


def test_rows_are_a_sequence_of_spans() -> None:
    spans = [Span(i, 10 * i, 1 + i) for i in range(7)]
    table = Rows.of(spans)
    assert Rows.of(table) is table and list(table) == spans and len(table) == 7
    assert table[-1] == spans[-1] and list(table[2:5]) == spans[2:5] and list(table[::-2]) == spans[::-2]
    with pytest.raises(IndexError):
        table[7]


def test_no_tokens_are_no_spans() -> None:
    (shard,) = tp_shards(DEFAULT_MODEL, 9, 1, 4)
    (pair,) = pair_up((shard,), (shard,))
    assert Route(DEFAULT_MODEL, shard, DEFAULT_MODEL, shard, (pair,)).spans([], [], 16, 16) == []


# ---- builders and the reference ----------------------------------------------------------------------------


def labels(layout: KVLayout, shard: Shard, pages: list[int], num_tokens: int) -> dict[int, Label]:
    """What each byte of the request's pages means, by its offset in the pool."""
    return dict(_labels(layout, shard, pages, num_tokens))


def _labels(layout: KVLayout, shard: Shard, pages: list[int], num_tokens: int) -> Iterator[tuple[int, Label]]:
    size = layout.itemsize
    for kv, s in enumerate(strides(layout, shard)):
        for layer in shard.layers:
            for head in shard.heads:
                for token in range(num_tokens):
                    page, inside = pages[token // layout.page_size], token % layout.page_size
                    at = {"page": page, "head": head - shard.head_start, "layer": layer - shard.layer_start}
                    row = s.offset(**at, token=inside)
                    for byte in range(s.num_dims * size):
                        yield row + byte // size * s.dim + byte % size, (layer, head, kv, token, byte)


def merged_by_hand(spans: list[Span]) -> list[Span]:
    """Joins any two spans that touch on both sides, in whatever order they come, until none do."""
    by_start = {(span.src, span.dst): span for span in spans}
    assert len(by_start) == len(spans)
    for key in sorted(by_start):
        while (span := by_start.get(key)) is not None:
            following = by_start.pop((span.src + span.nbytes, span.dst + span.nbytes), None)
            if following is None:
                break
            by_start[key] = Span(span.src, span.dst, span.nbytes + following.nbytes)
    return sorted(by_start.values())


def random_layout(rng: random.Random) -> KVLayout:
    kind = rng.choice([KVKind.GQA, KVKind.GQA, KVKind.MLA])
    return KVLayout(
        num_layers=rng.randint(1, 3),
        num_kv_heads=1 if kind is KVKind.MLA else rng.randint(1, 4),
        head_dim=rng.randint(1, 3),
        page_size=rng.randint(1, 4),
        dtype=rng.choice(["float32", "bfloat16"]),
        v_head_dim=None if kind is KVKind.MLA else rng.choice([None, None, rng.randint(1, 3)]),
        order=random_order(rng),
        kind=kind,
    )


def random_meeting(rng: random.Random) -> tuple[KVLayout, KVLayout]:
    """Two layouts that can meet: equal, or other in page size, order or both."""
    a = random_layout(rng)
    page_size = rng.choice([a.page_size, rng.randint(1, 4), 2 * a.page_size])
    order = rng.choice([a.order, random_order(rng)])
    b = KVLayout(a.num_layers, a.num_kv_heads, a.head_dim, page_size, a.dtype, a.v_head_dim, order, a.kind)
    return a, b


def random_order(rng: random.Random) -> tuple[str, ...]:
    order = list(DEFAULT_ORDER)
    if rng.random() < 0.7:
        rng.shuffle(order)
    return tuple(order)


def random_group(rng: random.Random, layout: KVLayout) -> tuple[Shard, ...]:
    """Tensor parallel over any size, and now and then cut into two pipeline stages."""
    num_query_heads = layout.num_kv_heads * rng.randint(1, 3)
    shards = tp_shards(layout, num_query_heads, rng.randint(1, num_query_heads), 12)
    if layout.num_layers == 1 or rng.random() < 0.7:
        return shards
    cut = rng.randint(1, layout.num_layers - 1)
    stages = ((0, cut), (cut, layout.num_layers))
    return tuple(Shard(a, b, s.head_start, s.head_stop, s.num_pages) for a, b in stages for s in shards)
