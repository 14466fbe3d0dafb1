"""`auto` with a library at hand: it proves each way to a peer elsewhere with real bytes, takes the faster, says so."""

from __future__ import annotations

import ctypes
import itertools
import mmap
import os

import msgspec
import pytest

from pd.transfer.auto import AutoTransport
from pd.transfer.contest import (
    AREA_NBYTES,
    INBOX,
    PROOFS,
    WAY_S,
    Area,
    Contest,
    HostAccess,
    _slot,
    pattern,
)
from pd.transfer.library_transport import LibraryTransport
from pd.transfer.memory import MemoryHub, MemoryTransport, Task
from pd.transfer.shm import ShmEndpoint
from pd.transfer.transport import JobDone, JobFailed, PeerLost, Span, TransferError
from tests.transfer.card import Card
from tests.transfer.kit import CardAuto, done_jobs, wait_for, wait_jobs, why_absent
from tests.transfer.slow_library import SlowLibrary

NBYTES = 4096


class Wrong(MemoryTransport):
    """Says of every write that it is done, and moves nothing."""

    def _is_due(self, task: Task) -> bool:
        if not task.is_read:
            self._outbox.put(JobDone(task.job, task.nbytes, 1e-9))
            self._peers[task.peer].tasks.popleft()
            return bool(self._peers[task.peer].tasks) and self._is_due(self._peers[task.peer].tasks[0])
        return True


class Ways:
    """A contest over two memory transports, `fast` and `slow`, driven by hand."""

    def __init__(
        self, fast: type[MemoryTransport] = MemoryTransport, slow: type[MemoryTransport] = MemoryTransport
    ) -> None:
        self.made: list[MemoryTransport] = []
        hubs = {name: MemoryHub() for name in ("fast", "slow")}
        self.ways: dict[str, MemoryTransport] = {}
        for name, kind in (("fast", fast), ("slow", slow)):
            there = MemoryTransport(me="there", hub=hubs[name])
            there.allocate(NBYTES + AREA_NBYTES)[NBYTES : NBYTES + 65536] = pattern("there")
            here = kind(me="here", hub=hubs[name])
            self.made += [here, there]
            self.ways[name] = here
        self.view = self.ways["fast"].allocate(NBYTES + AREA_NBYTES)
        address = self.ways["fast"]._region.address  # type: ignore[union-attr]
        self.ways["slow"].register(address, NBYTES + AREA_NBYTES)
        self.view[NBYTES : NBYTES + 65536] = pattern("here")
        for name, here in self.ways.items():
            here.connect("there", hubs[name].members["there"].endpoint())
        ours, theirs = Area(NBYTES, "here"), Area(NBYTES, "there")
        self.contest = Contest("there", self.ways, HostAccess(self.view), ours, theirs, itertools.count(-1, -1))

    def run(self, seconds: dict[str, float]) -> Contest:
        """To its end, as if each job had taken what `seconds` says."""
        self.contest.start(0.0)
        for _ in range(20):
            for name, way in self.ways.items():
                for end in way.poll():
                    timed = as_timed(end, seconds[name])
                    self.contest.hear(name, timed, 0.0)
        return self.contest


def as_timed(end: object, seconds: float) -> JobDone | JobFailed | PeerLost:
    assert isinstance(end, JobDone | JobFailed | PeerLost)
    return JobDone(end.job, end.nbytes, seconds) if isinstance(end, JobDone) else end


def test_the_faster_of_two_sound_ways_wins_and_both_rates_are_told() -> None:
    contest = Ways().run({"fast": 1e-3, "slow": 4e-3})
    assert contest.is_over and contest.winner == "fast"
    assert contest.told() == "fast at 4.19 GB/s, slow at 1.05 GB/s"


def test_a_way_that_says_done_and_moves_nothing_is_out_however_fast() -> None:
    contest = Ways(fast=Wrong).run({"fast": 1e-9, "slow": 4e-3})
    assert contest.winner == "slow"
    assert contest.told().startswith("fast: what was written is not what is read back, slow at")


def test_a_way_that_moves_nothing_does_not_pass_by_what_the_way_before_it_wrote() -> None:
    ways = Ways(slow=Wrong)
    ways.made[3]._region = ways.made[1]._region  # the peer's memory is one, whichever way leads to it
    contest = ways.run({"fast": 1e-3, "slow": 1e-9})
    assert contest.winner == "fast"
    assert contest.told() == "fast at 4.19 GB/s, slow: what was written is not what is read back"


def test_a_way_that_reads_wrong_bytes_is_out() -> None:
    ways = Ways()
    there = ways.made[1]
    assert there._region is not None
    there._region.view[NBYTES] ^= 1
    assert ways.run({"fast": 1e-3, "slow": 4e-3}).winner == "slow"
    assert ways.contest.told().startswith("fast: reads wrong bytes, slow at")


@pytest.mark.parametrize(("num_times", "winner"), [(0, "fast"), (3, "fast"), (4, "slow")])
def test_a_proof_that_another_peer_wrote_over_is_made_again_a_few_times(num_times: int, winner: str) -> None:
    ways = Ways()
    ways.contest.start(0.0)
    others, there = pattern("another"), ways.made[1]._region
    assert there is not None
    for _ in range(40):
        for name, way in ways.ways.items():
            for end in way.poll():
                ways.contest.hear(name, as_timed(end, {"fast": 1e-3, "slow": 4e-3}[name]), 0.0)
                trial = ways.contest._trials[0]
                if trial.step == "proof" and num_times:  # it is asked for, and not read yet
                    num_times -= 1
                    for slot in range(NBYTES + PROOFS, NBYTES + INBOX, len(others)):
                        there.view[slot : slot + len(others)] = others
    assert ways.contest.is_over and ways.contest.winner == winner, ways.contest.told()


def test_peers_with_one_place_for_their_proofs_have_another_next_time() -> None:
    names = [f"p.0.{rank}" for rank in range(64)]
    met = [(a, b) for a, b in itertools.combinations(names, 2) if _slot(a, 1) == _slot(b, 1)]
    assert met and sum(_slot(a, 2) == _slot(b, 2) for a, b in met) < len(met) / 4


def test_a_way_that_does_not_answer_is_out_in_time_and_none_is_left_where_no_way_works() -> None:
    ways = Ways()
    ways.contest.start(0.0)
    ways.contest.tick(WAY_S + 0.1)
    assert not ways.contest.is_over
    ways.contest.hear("slow", PeerLost("there", "it hung up"), WAY_S + 0.2)
    assert ways.contest.is_over and ways.contest.winner is None
    assert ways.contest.told() == "fast: not proven within 5 s, slow: it hung up"


def as_from_elsewhere(endpoint: bytes) -> bytes:
    """As another host would send it."""
    tag, shm, *rest = msgspec.msgpack.decode(endpoint)
    there = msgspec.msgpack.decode(shm, type=ShmEndpoint)
    there = msgspec.structs.replace(there, life=msgspec.structs.replace(there.life, boot_id="elsewhere"))
    return msgspec.msgpack.encode([tag, msgspec.msgpack.encode(there), *rest])


def test_ways_compete_for_memory_of_a_gpu_behind_the_pool() -> None:
    memory, made = [mmap.mmap(-1, NBYTES + AREA_NBYTES) for _ in range(2)], []
    for me, pool in zip("ab", memory, strict=True):
        library = SlowLibrary(me=me)
        transport = CardAuto(
            me=me,
            library=lambda box, library=library: LibraryTransport(  # type: ignore[misc]
                me=library.me, start=lambda _: library, outbox=box, gpu=Card
            ),
        )
        assert transport.spare_nbytes == AREA_NBYTES
        transport.register(ctypes.addressof(ctypes.c_char.from_buffer(pool)), len(pool), device=0)
        made.append(transport)
    a, b = made
    memory[0][:64] = b"\x09" * 64
    a.connect("b", as_from_elsewhere(b.endpoint()))
    a.write("b", [Span(0, NBYTES - 64, 64)], job=1)
    assert done_jobs(wait_jobs(a, 1)) == [1]
    told = a.describe("b")
    assert told is not None and "; measured slow at " in told and ", tcp at " in told
    assert told.startswith("tcp (on another host") == told.endswith(", through pinned host memory)"), told
    assert memory[1][:NBYTES] == bytes(NBYTES - 64) + b"\x09" * 64
    with pytest.raises(TransferError, match="source of 4096 bytes, destination of 4096"):
        a.write("b", [Span(0, NBYTES, 1)], job=2)
    for transport in made:
        transport.close()


# ---- with NIXL -----------------------------------------------------------------------------------------------------


@pytest.mark.skipif(why_absent("nixl") is not None, reason=str(why_absent("nixl")))
def test_nixl_competes_with_tcp_and_jobs_given_meanwhile_arrive_in_order() -> None:
    from pd.transfer.nixl import nixl_transport

    made = [AutoTransport(me=me, library=lambda box, me=me: nixl_transport(me=me, outbox=box)) for me in ("a", "b")]  # type: ignore[misc]
    a, b = made
    view_a, view_b = a.allocate(NBYTES), b.allocate(NBYTES)
    try:
        view_a[:] = os.urandom(NBYTES)
        b.connect("a", as_from_elsewhere(a.endpoint()))
        a.connect("b", as_from_elsewhere(b.endpoint()))
        assert a.describe("b") is None
        with pytest.raises(TransferError, match="source of 4096 bytes, destination of 4096"):
            a.write("b", [Span(0, NBYTES, 1)], job=0)
        a.write("b", [Span(0, 0, 64)], job=1)
        a.write("b", [Span(64, 0, 64)], job=2)
        assert done_jobs(wait_jobs(a, 2)) == [1, 2]
        assert view_b[:64] == view_a[64:128] and view_b[64:] == bytes(NBYTES - 64)
        told = a.describe("b")
        assert told is not None and "measured nixl at" in told and "tcp at" in told and "GB/s" in told
        assert not a.sever("b"), "it lives, and has our library's contact"
    finally:
        for transport in made:
            transport.close()


def test_a_peer_without_the_library_is_reached_by_tcp_and_the_description_says_why() -> None:
    a = AutoTransport(me="a", without="no library tried, as this host has no RDMA device")
    b = AutoTransport(me="b")
    try:
        a.allocate(64)
        view_b = b.allocate(64)
        a.connect("b", as_from_elsewhere(b.endpoint()))
        told = a.describe("b")
        assert told is not None and told.startswith("tcp (on another host (boot elsewhere")
        assert told.endswith("; no library tried, as this host has no RDMA device)")
        a.write("b", [Span(0, 0, 64)], job=1)
        assert done_jobs(wait_for(a, lambda ended: bool(ended))) == [1]
        assert view_b == bytes(64)
    finally:
        a.close()
        b.close()
