"""KV that is repacked on its way: other dtypes, page sizes and axis orders, written or read, through small slots."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from pd.runtime.engine.kv_pool import staging_base
from pd.runtime.roles.checking import Checker
from pd.runtime.roles.mover import Mover, rank_name
from pd.runtime.roles.packing import Packer
from pd.runtime.roles.paths import Paths, fitting
from pd.runtime.wire.plans import Attach, PeerUnreachable, Sever, Severed, WriteDone, WriteJob
from pd.transfer.float8 import bits, cast
from pd.transfer.layout import DEFAULT_ORDER, KVLayout, Shard, tp_shards
from pd.transfer.memory import MemoryHub, MemoryTransport
from pd.transfer.packed import End, Move, PackedWay, choose
from pd.transfer.pairs import Pair, pair_up
from pd.transfer.plan import Route
from pd.transfer.reshard import DTYPES, views
from pd.transfer.staging import SLOT_NBYTES as FULL_SLOT_NBYTES
from pd.transfer.transport import JobFailed, LayoutMismatch, TransferError

NUM_PAGES, NUM_SLOTS, SLOT_NBYTES = 12, 3, 3000
LAYERS_FIRST = ("layer", "kv", "page", "token", "head", "dim")


class Side:
    """One instance: a region with staging and a Mover a rank."""

    def __init__(
        self,
        hub: MemoryHub,
        name: str,
        layout: KVLayout,
        *,
        tp: int,
        move: Move = "packed",
        stream_layers: int | None = None,
    ) -> None:
        self.name, self.layout = name, layout
        self.shards = tp_shards(layout, 12, tp, NUM_PAGES)
        self.transports = [MemoryTransport(me=rank_name(name, "e", rank), hub=hub) for rank in range(tp)]
        self.regions, self.movers = [], []
        for rank, (transport, shard) in enumerate(zip(self.transports, self.shards, strict=True)):
            base = staging_base(layout, shard)
            region = torch.frombuffer(transport.allocate(base + NUM_SLOTS * SLOT_NBYTES), dtype=torch.uint8)
            packer = Packer(transport, region, base, num_slots=NUM_SLOTS, slot_nbytes=SLOT_NBYTES)
            self.regions.append(region)
            checker = Checker(region, End(layout, shard))
            self.movers.append(Mover(rank, layout, self.shards, transport, packer, move, checker, stream_layers))

    def order(self) -> Attach:
        return Attach(self.name, "e", self.layout, self.shards, tuple(t.endpoint() for t in self.transports))

    def tokens(self, rank: int, pages: tuple[int, ...], num_tokens: int) -> list[torch.Tensor]:
        """K and V of a rank's tokens, each [tokens, heads, layers, dim], in float32."""
        shard = self.shards[rank]
        whole = Pair(rank, rank, shard.layers, shard.heads)
        found = []
        for pool_PHLSE in views(self.regions[rank], self.layout, shard, whole):
            picked = bits(pool_PHLSE)[list(pages)].view(pool_PHLSE.dtype)
            found.append(picked.permute(0, 3, 1, 2, 4).flatten(0, 1)[:num_tokens].float())
        return found

    def fill(self, truth: list[torch.Tensor], pages: tuple[int, ...]) -> None:
        """`truth`: K and V of all tokens, [tokens, heads, layers, dim]."""
        size = self.layout.page_size
        for rank, shard in enumerate(self.shards):
            whole = Pair(rank, rank, shard.layers, shard.heads)
            for pool_PHLSE, rows in zip(views(self.regions[rank], self.layout, shard, whole), truth, strict=True):
                for t, row in enumerate(rows[:, shard.head_start : shard.head_stop]):
                    pool_PHLSE[pages[t // size], :, :, t % size] = cast(row, pool_PHLSE.dtype)


def move_all(mover_side: Side, job: WriteJob, *, is_read: bool) -> list[WriteDone]:
    answers = [answer for mover in mover_side.movers for answer in mover.start(job, is_read=is_read)]
    for _ in range(300):
        answers += [answer for mover in mover_side.movers for answer in mover.poll()]
    return [answer for answer in answers if isinstance(answer, WriteDone)]


@pytest.mark.parametrize("seed", range(60))
def test_every_token_arrives_rounded_to_the_peers_dtype_and_nothing_else_changes(seed: int) -> None:
    rng = random.Random(seed)
    torch.manual_seed(seed)
    theirs = KVLayout(
        rng.randint(1, 3), rng.randint(1, 4), 4, rng.choice((2, 4, 6)), rng.choice(list(DTYPES)),
        v_head_dim=rng.choice((None, 2)), order=rng.choice((DEFAULT_ORDER, LAYERS_FIRST)),
    )  # fmt: skip
    ours = replace(
        theirs,
        page_size=rng.choice((theirs.page_size, 2 * theirs.page_size, 3)),
        dtype=rng.choice(list(DTYPES)),
        order=rng.choice((DEFAULT_ORDER, LAYERS_FIRST)),
    )
    theirs, ours = (replace(each, num_kv_heads=rng.choice((2, 4))) for each in (theirs, ours))
    ours = replace(ours, num_kv_heads=theirs.num_kv_heads)
    hub = MemoryHub()
    source, sink = Side(hub, "p", theirs, tp=rng.randint(1, 4)), Side(hub, "d", ours, tp=rng.randint(1, 4))
    num_tokens = rng.randint(1, 5 * max(theirs.page_size, ours.page_size))
    num_tokens = min(num_tokens, NUM_PAGES * min(theirs.page_size, ours.page_size))
    src_pages = tuple(rng.sample(range(NUM_PAGES), -(-num_tokens // theirs.page_size)))
    dst_pages = tuple(rng.sample(range(NUM_PAGES), -(-num_tokens // ours.page_size)))
    size = rng.choice((1, 300))  # 300: float8 cannot hold all of it
    truth = [size * torch.randn(num_tokens, theirs.num_kv_heads, theirs.num_layers, dim) for dim in theirs.head_dims]
    source.fill(truth, src_pages)
    is_read = rng.random() < 0.5
    mover_side, peer = (sink, source) if is_read else (source, sink)
    for mover in mover_side.movers:
        assert mover.attach(peer.order()) == []
    job = WriteJob(5, peer.name, 0, num_tokens, src_pages, dst_pages)
    answers = move_all(mover_side, job, is_read=is_read)
    assert [(answer.job, answer.error) for answer in answers] == [(5, None)] * len(mover_side.movers), f"seed {seed}"
    for rank, shard in enumerate(sink.shards):
        for got, rows in zip(sink.tokens(rank, dst_pages, num_tokens), truth, strict=True):
            sent = cast(rows[:, shard.head_start : shard.head_stop], DTYPES[theirs.dtype])
            due = cast(sent.float(), DTYPES[ours.dtype])
            assert torch.equal(got, due.float()), f"seed {seed}, rank {rank}: {theirs} -> {ours}"
        others = tuple(page for page in range(NUM_PAGES) if page not in dst_pages)
        for left in sink.tokens(rank, others, len(others) * ours.page_size):
            assert not left.any(), f"seed {seed}: a page that was not named has changed"
    for mover in mover_side.movers:
        assert mover.packer is not None and mover.packer.staging.num_taken == 0, f"seed {seed}"


LAYOUT = KVLayout(2, 2, 4, 4, "float32")


def test_a_peer_that_is_severed_gives_its_slots_back_and_all_its_jobs_end() -> None:
    hub = MemoryHub()
    source, sink = Side(hub, "p", LAYOUT, tp=1), Side(hub, "d", replace(LAYOUT, dtype="bfloat16"), tp=1)
    (mover,) = source.movers
    mover.attach(sink.order())
    pages = tuple(range(NUM_PAGES))
    for job in range(1, 6):
        assert mover.start(WriteJob(job, "d", 0, 4 * NUM_PAGES, pages, pages)) == []
    mover.transport.sever(rank_name("d", "e", 0))
    answers = [answer for _ in range(100) for answer in mover.poll()]
    ended = [answer.job for answer in answers if isinstance(answer, WriteDone) and answer.error is not None]
    assert sorted(ended) == [1, 2, 3, 4, 5]
    assert mover.packer is not None and mover.packer.staging.num_taken == 0


def test_a_peer_that_hangs_holds_up_none_but_itself() -> None:
    hub = MemoryHub()
    source, slow = Side(hub, "p", LAYOUT, tp=1), Side(hub, "slow", replace(LAYOUT, dtype="float16"), tp=1)
    quick = Side(hub, "quick", replace(LAYOUT, dtype="float16"), tp=1)
    (mover,) = source.movers
    for peer in (slow, quick):
        mover.attach(peer.order())
    write, held = mover.transport.write, []

    def hang(peer: str, spans: object, *, job: int) -> None:
        held.append(job) if "slow" in peer else write(peer, spans, job=job)  # type: ignore[arg-type]

    mover.transport.write = hang  # type: ignore[method-assign, assignment]
    pages = tuple(range(NUM_PAGES))
    mover.start(WriteJob(1, "slow", 0, 4 * NUM_PAGES, pages, pages))
    mover.start(WriteJob(2, "quick", 0, 4 * NUM_PAGES, pages, pages))
    answers = [answer for _ in range(100) for answer in mover.poll()]
    assert [(answer.job, answer.error) for answer in answers if isinstance(answer, WriteDone)] == [(2, None)]
    assert len(held) == 2  # of three slots


def test_a_job_of_nothing_goes_to_each_rank_of_the_peer_and_needs_no_staging() -> None:
    """What it proves is that all before it has ended, on every way to the peer."""
    hub = MemoryHub()
    source, sink = Side(hub, "p", LAYOUT, tp=2), Side(hub, "d", replace(LAYOUT, dtype="bfloat16"), tp=1)
    for mover in source.movers:
        mover.attach(sink.order())
    for mover in source.movers:
        assert mover.start(WriteJob(1, "d", 0, 0, (), ())) == [], "it is under way"
        assert mover.packer is not None and mover.packer.staging.num_taken == 0
        assert [(done.job, done.error) for done in mover.poll() if isinstance(done, WriteDone)] == [(1, None)]


class Lossy(MemoryTransport):
    """Loses a peer in the midst of a read, and cannot say at first that nothing of it comes any more."""

    can_sever = False

    def lose(self, numbers: Sequence[int], peer: str) -> None:
        self._outbox.put(*(JobFailed(number, peer, "lost", may_land=True) for number in numbers))

    def read(self, peer: str, spans: object, *, job: int) -> None:
        """It is begun, and nothing comes."""

    def sever(self, peer: str) -> bool:
        return super().sever(peer) and self.can_sever


def test_a_slot_that_a_lost_read_may_still_reach_is_nobodys_until_its_peer_is_severed() -> None:
    hub = MemoryHub()
    lost, sink = Side(hub, "p", LAYOUT, tp=1), Side(hub, "d", replace(LAYOUT, dtype="bfloat16"), tp=1)
    (mover,) = sink.movers
    transport = Lossy(me="other", hub=hub)
    transport.allocate(len(sink.regions[0]))
    assert mover.packer is not None
    mover.transport = mover.packer.transport = transport
    mover.attach(lost.order())
    pages = tuple(range(8))
    mover.start(WriteJob(1, "p", 0, 4 * 8, pages, pages), is_read=True)
    staging = mover.packer.staging
    assert (staging.num_taken, staging.num_waiting) == (2, 0)
    transport.lose([1, 2], rank_name("p", "e", 0))
    (done,) = mover.poll()
    assert isinstance(done, WriteDone) and done.may_land
    assert staging.num_taken == 2, "the job has ended, and its slots are in doubt"
    assert mover.sever(Sever("p", "e")) == [Severed("p", "e", False)] and staging.num_taken == 2
    transport.can_sever = True
    assert mover.sever(Sever("p", "e")) == [Severed("p", "e", True)] and staging.num_taken == 0
    assert mover.sever(Sever("p", "e")) == [Severed("p", "e", True)], "asked again"
    assert mover.sever(Sever("p", "older")) == [Severed("p", "older", False)], "nobody knows that life"


# ---- which way ------------------------------------------------------------------------------------------------------


def ways(src: KVLayout, dst: KVLayout, *, slot_nbytes: int = 8 << 20) -> tuple[Route | None, list[PackedWay]]:
    (a,), (b,) = tp_shards(src, src.num_kv_heads, 1, 64), tp_shards(dst, dst.num_kv_heads, 1, 64)
    (pair,) = pair_up((a,), (b,))
    direct = Route(src, a, dst, b, (pair,)) if src.dtype == dst.dtype else None
    return direct, [PackedWay(End(src, a), End(dst, b), pair, False, slot_nbytes)]


MODEL = KVLayout(30, 3, 64, 16, "bfloat16")


@pytest.mark.parametrize(
    ("dst", "move", "is_packed"),
    [
        (MODEL, "auto", False),
        (MODEL, "packed", True),
        (replace(MODEL, page_size=64), "auto", True),  # pieces of 2 KiB, and whole pages in the image
        (replace(MODEL, dtype="float32"), "auto", True),
    ],
)
def test_the_way_follows_from_dtypes_and_pieces(dst: KVLayout, move: Move, is_packed: bool) -> None:
    (way,) = choose(*ways(MODEL, dst), move)
    assert isinstance(way, PackedWay) is is_packed


def test_small_pieces_are_packed_where_the_image_has_larger_ones() -> None:
    """Token by token at the source, heads outermost at the destination."""
    src = replace(MODEL, order=("page", "token", "layer", "kv", "head", "dim"))
    direct, packed = ways(src, MODEL)
    assert choose(direct, packed, "auto") == packed
    assert packed[0].pieces().mean == 368_640, "a whole page of all heads"
    assert choose(direct, packed, "direct") == [direct]


ORDERS = (
    DEFAULT_ORDER,
    LAYERS_FIRST,
    ("page", "layer", "kv", "token", "head", "dim"),
    ("page", "token", "layer", "kv", "head", "dim"),
    ("layer", "page", "kv", "head", "token", "dim"),
)


def scattered(layout: KVLayout, num_tokens: int) -> range:
    return range(0, 2 * num_tokens // layout.page_size, 2)


def price_direct(ways: Sequence[Route | PackedWay], num_tokens: int) -> int:
    """Of a request, on pages of which no two are neighbours: each byte that is moved, and 16 KiB a piece."""
    (way,) = ways
    assert isinstance(way, Route)
    pages = scattered(way.layout_src, num_tokens), scattered(way.layout_dst, num_tokens)
    return sum(span.nbytes + 16384 for span in way.spans(*pages, 0, num_tokens))


def price_packed(ways: Sequence[Route | PackedWay], num_tokens: int) -> int:
    """Likewise, and each byte that is copied into the image."""
    total = 0
    for way in ways:
        assert isinstance(way, PackedWay)
        pages = scattered(way.theirs.layout, num_tokens)
        for part in way.parts(num_tokens):
            total += sum(2 * span.nbytes + 16384 for span in way.spans(pages, part, base=0))
    return total


@pytest.mark.parametrize("seed", range(40))
def test_whichever_way_costs_less_is_taken(seed: int) -> None:
    """Some rank pairs have more than one part: of many layers, and of few."""
    rng = random.Random(seed)
    moves: tuple[Move, ...] = ("direct", "packed", "auto")
    for _ in range(10):
        src = KVLayout(
            rng.choice((1, 2, 5, 16)), rng.randint(1, 8), rng.choice((16, 128)), rng.choice((1, 4, 16, 64)), "bfloat16",
            order=rng.choice(ORDERS),
        )  # fmt: skip
        dst = replace(src, page_size=rng.choice((1, 16, 64)), order=rng.choice((src.order, *ORDERS)))
        sides = [tp_shards(each, 8 * src.num_kv_heads, rng.randint(1, 8), 400) for each in (src, dst)]
        pairs = pair_up(*sides)
        chosen = rng.choice(pairs)
        both = [pair for pair in pairs if (pair.src, pair.dst) == (chosen.src, chosen.dst)]
        names = tuple(map(str, range(len(sides[1]))))
        prices = {}
        for move in moves:
            paths = Paths(End(src, sides[0][chosen.src]), dst, sides[1], names, FULL_SLOT_NBYTES, move)
            ways = [way for _, way in paths.out(both)]
            is_packed = isinstance(ways[0], PackedWay)
            prices[move] = (price_packed if is_packed else price_direct)(ways, 64)
        least = min(prices["direct"], prices["packed"])
        assert prices["auto"] == least, f"seed {seed}: {src} to {dst}: {prices}"


def test_a_small_part_beside_a_large_one_does_not_decide_for_both() -> None:
    """Seven heads of two ranks: three each, and of the one that both hold a layer each. Packed, three heads of a token
    are one piece, and the one alone is one; as they lie, each head is."""
    src = KVLayout(2, 7, 128, 1, "bfloat16")
    dst = replace(src, order=LAYERS_FIRST)
    (whole,), halves = tp_shards(dst, 14, 1, 64), tp_shards(src, 14, 2, 64)
    own = [pair for pair in pair_up(halves, (whole,)) if pair.src == 0]
    assert sorted(len(pair.heads) * len(pair.layers) for pair in own) == [1, 6]
    ways = Paths(End(src, halves[0]), dst, (whole,), ("d",), FULL_SLOT_NBYTES, "auto").out(own)
    pieces = {len(way.pair.heads): way.pieces().mean for _, way in ways if isinstance(way, PackedWay)}
    assert pieces == {1: 256, 3: 768}


def test_another_dtype_cannot_go_direct_and_a_page_must_fit_a_slot() -> None:
    with pytest.raises(LayoutMismatch, match="--move packed or auto"):
        choose(*ways(MODEL, replace(MODEL, dtype="float32")), "direct")
    with pytest.raises(LayoutMismatch, match=r"a page of theirs is 368640 bytes, and staging has slots of 1000"):
        ways(MODEL, MODEL, slot_nbytes=1000)


def test_a_peer_of_another_dtype_is_unreachable_by_name_where_all_goes_direct() -> None:
    hub = MemoryHub()
    source = Side(hub, "p", LAYOUT, tp=1, move="direct")
    sink = Side(hub, "d", replace(LAYOUT, dtype="bfloat16"), tp=1)
    (answer,) = source.movers[0].attach(sink.order())
    assert isinstance(answer, PeerUnreachable)
    assert answer.reason.startswith(f"dtype: KV is bfloat16 there and {LAYOUT.dtype} here, "), answer.reason
    assert issubclass(LayoutMismatch, TransferError) and isinstance(source.shards[0], Shard)


@pytest.mark.parametrize(
    ("move", "dtype", "told"),
    [
        ("direct", "float32", r"KV goes as it lies, to or from d, in pieces of \d+ (bytes|KiB).*"),
        ("packed", "float32", r"KV is packed: as --move says; to or from d, in pieces of \d+ .*"),
        ("auto", "bfloat16", r"KV is packed: float32 here, bfloat16 there; to or from d, in pieces of \d+ .*"),
    ],
)
def test_the_way_and_why_it_was_taken_are_told_in_one_line(
    move: Move, dtype: str, told: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    hub = MemoryHub()
    source = Side(hub, "p", replace(LAYOUT, dtype="float32"), tp=2, move=move)
    assert source.movers[0].attach(Side(hub, "d", replace(LAYOUT, dtype=dtype), tp=3).order()) == []
    (line,) = [text for text in caplog.messages if text.startswith(("KV is packed", "KV goes as it lies"))]
    assert re.fullmatch(told, line), line


@pytest.mark.parametrize(("move", "kind"), [("auto", Route), ("direct", Route), ("packed", PackedWay)])
def test_a_page_larger_than_a_slot_is_packed_in_parts_and_hinders_nobody(move: Move, kind: type) -> None:
    """Qwen3-32B, whole on one GPU, in pages of 64 tokens: 16.8 MB a page, in slots of 8 MiB."""
    layout = KVLayout(64, 8, 128, 64, "bfloat16")
    shards = tp_shards(layout, 64, 1, 100)
    paths = Paths(End(layout, shards[0]), layout, shards, ("d",), FULL_SLOT_NBYTES, move)
    for ways in (paths.out(pair_up(shards, shards)), paths.back(pair_up(shards, shards))):
        assert all(isinstance(way, kind) for _, way in ways)
        boxes = [
            (head, layer) for _, way in ways for pair in pairs_of(way) for head in pair.heads for layer in pair.layers
        ]
        assert sorted(boxes) == [(head, layer) for head in range(8) for layer in range(64)]
        for _, way in ways:
            if isinstance(way, PackedWay):
                assert way.num_pages == 1 and way.pieces().mean == 64 * 4 * 2 * 64 * 128 * 2


def pairs_of(way: Route | PackedWay) -> tuple[Pair, ...]:
    return (way.pair,) if isinstance(way, PackedWay) else way.pairs


def test_a_page_larger_than_a_slot_even_of_one_head_and_layer_goes_as_it_lies_or_is_refused_with_both_values() -> None:
    """Slots here have 3,000 bytes."""
    layout = replace(LAYOUT, num_kv_heads=4, page_size=200)
    row = 2 * layout.head_dim * layout.itemsize
    for move in ("auto", "direct"):
        hub = MemoryHub()
        source, sink = (Side(hub, name, layout, tp=2, move=move) for name in "pd")
        truth = [torch.randn(450, 4, layout.num_layers, dim) for dim in layout.head_dims]
        source.fill(truth, (4, 1, 5))
        assert [mover.attach(sink.order()) for mover in source.movers] == [[], []]
        answers = move_all(source, WriteJob(5, "d", 0, 450, (4, 1, 5), (0, 3, 2)), is_read=False)
        assert [answer.error for answer in answers] == [None, None]
        for rank, shard in enumerate(sink.shards):
            for rows, arrived in zip(truth, sink.tokens(rank, (0, 3, 2), 450), strict=True):
                assert torch.equal(arrived, rows[:, shard.head_start : shard.head_stop])
    told = (
        f"a page there is 200 tokens, of one head and layer {200 * row} bytes, and KV is packed in slots of "
        f"{SLOT_NBYTES}: it takes --page-size {SLOT_NBYTES // row} or less there"
    )
    small = replace(layout, page_size=4)
    for ours, move, more in (
        (small, "packed", ", or --move auto here"),
        (replace(small, dtype="bfloat16"), "auto", ""),
    ):
        hub = MemoryHub()
        source, sink = Side(hub, "p", ours, tp=2, move=move), Side(hub, "d", layout, tp=2)
        (answer,) = source.movers[0].attach(sink.order())
        assert isinstance(answer, PeerUnreachable) and answer.is_final and answer.reason == told + more


@pytest.mark.parametrize("nbytes", [10**9, 9000, 5000, 2500, 1200, 700, 512])
def test_parts_of_a_pair_fit_and_hold_each_head_and_layer_once(nbytes: int) -> None:
    whole = Pair(1, 2, range(3, 8), range(2, 5))  # 512 bytes a head and layer
    parts = list(fitting(whole, replace(LAYOUT, num_layers=9, num_kv_heads=6, head_dim=16), nbytes))
    for part in parts:
        assert (part.src, part.dst) == (1, 2) and len(part.heads) * len(part.layers) * 512 <= nbytes
    boxes = sorted((head, layer) for part in parts for head in part.heads for layer in part.layers)
    assert boxes == [(head, layer) for head in range(2, 5) for layer in range(3, 8)]
