"""Ranks' digests: what a prefill's ranks tell of what they sent is what a decode's ranks tell of what landed."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest
import torch

from pd.runtime.core.ranks import DIGESTS
from pd.runtime.roles import checking
from pd.runtime.wire.plans import Digest, WriteDone, WriteJob
from pd.transfer import native
from pd.transfer.layout import DEFAULT_ORDER, KVKind, KVLayout, pool_nbytes, strides, tp_shards
from pd.transfer.memory import MemoryHub
from pd.transfer.packed import End
from pd.transfer.pairs import pair_up
from pd.transfer.reshard import DTYPES
from tests.runtime.test_packing import LAYERS_FIRST, NUM_PAGES, Side, move_all


def told(side: Side, order: Digest) -> int:
    """The sum of what all ranks answer."""
    answers = [answer for mover in side.movers for answer in mover.digest(order)]
    while any(mover.is_busy for mover in side.movers):
        answers += [answer for mover in side.movers for answer in mover.poll()]
    assert len(answers) == len(side.movers)
    return summed(answers)


def summed(answers: list[object]) -> int:
    digests = [answer.digest for answer in answers if isinstance(answer, WriteDone)]
    assert None not in digests
    return sum(digest or 0 for digest in digests) % DIGESTS


@pytest.mark.parametrize("seed", range(60))
def test_both_sides_tell_one_digest_whoever_moves_and_another_when_a_byte_is_changed(seed: int) -> None:
    rng = random.Random(seed)
    torch.manual_seed(seed)
    head_dim, v_head_dim = rng.choice(((4, None), (4, 2), (32, None)))
    theirs = KVLayout(
        rng.randint(1, 3), rng.choice((2, 4)), head_dim, rng.choice((2, 4, 6)), rng.choice(list(DTYPES)),
        v_head_dim=v_head_dim, order=rng.choice((DEFAULT_ORDER, LAYERS_FIRST)),
    )  # fmt: skip
    ours = replace(theirs, page_size=rng.choice((theirs.page_size, 3)), dtype=rng.choice(list(DTYPES)))
    hub = MemoryHub()
    move = "auto" if ours.dtype != theirs.dtype else rng.choice(("direct", "packed"))
    source = Side(hub, "p", theirs, tp=rng.randint(1, 6), move=move)
    sink = Side(hub, "d", ours, tp=rng.randint(1, 6), move=move)
    for side, peer in ((source, sink), (sink, source)):
        assert [answer for mover in side.movers for answer in mover.attach(peer.order())] == []
    num_tokens = rng.randint(1, NUM_PAGES * min(theirs.page_size, ours.page_size))
    src_pages = tuple(rng.sample(range(NUM_PAGES), -(-num_tokens // theirs.page_size)))
    dst_pages = tuple(rng.sample(range(NUM_PAGES), -(-num_tokens // ours.page_size)))
    shape = (num_tokens, theirs.num_kv_heads, theirs.num_layers)
    # NaN becomes other bits in rows so short that PyTorch converts them one by one, and then others in longer ones.
    values = rng.choice(ODD if head_dim == 32 else ODD[:-1])
    source.fill([beset(torch.randn(*shape, dim), values) for dim in theirs.head_dims], src_pages)
    job = WriteJob(1, "d", 0, num_tokens, src_pages, dst_pages, is_digested=True)
    if rng.random() < 0.5:
        answers = move_all(source, job, is_read=False)
        sent = summed([*answers])
        assert told(source, Digest(job, is_own=False)) == sent, f"seed {seed}"
    else:
        move_all(sink, WriteJob(1, "p", 0, num_tokens, src_pages, dst_pages), is_read=True)
        sent = told(source, Digest(job, is_own=False))
    landed = Digest(WriteJob(2, "p", 0, num_tokens, dst_pages, ()), is_own=True)
    assert told(sink, landed) == sent, f"seed {seed}: {theirs} -> {ours}"
    rank = rng.randrange(len(sink.movers))
    flip_a_bit(rng, sink, rank, dst_pages[rng.randrange(num_tokens) // ours.page_size])
    assert told(sink, landed) != sent, f"seed {seed}: rank {rank}"


ODD = ((), (300.0, 65_520.0, -3.4e38), (1e-40, -6e-8, 0.0, -0.0), (math.inf, -math.inf), (math.nan, -math.nan))
"""As it is; and what some dtype cannot hold, rounds to nothing, or is no number."""


def beset(kv: torch.Tensor, values: tuple[float, ...]) -> torch.Tensor:
    rows = kv.flatten()
    for value in values:
        rows[torch.randint(len(rows), (1 + len(rows) // 9,))] = value
    return rows.view_as(kv)


def flip_a_bit(rng: random.Random, side: Side, rank: int, page: int) -> None:
    """Of the page's first token."""
    shard, layout = side.shards[rank], side.layout
    s = rng.choice(strides(layout, shard))
    layer, head = rng.randrange(len(shard.layers)), rng.randrange(len(shard.heads))
    at = s.offset(page=page, head=head, layer=layer, token=0) + rng.randrange(s.num_dims) * s.dim
    side.regions[rank][at + rng.randrange(layout.itemsize)] ^= 1 << rng.randrange(8)


def test_what_is_sent_to_several_is_looked_at_once() -> None:
    """A latent of 30 layers from four ranks to six: all of it to one, and half to another."""
    layout = KVLayout(30, 1, 8, 4, "float32", kind=KVKind.MLA)
    src, dst = tp_shards(layout, 12, 4, 2), tp_shards(layout, 12, 6, 2)
    region = torch.zeros(pool_nbytes(layout, src[0]), dtype=torch.uint8)
    for rank, shard in enumerate(src):
        pairs = [pair for pair in pair_up(src, dst) if pair.src == rank]
        counted = checking.Checker(region, End(layout, shard)).of_sent(pairs, "float32")
        assert sorted((len(each.digester.box.layers), each.num_times) for each in counted) == [(15, 1), (15, 2)]
        assert {layer for each in counted for layer in each.digester.box.layers} == set(range(30))


def test_a_digest_of_much_is_made_in_turns_so_that_others_are_looked_after(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checking, "TURN_S", 0.0)
    layout = KVLayout(2, 2, 4, 4, "float32")
    side = Side(MemoryHub(), "p", layout, tp=1)
    (mover,) = side.movers
    pages = tuple(range(NUM_PAGES))
    for number in (1, 2):
        assert mover.digest(Digest(WriteJob(number, "", 0, 4 * NUM_PAGES, pages, ()), is_own=True)) == []
    turns = 0
    answers: list[object] = []
    while mover.is_busy:
        answers += mover.poll()
        turns += 1
        assert turns < 100
    num_parts = 2 if native.load() is None else 1  # K and V: each by itself, or both by C++
    assert turns == 2 * (num_parts + 1) and len(answers) == 2, "the parts and the end of two digests"


def test_a_digest_for_a_peer_that_is_not_attached_says_so() -> None:
    side = Side(MemoryHub(), "p", KVLayout(2, 2, 4, 4, "float32"), tp=1)
    (answer,) = side.movers[0].digest(Digest(WriteJob(1, "nobody", 0, 4, (0,), ()), is_own=False))
    assert answer == WriteDone(1, "peer nobody is not attached", 0, 0.0)
