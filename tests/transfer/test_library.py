"""What a library is told, and when: not to forget a peer, nor to close, under a write of its own."""

from __future__ import annotations

import ctypes
import gc
import io
import logging
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import msgspec
import numpy as np
import pytest

from pd.transfer import library as batching
from pd.transfer.host import rdma_devices, this_life
from pd.transfer.library import Copies, LibraryEndpoint, LibraryLimits, Memory, decode, encode
from pd.transfer.library_peer import DOOR_NBYTES, Peer, Slate, Task, write_door
from pd.transfer.library_transport import LibraryTransport
from pd.transfer.mooncake import MooncakeLibrary
from pd.transfer.nixl import NixlLibrary, _log_to_stderr
from pd.transfer.outbox import Outbox
from pd.transfer.transport import JobDone, JobFailed, PeerLost, RegistrationFailed, Span, TransferError
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

    def __init__(self, *, asks_owner: bool = False, tells: bool = False) -> None:
        limits = LibraryLimits(connect_s=5, stall_s=5, look_s=0.02)
        self.libraries, self.ends, self.views = [], [], []
        for me in "ab":
            library = SlowLibrary(me=me, asks_owner=asks_owner, tells=tells)
            if tells:
                library.tend_s = None  # it has threads of its own
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


def test_a_library_that_tells_when_a_batch_has_ended_is_asked_then_and_hardly_meanwhile() -> None:
    two = Two(tells=True)
    batch = two.begin()
    before = two.slow.num_asked
    time.sleep(0.3)
    assert two.slow.num_asked - before < 60, "one that does not tell is asked some thousand times"
    two.slow.carry_out(batch)
    assert done_jobs(wait_jobs(two.a, 1)) == [1]
    two.close()
    assert two.slow.ring is not None
    two.slow.ring()  # a thread of the library's may come late
    assert two.slow.faults == []


def test_peers_are_tended_also_while_one_job_follows_the_other() -> None:
    two = Two()
    before = two.slow.num_tended
    for job in range(1, 41):
        two.a.write("b", [Span(0, 0, 8)], job=job)
        assert done_jobs(wait_jobs(two.a, 1)) == [job]
    assert two.slow.num_tended - before >= 19, "every other time, and the last is told before"
    two.close()


@pytest.fixture
def peer() -> Iterator[Peer]:
    """One whose door was read, over a library that does at once what it is told."""
    memory = (ctypes.c_char * (MIB + 4096))()
    address = ctypes.addressof(memory)
    write_door(memoryview(memory).cast("B")[MIB:], b"n" * 16, is_open=True)
    there = LibraryEndpoint("slow", "b", this_life(), b"n" * 16, MIB, Memory(address), address + MIB, b"b")
    known = Peer("b", there, Memory(address), SlowLibrary(), LibraryLimits(look_s=60), Outbox())
    slate = memoryview(bytearray(DOOR_NBYTES))
    known.meet(Slate(ctypes.addressof(ctypes.c_char.from_buffer(slate)), slate), 0.0)
    assert known.advance(0.0) and not known.is_waiting
    yield known
    known.outbox.close()


def test_a_batch_that_failed_beside_one_that_is_done_leaves_none_to_be_released_twice(
    monkeypatch: pytest.MonkeyPatch, peer: Peer
) -> None:
    monkeypatch.setattr(batching, "BATCH_NBYTES", LARGE)
    library = peer.library
    assert isinstance(library, SlowLibrary)
    library.is_held = True
    peer.give(Task(0, np.array([[0, 4 * LARGE, 3 * LARGE]]), False, 3 * LARGE, 0.0))
    while peer.advance(0.0):
        pass
    first, second, _ = [batch for batch in library.open if not batch.is_over]
    library.carry_out(first)
    second.fails = True
    with pytest.raises(TransferError, match="it failed"):
        peer.advance(0.0)
    left = peer.lose("it failed", is_ours=False, now=0.0)
    (end, _) = peer.outbox.drain()
    assert isinstance(end, JobFailed) and end.may_land
    assert not left.has_ended(1.0) and first not in library.open and second not in library.open
    library.carry_out(library.open[-1])
    assert left.has_ended(1.0) and library.open == library.faults == []


def test_a_batch_that_failed_while_it_was_posted_may_have_been_sent_in_part(
    monkeypatch: pytest.MonkeyPatch, peer: Peer
) -> None:
    """So its bytes may land, and the library is told to forget the peer a little later."""

    def fail(there: object, copies: Copies) -> object:
        raise TransferError("the peer went")

    library = peer.library
    assert isinstance(library, SlowLibrary)
    monkeypatch.setattr(library, "post", fail)
    peer.give(Task(0, np.array([[0, 0, 8]]), False, 8, 0.0))
    with pytest.raises(TransferError, match="the peer went"):
        peer.advance(0.0)
    left = peer.lose("the peer went", is_ours=False, now=0.0)
    (end, _) = peer.outbox.drain()
    assert isinstance(end, JobFailed) and end.may_land
    assert not left.has_ended(0.0) and library.known == {"b"}
    assert left.has_ended(1.0) and library.known == set()


def test_what_a_library_does_at_once_takes_a_job_one_turn_and_each_further_batch_one(
    monkeypatch: pytest.MonkeyPatch, peer: Peer
) -> None:
    """So a small job does not wait for other peers between its steps, nor they for a large one's end."""
    monkeypatch.setattr(batching, "BATCH_NBYTES", 100)
    for job, nbytes in enumerate((100, 300, 0)):
        rows = np.array([[0, 1000, nbytes]][: bool(nbytes)], np.int64).reshape(-1, 3)
        peer.give(Task(job, rows, False, nbytes, 0.0))
    ended = []
    for _ in range(5):
        assert peer.advance(0.0)
        ended.append([end.job for end in peer.outbox.drain() if isinstance(end, JobDone)])
    assert ended == [[0], [], [], [1], [2]]
    assert not peer.advance(0.0)


MOST = (1 << 63) - MIB


@pytest.mark.parametrize(
    "change",
    [
        {"memory": Memory(-1)},
        {"memory": Memory(MOST + 1)},
        {"memory": Memory((1 << 64) - 1)},
        {"memory": Memory(4096, -1)},
        {"memory": Memory(4096, 1 << 63)},
        {"door": -1},
        {"door": 1 << 63},
        {"nbytes": 1 << 63},
    ],
)
def test_numbers_of_a_peer_that_no_memory_has_are_refused_before_a_library_sees_them(change: dict[str, object]) -> None:
    """They ended the thread that serves all peers, and with NIXL the process."""
    two = Two()
    sound = decode("b", two.b.endpoint(), two.a.name)
    with pytest.raises(TransferError, match=r"c sent a broken \S+ endpoint: "):
        two.a.connect("c", encode(msgspec.structs.replace(sound, me="c", **change)))
    two.a.write("b", [Span(0, 0, LARGE)], job=1)
    assert done_jobs(wait_jobs(two.a, 1)) == [1]
    two.close()


def test_whatever_mooncake_raises_is_a_failed_batch() -> None:
    library = MooncakeLibrary.__new__(MooncakeLibrary)
    library._lanes, library._ring, library._engine = set(), lambda: None, None

    def move(*_: object) -> int:
        raise TypeError("incompatible arguments")

    library._move = move
    there = library.meet(msgspec.msgpack.encode(["mooncake", "127.0.0.1:1"]), Memory(0), 8)
    batch = library.post(there, Copies(Memory(0), Memory(0), np.zeros((1, 3), np.int64), is_read=False))
    with pytest.raises(TransferError, match=r"^mooncake raised TypeError: incompatible arguments$"):
        until(lambda: library.is_done(batch))
    library.part(there)


class Full:
    """Of NIXL an agent, of Mooncake an engine, with no memory left to lock."""

    def register_memory(self, *given: object, **more: object) -> int:
        if more:  # NIXL's way
            raise RuntimeError("NIXL_ERR_BACKEND")
        return -12


@pytest.mark.parametrize(("device", "where"), [(None, "host memory"), (3, "GPU 3")])
def test_a_library_that_cannot_register_names_the_pool_its_size_and_the_likely_cause(
    device: int | None, where: str
) -> None:
    nixl, mooncake = (kind.__new__(kind) for kind in (NixlLibrary, MooncakeLibrary))
    nixl._agent, nixl._backend, nixl._registered = Full(), "UCX", []
    mooncake._engine, mooncake._reaches_gpus, mooncake._registered = Full(), True, []
    likely = "limit of locked memory" if device is None else "GPUDirect is missing"
    for library, reason in ((nixl, "NIXL_ERR_BACKEND"), (mooncake, "it returned -12")):
        told = f"{library.name} cannot register the KV pool, 4096 bytes of {where} at 0x10000: .*{reason}"
        with pytest.raises(RegistrationFailed, match=told) as caught:
            library.register(Memory(0x10000, device), 4096)
        assert likely in caught.value.hint and "pd doctor --only" in caught.value.hint
        assert library._registered == []


@pytest.mark.skipif(why_absent("mooncake") is not None, reason=str(why_absent("mooncake")))
def test_mooncake_says_warnings_and_errors_unless_the_user_asks_for_more() -> None:
    """In a process of its own: it reads its variable once."""
    start = (
        "from pd.transfer.mooncake import mooncake_transport as make\n"
        "a = make(me='a', host='127.0.0.1'); a.allocate(4096); a.close()"
    )

    def said(**more: str) -> set[str]:
        env = {name: value for name, value in os.environ.items() if name != "MC_LOG_LEVEL"} | more
        ran = subprocess.run([sys.executable, "-c", start], env=env, stderr=subprocess.PIPE, text=True, timeout=60)
        assert ran.returncode == 0, ran.stderr
        return set(re.findall(r"^([IWE])\d{4} \d\d:", ran.stderr, re.MULTILINE))

    assert "I" not in said()
    assert "I" in said(MC_LOG_LEVEL="INFO")


def test_nixls_log_goes_to_standard_error_also_where_its_own_stream_is_closed() -> None:
    logger, closed = logging.getLogger("nixl"), io.StringIO()
    sink = logging.StreamHandler(closed)
    closed.close()
    logger.addHandler(sink)
    try:
        _log_to_stderr()
        assert sink.stream is sys.stderr
    finally:
        logger.removeHandler(sink)


@pytest.mark.skipif(why_absent("nixl") is not None, reason=str(why_absent("nixl")))
def test_nixl_asks_owners_where_ucx_has_nothing_but_tcp() -> None:
    def asked(params: dict[str, str], *, is_near: bool) -> bool:
        library = NixlLibrary("a", backend="UCX", params=params, devices=())
        answer = library.is_owner_asked(is_near=is_near)
        library.close()
        return answer

    assert not asked({}, is_near=True) and asked({"engine_config": "TLS=tcp"}, is_near=True)
    assert asked({}, is_near=False) == (not rdma_devices())
