"""Backends between real processes that are killed, stopped and restarted."""

from __future__ import annotations

import hashlib
import os
import signal
import time
from collections.abc import Callable, Iterator

import msgspec
import pytest

from pd.transfer.library import decode as library_endpoint
from pd.transfer.library import encode as seal
from pd.transfer.shm import ShmEndpoint
from pd.transfer.tcp_lane import TcpEndpoint, TcpLimits
from pd.transfer.transport import JobDone, JobFailed, PeerLost, Span
from tests.transfer.kit import (
    SEVERS_THE_LIVING,
    Child,
    Net,
    backends,
    done_jobs,
    lost_after_write,
    ours_in_shm,
    wait_for,
    wait_jobs,
    wait_lost,
)

MIB = 1 << 20
QUICK = TcpLimits(connect_s=0.5, stall_s=0.5)
PATIENT = TcpLimits(connect_s=5, stall_s=0.5)

Spawn = Callable[[str, int], Child]


@pytest.fixture(params=backends("shm", "tcp", "auto", "nixl", "nixl-tcp", "mooncake"))
def net(request: pytest.FixtureRequest) -> Iterator[Net]:
    made = Net(request.param)
    yield made
    made.close()


@pytest.fixture
def spawn(net: Net) -> Iterator[Spawn]:
    """Makes a child by name and region size, of the backend under test."""
    children: list[Child] = []

    def make(me: str, nbytes: int) -> Child:
        children.append(Child(net.backend, me, nbytes))
        return children[-1]

    yield make
    for child in children:
        child.close()


def digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def test_bytes_cross_between_processes_both_ways(net: Net, spawn: Spawn) -> None:
    a, view = net.make("a", MIB)
    child = spawn("b", MIB)
    view[:] = os.urandom(MIB)
    a.connect("b", child.endpoint)
    a.write("b", [Span(i * 4096, (255 - i) * 4096, 4096) for i in range(256)], job=1)
    assert done_jobs(wait_jobs(a, 1)) == [1]
    turned = b"".join(bytes(view[i * 4096 : (i + 1) * 4096]) for i in reversed(range(256)))
    assert child.ask("digest") == digest(turned)
    child.ask("connect", "a", a.endpoint().hex())
    assert child.ask("write", "a", 0, 0, MIB) == ["JobDone"]
    assert view == turned
    child.ask("fill", 3)
    a.read("b", [Span(5, 9, 100)], job=2)
    assert done_jobs(wait_jobs(a, 1)) == [2]
    assert view[9:109] == b"\x03" * 100


def test_a_peer_killed_while_idle_is_lost_by_itself(net: Net, spawn: Spawn) -> None:
    a, _ = net.make("a", 64)
    child = spawn("b", 64)
    a.connect("b", child.endpoint)
    a.write("b", [Span(0, 0, 64)], job=1)
    wait_jobs(a, 1)
    child.kill()
    ended = wait_lost(a, timeout_s=2)
    assert [type(end) for end in ended] == [PeerLost]
    assert a.sever("b"), "its death is proven"


def test_a_write_to_a_peer_killed_before_it_fails_and_the_peer_is_lost(net: Net, spawn: Spawn) -> None:
    a, _ = net.make("a", 64)
    child = spawn("b", 64)
    child.kill()
    a.connect("b", child.endpoint)
    lost_after_write(a, "b", Span(0, 0, 64), timeout_s=2)


@pytest.mark.parametrize("delay_s", [0.004, 0.04])
def test_a_peer_killed_during_a_write_ends_every_job_once_and_is_lost(net: Net, spawn: Spawn, delay_s: float) -> None:
    nbytes = 64 * MIB
    a, _ = net.make("a", nbytes)
    child = spawn("b", nbytes)
    a.connect("b", child.endpoint)
    for job in range(6):
        a.write("b", [Span(0, 0, nbytes)], job=job)
    time.sleep(delay_s)  # not to wait for anything: when the kill strikes is what varies
    child.kill()
    ended = wait_lost(a, timeout_s=10)
    outcomes = [type(end) for end in ended]
    num_done = outcomes.count(JobDone)
    assert outcomes == [JobDone] * num_done + [JobFailed] * (len(outcomes) - num_done - 1) + [PeerLost]
    assert [end.job for end in ended if not isinstance(end, PeerLost)] == list(range(6)), "each ends once, in order"
    assert a.sever("b")


def test_a_killed_peer_is_severed_and_a_living_one_only_where_it_can_be(net: Net, spawn: Spawn) -> None:
    a, _ = net.make("a", 64)
    living, dead = spawn("living", 64), spawn("dead", 64)
    a.connect("living", living.endpoint)
    a.connect("dead", dead.endpoint)
    dead.process.kill()
    dead.process.wait()
    assert a.sever("dead")
    assert a.sever("living") == (net.backend in SEVERS_THE_LIVING)
    living.process.kill()
    living.process.wait()
    assert a.sever("living"), "asked again, it looks again: quarantined pages must come back"


def test_kill_9_of_both_ends_leaves_nothing_behind(net: Net, spawn: Spawn) -> None:
    before = ours_in_shm()
    one, other = spawn("one", MIB), spawn("other", MIB)
    one.ask("connect", "other", other.endpoint.hex())
    other.ask("connect", "one", one.endpoint.hex())
    assert one.ask("write", "other", 0, 0, MIB) == ["JobDone"]
    one.kill()
    other.kill()
    deadline = time.monotonic() + 3  # a library's names in another process come and go
    while not ours_in_shm() <= before and time.monotonic() < deadline:
        time.sleep(0.05)
    assert ours_in_shm() <= before


def test_a_peer_restarted_at_the_same_address_is_not_taken_for_its_predecessor(net: Net, spawn: Spawn) -> None:
    """What is known is the old life's endpoint, but another life stands where it points."""
    a, view = net.make("a", 64)
    view[:] = b"\x01" * 64
    old, new = spawn("b", 64), spawn("b'", 64)
    a.connect("b", predecessor(net.backend, old.endpoint, new.endpoint))
    lost_after_write(a, "b", Span(0, 0, 64))
    assert new.ask("digest") == digest(bytes(64))
    a.connect("b'", new.endpoint)
    a.write("b'", [Span(0, 0, 64)], job=2)
    wait_for(a, lambda ended: 2 in done_jobs(ended))
    assert new.ask("digest") == digest(b"\x01" * 64)


def predecessor(backend: str, old: bytes, new: bytes) -> bytes:
    """The old life's endpoint with the new life's address: same port, or same pid and descriptor."""
    if backend == "auto":
        parts = zip(("shm", "tcp"), *(msgspec.msgpack.decode(end)[1:3] for end in (old, new)), strict=True)
        return msgspec.msgpack.encode(["auto", *(predecessor(*part) for part in parts)])
    if backend == "tcp":
        was, now = (msgspec.msgpack.decode(end, type=TcpEndpoint) for end in (old, new))
        return msgspec.msgpack.encode(msgspec.structs.replace(was, port=now.port))
    if backend in ("nixl", "nixl-tcp", "mooncake"):
        library = backend.partition("-")[0]
        was_there, is_there = (library_endpoint("b", end, library) for end in (old, new))
        return seal(msgspec.structs.replace(is_there, me=was_there.me, nonce=was_there.nonce))
    lost, here = (msgspec.msgpack.decode(end, type=ShmEndpoint) for end in (old, new))
    life = msgspec.structs.replace(lost.life, pid=here.life.pid)
    source = msgspec.structs.replace(lost.source, fd=here.source.fd)
    return msgspec.msgpack.encode(msgspec.structs.replace(lost, life=life, source=source))


def test_nothing_of_a_killed_writer_lands_once_it_is_severed(net: Net, spawn: Spawn) -> None:
    """Its pages go to others then: what its network still holds must be taken in before, or never."""
    nbytes = 64 * MIB
    a, view = net.make("a", nbytes)
    child = spawn("b", nbytes)
    child.ask("fill", 1)
    child.ask("connect", "a", a.endpoint().hex())
    a.connect("b", child.endpoint)
    child.ask("begin", "a", nbytes, 20)
    deadline = time.monotonic() + 10
    while view[4096] == 0 and time.monotonic() < deadline:
        time.sleep(1e-3)
    assert view[4096] == 1, "it writes"
    child.process.kill()
    child.process.wait()
    assert a.sever("b")
    view[:] = bytes(nbytes)
    time.sleep(0.2)  # for whatever may come: nothing may
    assert view == bytes(nbytes)


# ---- a peer that is stopped, through a library -----------------------------------------------------------------


@pytest.mark.parametrize("backend", backends("nixl-tcp", "mooncake"))
def test_a_stopped_peer_is_lost_by_the_deadline_and_quarantined_until_it_is_dead(backend: str) -> None:
    """The libraries would wait for ever, or 30 s, and what they have sent may land when the peer goes on."""
    nbytes = 32 * MIB
    net, child = Net(backend), Child(backend, "b", nbytes)
    a, view = net.make("a", nbytes, PATIENT)
    view[:] = b"\x01" * nbytes
    try:
        a.connect("b", child.endpoint)
        a.write("b", [Span(0, 0, 64)], job=1)
        wait_jobs(a, 1)
        os.kill(child.process.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, child.process.pid, os.WSTOPPED | os.WNOWAIT)
        began = time.monotonic()
        for job in (2, 3):
            a.write("b", [Span(0, 0, nbytes)], job=job)
        ended = wait_lost(a, timeout_s=10)
        assert [type(end) for end in ended] == [JobFailed, JobFailed, PeerLost]
        assert [(end.job, end.may_land) for end in ended if isinstance(end, JobFailed)] == [(2, True), (3, False)]
        assert "no progress with b in 0.5 s" in ended[0].reason  # type: ignore[union-attr]
        assert 0.5 <= time.monotonic() - began < 3
        assert not a.sever("b"), "it lives"
        os.kill(child.process.pid, signal.SIGCONT)
        child.ask("digest")
        child.kill()
        assert a.sever("b"), "its death is proven: its pages come back"
    finally:
        child.close()
        net.close()


# ---- a peer that is stopped, over tcp --------------------------------------------------------------------------


@pytest.mark.parametrize("nbytes", [MIB, 64 * MIB], ids=["within the kernel's buffers", "beyond them"])
def test_a_stopped_peer_is_lost_by_the_deadline_and_takes_nothing_in_when_it_goes_on(nbytes: int) -> None:
    net, child = Net("tcp"), Child("tcp", "b", nbytes)
    a, view = net.make("a", nbytes, QUICK)
    view[:] = b"\x01" * nbytes
    try:
        a.connect("b", child.endpoint)
        a.write("b", [Span(0, 0, 64)], job=1)
        wait_jobs(a, 1)
        os.kill(child.process.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, child.process.pid, os.WSTOPPED | os.WNOWAIT)
        began = time.monotonic()
        for job in (2, 3):
            a.write("b", [Span(0, 0, nbytes)], job=job)
        ended = wait_lost(a, timeout_s=10)
        assert [type(end) for end in ended] == [JobFailed, JobFailed, PeerLost]
        assert [end.job for end in ended if isinstance(end, JobFailed)] == [2, 3]
        assert "no progress with b in 0.5 s" in ended[0].reason  # type: ignore[union-attr]
        assert all(end.may_land for end in ended if isinstance(end, JobFailed))  # nobody confirmed the end of it
        assert 0.5 <= time.monotonic() - began < 3
        os.kill(child.process.pid, signal.SIGCONT)
        assert child.ask("digest") == digest(b"\x01" * 64 + bytes(nbytes - 64))
    finally:
        child.close()
        net.close()


def test_a_peer_stopped_shortly_is_waited_for() -> None:
    net, child = Net("tcp"), Child("tcp", "b", 16 * MIB)
    a, view = net.make("a", 16 * MIB)
    view[:] = b"\x01" * (16 * MIB)
    try:
        a.connect("b", child.endpoint)
        os.kill(child.process.pid, signal.SIGSTOP)
        a.write("b", [Span(0, 0, 16 * MIB)], job=1)
        assert a.poll() == []
        os.kill(child.process.pid, signal.SIGCONT)
        assert done_jobs(wait_jobs(a, 1)) == [1]
        assert child.ask("digest") == digest(bytes(view))
    finally:
        child.close()
        net.close()
