"""A rank's Mover: every byte of a WriteJob reaches the right head of the right page, whatever the two TP sizes."""

from __future__ import annotations

import dataclasses
import random

import pytest
from msgspec.structs import replace

from pd.runtime.roles.mover import Mover, rank_name
from pd.runtime.wire.plans import Attach, PeerUnreachable, Sever, Severed, WriteDone, WriteJob
from pd.transfer.layout import KVLayout, Shard, pool_nbytes, strides, tp_shards
from pd.transfer.memory import MemoryHub, MemoryTransport
from pd.transfer.transport import Completion, JobDone, JobFailed

LAYOUT = KVLayout(num_layers=2, num_kv_heads=3, head_dim=4, page_size=4, dtype="float32")
NUM_PAGES = 6


def row_offset(layout: KVLayout, shard: Shard, *row: int) -> int:
    """Bytes from the pool's start of row (page, head, layer, k|v, token), all counted over the whole model."""
    page, head, layer, kv, token = row
    return strides(layout, shard)[kv].offset(page=page, head=head - shard.head_start, layer=layer, token=token)


class Side:
    """One instance: a transport, a pool and a Mover a rank."""

    def __init__(self, hub: MemoryHub, name: str, *, tp: int, layout: KVLayout = LAYOUT) -> None:
        self.name, self.layout = name, layout
        self.shards = tp_shards(layout, 9, tp, NUM_PAGES)
        self.transports = [MemoryTransport(me=rank_name(name, "e", rank), hub=hub) for rank in range(tp)]
        self.pools = [t.allocate(pool_nbytes(layout, s)) for t, s in zip(self.transports, self.shards, strict=True)]
        self.movers = [Mover(rank, layout, self.shards, t) for rank, t in enumerate(self.transports)]

    def order(self) -> Attach:
        return Attach(self.name, "e", self.layout, self.shards, tuple(t.endpoint() for t in self.transports))

    def rows(self) -> dict[tuple[int, ...], bytes]:
        """(rank, page, head, layer, k|v, token) -> its bytes."""
        nbytes = self.layout.head_dim * 4
        out = {}
        for rank, shard in enumerate(self.shards):
            for page in range(NUM_PAGES):
                for head in shard.heads:
                    for layer in shard.layers:
                        for kv in (0, 1):
                            for token in range(self.layout.page_size):
                                at = row_offset(self.layout, shard, page, head, layer, kv, token)
                                out[rank, page, head, layer, kv, token] = bytes(self.pools[rank][at : at + nbytes])
        return out


def finish(side: Side, job: WriteJob) -> list[WriteDone]:
    """Start a job on every rank and poll until each has answered."""
    answers = [answer for mover in side.movers for answer in mover.start(job)]
    for _ in range(100):
        answers += [answer for mover in side.movers for answer in mover.poll()]
    assert all(isinstance(answer, WriteDone) for answer in answers)
    return [answer for answer in answers if isinstance(answer, WriteDone)]


@pytest.mark.parametrize("pair", [(1, 1), (2, 1), (1, 2), (3, 2), (2, 4), (8, 3), (4, 9)])
def test_each_head_of_each_token_arrives_once_where_it_belongs(pair: tuple[int, int]) -> None:
    dice = random.Random(11)
    hub = MemoryHub()
    prefill, decode = Side(hub, "p", tp=pair[0]), Side(hub, "d", tp=pair[1])
    truth = {
        (page, head, layer, kv, token): dice.randbytes(16)
        for page in range(NUM_PAGES)
        for head in range(3)
        for layer in range(2)
        for kv in (0, 1)
        for token in range(4)
    }
    for rank, shard in enumerate(prefill.shards):
        for (page, head, layer, kv, token), row in truth.items():
            if head in shard.heads:
                at = row_offset(LAYOUT, shard, page, head, layer, kv, token)
                prefill.pools[rank][at : at + 16] = row
    for mover in prefill.movers:
        assert mover.attach(decode.order()) == []
    src_pages, dst_pages = (4, 1, 5), (0, 3, 2)
    answers = finish(prefill, WriteJob(7, "d", 0, 10, src_pages, dst_pages))
    assert sorted((a.job, a.error) for a in answers) == [(7, None)] * pair[0], "every rank answers once"
    arrived = decode.rows()
    for (rank, page, head, layer, kv, token), row in arrived.items():
        if page in dst_pages:
            source = src_pages[dst_pages.index(page)]
            assert row == truth[source, head, layer, kv, token], (rank, page, head, layer, kv, token)
        else:
            assert row == bytes(16), "a page that was not named stays as it was"
    moved = sum(answer.nbytes for answer in answers)
    assert moved == sum(3 * pool_nbytes(LAYOUT, shard) // NUM_PAGES for shard in decode.shards), "no byte twice"


def test_a_job_for_an_unknown_peer_is_answered_with_the_reason() -> None:
    side = Side(MemoryHub(), "p", tp=1)
    assert side.movers[0].start(WriteJob(1, "nobody", 0, 4, (0,), (0,))) == [
        WriteDone(1, "peer nobody is not attached", 0, 0.0)
    ]


def test_a_peer_whose_layout_cannot_meet_is_unreachable_by_name() -> None:
    hub = MemoryHub()
    other = KVLayout(num_layers=2, num_kv_heads=3, head_dim=8, page_size=4, dtype="float32")
    prefill, decode = Side(hub, "p", tp=1), Side(hub, "d", tp=1, layout=other)
    (answer,) = prefill.movers[0].attach(decode.order())
    assert isinstance(answer, PeerUnreachable)
    assert answer.peer == "d" and "head_dim" in answer.reason and "8" in answer.reason and answer.is_final


def test_a_peer_that_tells_too_few_endpoints_is_unreachable_saying_so() -> None:
    hub = MemoryHub()
    prefill, decode = Side(hub, "p", tp=1), Side(hub, "d", tp=2)
    (answer,) = prefill.movers[0].attach(replace(decode.order(), endpoints=decode.order().endpoints[:1]))
    assert answer == PeerUnreachable("d", "e", "d has 2 ranks, and tells endpoints of 1", is_final=True)


@pytest.mark.parametrize("num_pages", [2**54, 2**63, 2**64 - 1])
def test_a_peer_with_a_pool_that_no_host_can_have_is_unreachable_saying_so(num_pages: int) -> None:
    hub = MemoryHub()
    prefill, decode = Side(hub, "p", tp=1), Side(hub, "d", tp=1)
    shards = (dataclasses.replace(decode.shards[0], num_pages=num_pages),)
    (answer,) = prefill.movers[0].attach(replace(decode.order(), shards=shards))
    nbytes = num_pages * 2 * 3 * 4 * 2 * 4 * 4
    reason = f"rank 0 of d says it holds {num_pages} pages of 4 tokens, {nbytes} bytes: no host has so many"
    assert answer == PeerUnreachable("d", "e", reason, is_final=True)


def test_what_another_try_may_mend_is_not_said_to_be_final() -> None:
    hub = MemoryHub()
    prefill, decode = Side(hub, "p", tp=1), Side(hub, "d", tp=1)
    (answer,) = prefill.movers[0].attach(replace(decode.order(), endpoints=(b"scrambled",)))
    assert isinstance(answer, PeerUnreachable) and not answer.is_final
    assert answer.reason.startswith("d.e.0 sent no memory endpoint")
    assert prefill.movers[0].attach(decode.order()) == []


def test_after_severing_nothing_is_sent_and_asking_again_says_so() -> None:
    hub = MemoryHub()
    prefill, decode = Side(hub, "p", tp=1), Side(hub, "d", tp=2)
    mover = prefill.movers[0]
    mover.attach(decode.order())
    assert mover.sever(Sever("d", "e")) == [Severed("d", "e", True)]
    assert mover.sever(Sever("d", "e")) == [Severed("d", "e", True)]
    (answer,) = mover.start(WriteJob(2, "d", 0, 4, (0,), (0,)))
    assert isinstance(answer, WriteDone) and answer.error is not None


def test_a_life_it_was_never_told_of_is_not_called_severed() -> None:
    side = Side(MemoryHub(), "p", tp=1)
    assert side.movers[0].sever(Sever("stranger", "e")) == [Severed("stranger", "e", False)]


def test_one_lost_share_of_a_job_puts_all_of_it_in_doubt() -> None:
    hub = MemoryHub()
    prefill, decode = Side(hub, "p", tp=1), Side(hub, "d", tp=2)
    mover = prefill.movers[0]
    mover.attach(decode.order())
    sent: list[Completion] = []
    mover.transport.poll = lambda: [sent.pop()] if sent else []  # type: ignore[method-assign]
    assert mover.start(WriteJob(1, "d", 0, 4, (0,), (0,))) == []
    sent += [JobDone(2, 64, 0.1), JobFailed(1, rank_name("d", "e", 0), "lost", may_land=True)]
    assert mover.poll() == []
    assert mover.poll() == [WriteDone(1, "lost", 64, 0.1, may_land=True)]


def test_how_kv_goes_is_said_once_a_life_however_often_it_is_attached(caplog: pytest.LogCaptureFixture) -> None:
    hub = MemoryHub()
    a, b = Side(hub, "a", tp=1), Side(hub, "b", tp=1)
    with caplog.at_level("INFO"):
        for _ in range(5):
            a.movers[0].attach(b.order())
            a.movers[0].poll()
    told = [record.getMessage() for record in caplog.records]
    assert len([line for line in told if line.startswith("KV to b.e.0 goes by")]) == 1
    assert len([line for line in told if line.startswith("KV goes as it lies")]) == 1
