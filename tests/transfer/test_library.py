"""What a library is told, and when: not to forget a peer, nor to close, under a write of its own."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable

import pytest

from pd.transfer.host import rdma_devices
from pd.transfer.library import LibraryLimits
from pd.transfer.library_transport import LibraryTransport
from pd.transfer.nixl import NixlLibrary
from pd.transfer.transport import JobDone, JobFailed, PeerLost, Span
from tests.transfer.kit import done_jobs, wait_for, wait_jobs, wait_lost, why_absent
from tests.transfer.slow_library import LARGE, Batch, SlowLibrary

MIB = 1 << 20


def until(is_so: Callable[[], bool], timeout_s: float = 5.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not is_so():
        assert time.monotonic() < deadline, "not so in time"
        time.sleep(1e-3)


class Two:
    """`a` over a library that can be slow, and `b`, which it writes to."""

    def __init__(self, *, asks_owner: bool = False) -> None:
        limits = LibraryLimits(connect_s=5, stall_s=5, look_s=0.02)
        self.libraries, self.ends, self.views = [], [], []
        for me in "ab":
            library = SlowLibrary(me=me, asks_owner=asks_owner)
            end = LibraryTransport(me=me, start=lambda _, library=library: library, limits=limits)  # type: ignore[misc]
            self.libraries.append(library)
            self.ends.append(end)
            self.views.append(end.allocate(MIB))
        self.a, self.b = self.ends
        self.slow = self.libraries[0]
        self.a.connect("b", self.b.endpoint())
        self.a.write("b", [Span(0, 0, LARGE)], job=0)
        assert done_jobs(wait_jobs(self.a, 1)) == [0]

    def begin(self) -> Batch:
        """A write that the library holds back."""
        self.slow.is_held = True
        self.views[0][:] = b"\x07" * MIB
        self.a.write("b", [Span(0, 0, MIB)], job=1)
        until(lambda: any(not batch.is_over for batch in self.slow.open))
        return next(batch for batch in self.slow.open if not batch.is_over)

    def close(self) -> None:
        for end in self.ends:
            end.close()


def test_a_peer_severed_under_a_write_is_forgotten_only_when_that_has_ended() -> None:
    two = Two()
    batch = two.begin()
    two.a.sever("b")
    (end,) = wait_jobs(two.a, 1)
    assert isinstance(end, JobFailed) and end.may_land
    time.sleep(0.05)
    assert two.slow.known == {"b"} and batch in two.slow.open
    two.slow.carry_out(batch)
    until(lambda: not two.slow.known)
    two.close()
    assert two.slow.faults == [] and two.slow.is_closed


def test_closing_under_a_write_says_so_at_once_and_keeps_library_and_memory_until_it_has_ended() -> None:
    two = Two()
    batch = two.begin()
    two.a.close()
    assert [type(end) for end in two.a.poll()] == [JobFailed]
    two.views[0] = memoryview(b"")
    gc.collect()
    assert not two.slow.is_closed
    two.slow.carry_out(batch)
    until(lambda: two.slow.is_closed)
    assert bytes(two.views[1]) == b"\x07" * MIB
    two.close()
    assert two.slow.faults == []


def test_a_batch_that_failed_holds_its_peer_no_longer() -> None:
    two = Two()
    batch = two.begin()
    batch.fails = True
    assert [type(end) for end in wait_lost(two.a)] == [JobFailed, PeerLost]
    until(lambda: not two.slow.known)
    two.close()
    assert two.slow.faults == [] and two.slow.is_closed


def test_a_peer_that_comes_again_waits_for_what_is_left_of_its_last_visit() -> None:
    """Within the grace that a failed batch is given: else the library would know it twice, or forget it again."""
    two = Two()
    two.begin().fails = True
    wait_lost(two.a)
    two.slow.is_held = False
    two.a.connect("b", two.b.endpoint())
    two.a.write("b", [Span(0, 0, LARGE)], job=2)
    assert [type(end) for end in wait_for(two.a, bool)] == [JobDone]
    two.close()
    assert two.slow.faults == []


def test_of_a_peer_that_sends_what_is_read_of_it_one_piece_is_read_at_a_time() -> None:
    two = Two(asks_owner=True)
    two.slow.is_held = True
    two.views[1][:] = bytes(range(256)) * 4096
    two.a.read("b", [Span(i * LARGE, (3 - i) * LARGE, LARGE) for i in range(4)], job=1)
    for i in range(4):
        until(lambda: any(not batch.is_over for batch in two.slow.open))
        (batch,) = [batch for batch in two.slow.open if not batch.is_over]
        assert batch.copies.spans.tolist() == [[i * LARGE, (3 - i) * LARGE, LARGE]]
        two.slow.carry_out(batch)
    assert done_jobs(wait_jobs(two.a, 1)) == [1]
    two.close()
    assert two.slow.faults == []


@pytest.mark.skipif(why_absent("nixl") is not None, reason=str(why_absent("nixl")))
def test_nixl_asks_owners_where_ucx_has_nothing_but_tcp() -> None:
    def asked(params: dict[str, str], *, is_near: bool) -> bool:
        library = NixlLibrary("a", backend="UCX", params=params, devices=())
        answer = library.is_owner_asked(is_near=is_near)
        library.close()
        return answer

    assert not asked({}, is_near=True) and asked({"engine_config": "TLS=tcp"}, is_near=True)
    assert asked({}, is_near=False) == (not rdma_devices())
