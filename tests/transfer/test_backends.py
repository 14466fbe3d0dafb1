"""One suite for every backend, within one process. Between processes: test_processes.py."""

from __future__ import annotations

import contextlib
import gc
import os
import random
import threading
import time
from collections.abc import Iterator
from typing import NamedTuple

import pytest
import torch

from pd.transfer.memory import MemoryTransport, Task
from pd.transfer.transport import JobDone, JobFailed, PeerLost, Span, TransferError
from tests.transfer.kit import (
    SEVERS_THE_LIVING,
    Net,
    backends,
    done_jobs,
    lost_after_write,
    open_fds,
    ours_in_shm,
    random_spans,
    resident_nbytes,
    wait_for,
    wait_jobs,
    wait_lost,
)

MIB = 1 << 20


ALL = ("memory", "shm", "tcp", "tcp3", "auto", "shm-card", "tcp-card", "nixl", "nixl-tcp", "mooncake")


@pytest.fixture(params=backends(*ALL))
def net(request: pytest.FixtureRequest) -> Iterator[Net]:
    made = Net(request.param)
    yield made
    made.close()


# ---- bytes ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("is_read", [False, True], ids=["write", "read"])
def test_bytes_are_exact_for_random_spans(net: Net, seed: int, is_read: bool) -> None:
    rng = random.Random(seed)
    nbytes = rng.choice([1, 4095, 4097, 3 * MIB + 11])
    a, view_a, _, view_b = net.pair(nbytes)
    view_a[:], view_b[:] = rng.randbytes(nbytes), rng.randbytes(nbytes)
    source, sink = (view_b, view_a) if is_read else (view_a, view_b)
    expected, untouched = bytearray(sink), bytes(source)
    num_jobs = 6
    for job in range(num_jobs):
        spans = random_spans(rng, nbytes, rng.randint(0, min(300, (nbytes + 1) // 2)))
        for src, dst, size in spans:
            expected[dst : dst + size] = untouched[src : src + size]
        (a.read if is_read else a.write)("b", spans, job=job)
    ended = wait_jobs(a, num_jobs)
    assert sorted(done_jobs(ended)) == list(range(num_jobs)), f"seed {seed}: {ended}"
    assert sink == expected and source == untouched, f"seed {seed}"


def test_more_spans_than_a_frame_or_a_system_call_takes(net: Net) -> None:
    nbytes = 20_000
    a, view_a, _, view_b = net.pair(nbytes)
    view_a[:] = random.Random(5).randbytes(nbytes)
    a.write("b", [Span(nbytes - 1 - i, i, 1) for i in range(nbytes)], job=1)
    (end,) = wait_jobs(a, 1)
    assert isinstance(end, JobDone) and end.nbytes == nbytes
    assert view_b == bytes(view_a)[::-1]


def test_a_span_larger_than_any_batch_arrives(net: Net) -> None:
    nbytes = 36 * MIB
    a, view_a, _, view_b = net.pair(nbytes)
    view_a[:] = random.Random(6).randbytes(MIB) * 36
    a.write("b", [Span(1, 3, nbytes - 3)], job=1)
    assert done_jobs(wait_jobs(a, 1)) == [1]
    assert view_b[:3] == bytes(3) and view_b[3:] == view_a[1 : nbytes - 2]


def test_writes_to_one_peer_take_effect_in_order(net: Net) -> None:
    a, view_a, _, view_b = net.pair(100 * 4096)
    for i in range(100):
        view_a[i * 4096 : (i + 1) * 4096] = bytes([i]) * 4096
        a.write("b", [Span(i * 4096, 7, 4096)], job=i)
    assert done_jobs(wait_jobs(a, 100)) == list(range(100))
    assert view_b[7 : 7 + 4096] == bytes([99]) * 4096


def test_a_job_of_no_spans_is_done(net: Net) -> None:
    a, *_ = net.pair(64)
    a.write("b", [], job=3)
    a.read("b", [], job=4)
    ended = wait_jobs(a, 2)
    assert [(type(end), end.job, end.nbytes) for end in ended if isinstance(end, JobDone)] == [
        (JobDone, 3, 0),
        (JobDone, 4, 0),
    ]


def test_both_directions_at_once(net: Net) -> None:
    nbytes = 8 * MIB
    a, view_a, b, view_b = net.pair(2 * nbytes)
    view_a[:nbytes], view_b[:nbytes] = b"\x11" * nbytes, b"\x22" * nbytes
    for job in range(4):
        a.write("b", [Span(0, nbytes, nbytes)], job=job)
        b.write("a", [Span(0, nbytes, nbytes)], job=job)
    assert done_jobs(wait_jobs(a, 4)) == done_jobs(wait_jobs(b, 4)) == [0, 1, 2, 3]
    assert view_b[nbytes:] == b"\x11" * nbytes and view_a[nbytes:] == b"\x22" * nbytes


def test_sixty_four_peers_that_connect_at_once_all_succeed(net: Net) -> None:
    num_peers = 16 if net.backend == "tcp3" else 64
    hub, view_hub = net.make("hub", num_peers * 4096)
    others = [net.make(f"p{i}", 8192) for i in range(num_peers)]
    for i, (other, view) in enumerate(others):
        view[:4096] = bytes([i]) * 4096
        other.connect("hub", hub.endpoint())
        hub.connect(f"p{i}", other.endpoint())
        other.write("hub", [Span(0, i * 4096, 4096)], job=i)
        hub.read(f"p{i}", [Span(0, i * 4096, 4096)], job=i)
    assert sorted(done_jobs(wait_jobs(hub, num_peers))) == list(range(num_peers))
    for i, (other, _) in enumerate(others):
        assert done_jobs(wait_jobs(other, 1)) == [i]
    assert view_hub == b"".join(bytes([i]) * 4096 for i in range(num_peers))
    for i in range(num_peers):
        hub.write(f"p{i}", [Span(i * 4096, 4096, 4096)], job=i)
    assert sorted(done_jobs(wait_jobs(hub, num_peers))) == list(range(num_peers))
    assert all(view[4096:] == bytes([i]) * 4096 for i, (_, view) in enumerate(others))


# ---- refusals -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "span",
    [
        Span(0, 4090, 7),
        Span(4090, 0, 7),
        Span(-1, 0, 4),
        Span(0, -1, 4),
        Span(0, 0, 0),
        Span(0, 0, -4),
        Span(0, 1 << 63, 1),
        Span(8, 8, 1 << 64),
    ],
)
def test_a_span_that_leaves_a_region_is_refused_and_nothing_moves(net: Net, span: Span) -> None:
    a, view_a, _, view_b = net.pair(4096)
    view_a[:] = b"\x01" * 4096
    for give in (a.write, a.read):
        with pytest.raises(TransferError, match="leaves a region: source of 4096 bytes, destination of 4096"):
            give("b", [Span(0, 0, 8), span], job=1)
    a.write("b", [Span(0, 100, 1)], job=2)
    assert done_jobs(wait_jobs(a, 1)) == [2]
    assert view_b == bytes(100) + b"\x01" + bytes(4096 - 101)


def test_an_unknown_peer_is_refused(net: Net) -> None:
    a, *_ = net.pair(64)
    for give in (a.write, a.read):
        with pytest.raises(TransferError, match="unknown peer c"):
            give("c", [Span(0, 0, 1)], job=1)


@pytest.mark.parametrize("garbage", [b"", b"\x00", b"\xff" * 4096, b"\x94\xa3tcp\xa1b", b"fake:b"])
def test_a_malformed_endpoint_is_refused(net: Net, garbage: bytes) -> None:
    a, _ = net.make("a", 64)
    with pytest.raises(TransferError, match=r"b sent no .* endpoint"):
        a.connect("b", garbage)


def test_every_cut_or_flipped_endpoint_is_refused_or_lost_and_never_crashes(net: Net) -> None:
    rng = random.Random(11)
    a, view_a = net.make("a", 64)
    b, view_b = net.make("b", 64)
    view_a[:] = b"\x01" * 64
    sound = b.endpoint()
    assert len(sound) <= 4096
    address = sound.find(b"127.0.0.1")  # left whole: no test may knock at other hosts
    for i in range(len(sound)):
        if 0 <= address <= i < address + len(b"127.0.0.1"):
            continue
        broken = bytearray(sound)
        broken[i] ^= 1 << rng.randrange(8)
        with contextlib.suppress(TransferError):
            a.connect(f"x{i}", bytes(broken[: rng.choice([i, len(sound)])]))
            a.write(f"x{i}", [Span(0, 0, 1)], job=i)
    a.connect("b", sound)
    a.write("b", [Span(0, 63, 1)], job=1000)
    wait_for(a, lambda ended: 1000 in done_jobs(ended))
    assert view_b[63] == 1


def test_without_a_region_everything_is_refused(net: Net) -> None:
    b, _ = net.make("b", 64)
    bare = net._new("bare", None)
    net.made.append(bare)
    with pytest.raises(TransferError, match="bare has no region"):
        bare.endpoint()
    with pytest.raises(TransferError, match="bare has no region"):
        bare.connect("b", b.endpoint())
    with pytest.raises(TransferError, match="at least 1 byte, not 0"):
        bare.allocate(0)
    bare.allocate(4)
    with pytest.raises(TransferError, match="has a region already"):
        bare.allocate(4)


def test_a_region_that_no_memory_can_hold_is_refused_with_its_size(net: Net) -> None:
    bare = net._new("bare", None)
    net.made.append(bare)
    with pytest.raises(TransferError, match=f"{1 << 62} bytes"):
        bare.allocate(1 << 62)


# ---- waking ---------------------------------------------------------------------------------------------------


def test_wake_fd_sleeps_again_once_all_is_polled(net: Net) -> None:
    a, *_ = net.pair(64)
    a.write("b", [Span(0, 0, 1)], job=1)
    wait_jobs(a, 1)
    a.poll()
    with pytest.raises(BlockingIOError):
        os.eventfd_read(a.wake_fd)
    assert a.poll() == []


# ---- ends -----------------------------------------------------------------------------------------------------


def test_a_peer_that_closes_fails_its_jobs_and_then_is_lost(net: Net) -> None:
    a, _, b, _ = net.pair(64)
    a.write("b", [Span(0, 0, 1)], job=1)
    wait_jobs(a, 1)
    b.close()
    lost_after_write(a, "b", Span(0, 0, 1))
    with pytest.raises(TransferError):
        a.write("b", [Span(0, 0, 1)], job=3)


def test_a_lost_peer_can_be_connected_again(net: Net) -> None:
    a, view_a, b, _ = net.pair(64)
    view_a[0] = 9
    b.close()
    lost_after_write(a, "b", Span(0, 0, 1))
    again, view_again = net.make("b2", 64)
    a.connect("b", again.endpoint())
    a.write("b", [Span(0, 5, 1)], job=2)
    wait_for(a, lambda ended: 2 in done_jobs(ended))
    assert view_again[5] == 9


def test_closing_fails_what_is_in_flight_and_may_be_repeated(net: Net) -> None:
    nbytes = 64 * MIB
    a, *_ = net.pair(nbytes)
    for job in range(3):
        a.write("b", [Span(0, 0, nbytes)], job=job)
    a.close()
    a.close()
    ended = a.poll()
    assert [end.job for end in ended if not isinstance(end, PeerLost)] == [0, 1, 2], "each ends once"
    assert isinstance(ended[-1], JobFailed) and ended[-1].reason == "transport closed"
    with pytest.raises(TransferError):
        a.write("b", [Span(0, 0, 1)], job=9)


def test_closing_leaves_no_descriptor_thread_mapping_or_file(net: Net) -> None:
    move_a_little(net)  # what a library keeps for the process's whole life is there from now on
    if net.backend == "mooncake":
        time.sleep(1.5)  # it closes its own a little later
    before = what_is_open()
    move_a_little(net)
    deadline = time.monotonic() + 3
    while not what_is_open().is_within(before) and time.monotonic() < deadline:
        time.sleep(0.05)
    now = what_is_open()
    assert now.is_within(before), f"{now}, before {before}"
    with open("/proc/self/maps") as maps:
        assert "pd-kv" not in maps.read()


def move_a_little(net: Net) -> None:
    a, _, b, _ = net.pair(MIB)
    a.write("b", [Span(0, 0, MIB)], job=1)
    b.read("a", [Span(0, 0, MIB)], job=1)
    wait_jobs(a, 1), wait_jobs(b, 1)
    net.close()
    net.made.clear()


class Open(NamedTuple):
    num_fds: int
    num_threads: int
    names: set[str]  # in shared memory; a library's in another process come and go

    def is_within(self, before: Open) -> bool:
        return (self.num_fds, self.num_threads) == (before.num_fds, before.num_threads) and self.names <= before.names


def what_is_open() -> Open:
    gc.collect()
    return Open(len(open_fds()), threading.active_count(), ours_in_shm())


def test_a_tensor_over_the_region_outlives_it(net: Net) -> None:
    a, view = net.make("a", 4096)
    tensor = torch.frombuffer(view, dtype=torch.uint8)
    tensor.fill_(7)
    a.close()
    assert tensor.sum() == 7 * 4096


def test_ten_thousand_transfers_leave_descriptors_and_memory_flat(net: Net) -> None:
    nbytes = MIB // 32
    a, view_a, _, view_b = net.pair(nbytes)
    num_fds, resident = 0, 0
    num_jobs = 2_000 if net.backend.endswith(("-card", "-tcp")) else 10_000  # whose jobs take milliseconds
    for job in range(num_jobs):
        view_a[job % nbytes] = job % 251
        a.write("b", [Span(0, 0, nbytes // 2), Span(nbytes // 2, nbytes // 2, nbytes // 2)], job=job)
        if job % 100 == 99:
            assert len(done_jobs(wait_jobs(a, 100))) == 100
        if job == num_jobs // 4 - 1:
            num_fds, resident = len(open_fds()), resident_nbytes()
    assert view_b == view_a
    assert len(open_fds()) == num_fds
    assert resident_nbytes() - resident < 4 * MIB


def test_peers_that_come_and_go_leave_nothing(net: Net) -> None:
    hub, _ = net.make("hub", 4096)
    num_fds = 0
    num_peers = 20 if net.backend == "mooncake" else 60  # whose engine takes a second to end
    for i in range(num_peers):
        peer, _ = net.make(f"p{i}", 4096)
        peer.connect("hub", hub.endpoint())
        hub.connect(f"p{i}", peer.endpoint())
        hub.write(f"p{i}", [Span(0, 0, 4096)], job=i)
        peer.write("hub", [Span(0, 0, 4096)], job=i)
        wait_for(hub, lambda ended, i=i: i in done_jobs(ended))
        wait_jobs(peer, 1)
        peer.close()
        hub.sever(f"p{i}")
        if i == 9:
            num_fds = len(open_fds())
    # Of 50 peers: Mooncake keeps a lost one's socket until it is closed itself, UCX may open a further pool of its own.
    kept = {"mooncake": 10, "nixl": 5, "nixl-tcp": 5}.get(net.backend, 0)
    assert len(open_fds()) <= num_fds + kept


# ---- severing -------------------------------------------------------------------------------------------------


def test_nothing_of_a_severed_peer_lands_any_more(net: Net) -> None:
    nbytes = 48 * MIB
    a, view_a, b, view_b = net.pair(nbytes)
    view_a[:] = b"\x01" * nbytes
    for job in range(8):
        a.write("b", [Span(0, 0, nbytes)], job=job)
    is_clean = b.sever("a")
    assert is_clean == (net.backend in SEVERS_THE_LIVING), "who maps or may write our memory lives on with it"
    if not is_clean:
        return
    view_b[:] = bytes(nbytes)
    ended = wait_lost(a)
    assert isinstance(ended[-1], PeerLost) and "sever" in ended[-1].reason
    assert sorted(end.job for end in ended if not isinstance(end, PeerLost)) == list(range(8)), "each ends once"
    with pytest.raises(TransferError):
        a.write("b", [Span(0, 0, nbytes)], job=99)
    a.connect("b", b.endpoint())  # it tries again
    lost_after_write(a, "b", Span(0, 0, nbytes))
    assert view_b == bytes(nbytes)


def test_severing_fails_our_own_jobs_to_that_peer_and_spares_others(net: Net) -> None:
    a, view_a, _, _ = net.pair(32 * MIB)
    _, view_c = (made := net.make("c", 64))
    view_a[:] = b"\x05" * len(view_a)
    a.connect("c", made[0].endpoint())
    for job in range(8):
        a.write("b", [Span(0, 0, 32 * MIB)], job=job)
    a.sever("b")
    a.write("c", [Span(0, 0, 64)], job=20)
    ended = wait_for(a, lambda ended: 20 in done_jobs(ended))
    assert sorted(end.job for end in ended) == [*range(8), 20]  # type: ignore[union-attr]
    assert not any(isinstance(end, PeerLost) for end in ended)
    assert view_c == b"\x05" * 64
    with pytest.raises(TransferError):
        a.write("b", [Span(0, 0, 1)], job=30)


def test_a_severed_peer_is_not_connected_again(net: Net) -> None:
    a, _, b, _ = net.pair(64)
    a.sever("b")
    with pytest.raises(TransferError, match="b was severed"):
        a.connect("b", b.endpoint())
    with pytest.raises(TransferError, match="severed"):
        a.connect("b under another name", b.endpoint())


def test_severing_a_stranger_by_its_own_name_keeps_it_out() -> None:
    net = Net("tcp")
    a, view_a = net.make("a", 64)
    b, view_b = net.make("b", 64)
    view_a[:] = b"\x01" * 64
    assert b.sever("a")
    a.connect("b", b.endpoint())
    lost_after_write(a, "b", Span(0, 0, 64))
    assert view_b == bytes(64)
    net.close()


class SlowMemory(MemoryTransport):
    """Holds every job back until told."""

    is_held = True

    def _is_due(self, task: Task) -> bool:
        return not self.is_held


def test_a_write_held_back_past_the_severing_never_lands() -> None:
    net = Net("memory")
    slow = SlowMemory(me="slow", hub=net.hub)
    slow.allocate(64)[:] = b"\x01" * 64
    b, view_b = net.make("b", 64)
    slow.connect("b", b.endpoint())
    slow.write("b", [Span(0, 0, 64)], job=1)
    assert slow.poll() == []
    assert b.sever("slow")
    slow.is_held = False
    assert [type(end) for end in wait_lost(slow)] == [JobFailed, PeerLost]
    assert view_b == bytes(64)
    slow.close()
    net.close()


def test_the_memory_queue_is_bounded() -> None:
    net = Net("memory")
    slow = SlowMemory(me="slow", hub=net.hub)
    slow.allocate(64)
    b, _ = net.make("b", 64)
    slow.connect("b", b.endpoint())
    for job in range(4096):
        slow.write("b", [], job=job)
    with pytest.raises(TransferError, match="4096 jobs wait for b already"):
        slow.write("b", [], job=4096)
    slow.close()
    net.close()
