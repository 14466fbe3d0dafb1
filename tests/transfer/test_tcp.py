"""What only TCP has: strangers, nonsense on the wire, connections that break and come back, limits."""

from __future__ import annotations

import contextlib
import os
import random
import re
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from typing import cast

import msgspec
import pytest

from pd.transfer.tcp import TcpTransport
from pd.transfer.tcp_frames import (
    HEADER_NBYTES,
    MAX_ENTRIES,
    NONCE_NBYTES,
    PROOF_NBYTES,
    Entry,
    Frame,
    FrameError,
    Kind,
    Prover,
    mixed,
    pack,
    pack_hello,
    pack_refusal,
    prove,
    unpack,
    unpack_entries,
    unpack_hello,
)
from pd.transfer.tcp_lane import TcpEndpoint, TcpLimits
from pd.transfer.tcp_loop import TcpLoop
from pd.transfer.transport import Completion, JobDone, JobFailed, PeerLost, Span, TransferError, Transport
from tests.transfer.kit import Child, Net, done_jobs, lost_after_write, open_fds, wait_for, wait_jobs, wait_lost

MIB = 1 << 20
NBYTES = 4096
QUICK = TcpLimits(connect_s=0.3, stall_s=0.3)


@pytest.fixture
def net() -> Iterator[Net]:
    made = Net("tcp")
    yield made
    made.close()


# ---- strangers -------------------------------------------------------------------------------------------------


class Stranger:
    """A raw socket to a transport's listener, that reads until the other side ends it."""

    def __init__(self, endpoint: bytes) -> None:
        self.there = msgspec.msgpack.decode(endpoint, type=TcpEndpoint)
        self.sock = socket.create_connection((self.there.host, self.there.port), timeout=10)

    def hello(self, name: str = "stranger", generation: int = 1) -> Frame:
        """With the right proof; what came back."""
        self.prove(self.there.secret, name, generation)
        frame = self.frame()
        if frame.kind is Kind.WELCOME:
            self.exactly(PROOF_NBYTES)
        return frame

    def prove(self, secret: bytes, name: str, generation: int = 1) -> None:
        hello = pack_hello(os.urandom(NONCE_NBYTES), generation, 0, name)
        self.sock.sendall(hello)
        assert self.frame().kind is Kind.CHALLENGE
        proof = prove(Prover.INITIATOR, mixed(secret, None), hello, self.exactly(NONCE_NBYTES))
        self.sock.sendall(pack(Frame(Kind.PROOF, True, 0, 0, PROOF_NBYTES)) + proof)

    def frame(self) -> Frame:
        return unpack(self.exactly(HEADER_NBYTES))

    def exactly(self, nbytes: int) -> bytes:
        got = b""
        while len(got) < nbytes:
            part = self.sock.recv(nbytes - len(got))
            assert part, f"ended after {got!r}"
            got += part
        return got

    def last_words(self) -> str:
        """The refusal, and then the end of the connection."""
        frame = self.frame()
        assert frame.kind is Kind.REFUSED
        reason = self.exactly(frame.nbytes).decode()
        with contextlib.suppress(ConnectionResetError):  # as good an end
            assert self.sock.recv(1) == b""
        return reason


@pytest.fixture
def victim(net: Net) -> Iterator[tuple[TcpTransport, memoryview]]:
    """A transport in whose region nothing may change but by its friend, who is served before and after."""
    transport, view = net.make("victim", NBYTES, QUICK)
    friend, friendly = net.make("friend", NBYTES)
    friendly[:] = b"\xaa" * NBYTES
    friend.connect("victim", transport.endpoint())
    friend.write("victim", [Span(0, 0, 1)], job=1)
    wait_jobs(friend, 1)
    yield cast(TcpTransport, transport), view
    friend.write("victim", [Span(1, 1, 1)], job=2)
    assert done_jobs(wait_jobs(friend, 1)) == [2], "its friend is served"
    assert view == b"\xaa\xaa" + bytes(NBYTES - 2), "nothing else was touched"


Victim = tuple[TcpTransport, memoryview]


def test_a_stranger_with_the_wrong_secret_is_refused(victim: Victim) -> None:
    stranger = Stranger(victim[0].endpoint())
    stranger.prove(os.urandom(16), "friend")
    write = pack(Frame(Kind.WRITE, True, 1, 1, 100), [Entry(0, 100)]) + b"\x66" * 100
    stranger.sock.sendall(write)
    assert "wrong proof" in stranger.last_words()
    stranger.sock.close()


def test_an_overheard_hello_and_proof_open_nothing(victim: Victim) -> None:
    """The secret never travels here, and a challenge is never the same."""
    first = Stranger(victim[0].endpoint())
    hello = pack_hello(os.urandom(NONCE_NBYTES), 1, 0, "x")
    first.sock.sendall(hello)
    assert first.frame().kind is Kind.CHALLENGE
    proof = prove(Prover.INITIATOR, mixed(first.there.secret, None), hello, first.exactly(NONCE_NBYTES))
    told = pack(Frame(Kind.PROOF, True, 0, 0, PROOF_NBYTES)) + proof
    first.sock.sendall(told)
    assert first.frame().kind is Kind.WELCOME
    assert first.there.secret not in hello + told
    again = Stranger(victim[0].endpoint())
    again.sock.sendall(hello + told)
    assert again.frame().kind is Kind.CHALLENGE
    again.exactly(NONCE_NBYTES)
    assert "wrong proof" in again.last_words()
    for stranger in (first, again):
        stranger.sock.close()


@pytest.mark.parametrize(("ours", "theirs"), [(b"k" * 32, b"q" * 32), (b"k" * 32, None), (None, b"k" * 32)])
def test_peers_that_disagree_about_the_clusters_key_are_lost_to_each_other_and_told_why(
    ours: bytes | None, theirs: bytes | None, caplog: pytest.LogCaptureFixture
) -> None:
    a, b = TcpTransport(me="a", key=ours, limits=QUICK), TcpTransport(me="b", key=theirs, limits=QUICK)
    try:
        a.allocate(NBYTES)[:] = b"\x66" * NBYTES
        view = b.allocate(NBYTES)
        a.connect("b", b.endpoint())
        *failed, lost = lost_after_write(a, "b", Span(0, 0, NBYTES))
        assert not any(end.may_land for end in failed if isinstance(end, JobFailed))
        assert isinstance(lost, PeerLost) and "another cluster key" in lost.reason
        assert view == bytes(NBYTES)
        assert re.search(r"refused a transfer connection of a at \S+ \(1 so far\): wrong proof: ", caplog.text)
    finally:
        a.close()
        b.close()


def test_peers_with_one_key_write_to_each_other() -> None:
    a, b = TcpTransport(me="a", key=b"k" * 32), TcpTransport(me="b", key=b"k" * 32)
    try:
        a.allocate(NBYTES)[:] = b"\x66" * NBYTES
        view = b.allocate(NBYTES)
        a.connect("b", b.endpoint())
        a.write("b", [Span(0, 0, NBYTES)], job=1)
        assert done_jobs(wait_jobs(a, 1)) == [1]
        assert view == b"\x66" * NBYTES
    finally:
        a.close()
        b.close()


def test_an_acceptor_that_cannot_prove_itself_gets_nothing(net: Net) -> None:
    """Who sits at a peer's address without its secret is not written to."""
    a, _ = net.make("a", NBYTES, QUICK)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        a.connect("b", msgspec.msgpack.encode(TcpEndpoint("b", "127.0.0.1", port, os.urandom(16), NBYTES)))
        a.write("b", [Span(0, 0, NBYTES)], job=1)
        impostor, _ = listener.accept()
        with impostor:
            impostor.recv(1 << 16)
            impostor.sendall(pack(Frame(Kind.CHALLENGE, True, 0, 0, NONCE_NBYTES)) + bytes(NONCE_NBYTES))
            impostor.recv(1 << 16)
            impostor.sendall(pack(Frame(Kind.WELCOME, True, 0, 0, NBYTES)) + bytes(PROOF_NBYTES))
            lost = wait_lost(a)[-1]
            assert isinstance(lost, PeerLost) and "does not prove" in lost.reason


def test_what_an_acceptor_refuses_with_writes_no_line_of_its_own_into_a_log(net: Net) -> None:
    a, _ = net.make("a", NBYTES, QUICK)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        a.connect("b", msgspec.msgpack.encode(TcpEndpoint("b", "127.0.0.1", port, os.urandom(16), NBYTES)))
        impostor, _ = listener.accept()
        with impostor:
            impostor.recv(1 << 16)
            impostor.sendall(pack_refusal("no\r\n\x1b[2Jerror: ü"))
            assert wait_lost(a) == [PeerLost("b", "b refused: no???[2Jerror: ü")]


@pytest.mark.parametrize("seed", range(10))
def test_random_bytes_from_a_stranger_harm_nobody(victim: Victim, seed: int) -> None:
    rng = random.Random(seed)
    stranger = Stranger(victim[0].endpoint())
    try:
        if rng.random() < 0.5:
            assert stranger.hello().kind is Kind.WELCOME
        for _ in range(20):
            stranger.sock.sendall(rng.randbytes(rng.randint(1, 5000)))
    except (ConnectionResetError, BrokenPipeError):
        pass  # it was thrown out
    stranger.sock.close()


def test_a_silent_stranger_is_shown_out_in_time(victim: Victim) -> None:
    stranger = Stranger(victim[0].endpoint())
    stranger.sock.sendall(b"pd")
    assert stranger.sock.recv(1) == b""
    stranger.sock.close()


@pytest.mark.parametrize(
    ("frame", "told"),
    [
        (pack(Frame(Kind.WRITE, True, 1, 1, 8), [Entry(NBYTES - 7, 8)]), "WRITE of 8 bytes at 4089 leaves the region"),
        (pack(Frame(Kind.WRITE, True, 1, 1, 8), [Entry((1 << 64) - 8, 8)]), "leaves the region of 4096 bytes"),
        (pack(Frame(Kind.READ, True, 1, 1, 9000), [Entry(0, 9000)]), "READ of 9000 bytes at 0 leaves the region"),
        (pack(Frame(Kind.WRITE, True, 2, 1, 9), [Entry(100, 8), Entry(200, 2)]), "says 9 bytes, its entries do not"),
        (pack(Frame(Kind.WRITE, True, 1, 1, 0), [Entry(100, 0)]), "WRITE of 0 bytes"),
        (pack(Frame(Kind.WRITE, True, MAX_ENTRIES + 1, 1, 1)), "WRITE frame with 4097 entries"),
        (pack(Frame(Kind.ACK, True, 0, 1, 0)), "an initiator does not send ACK"),
        (pack(Frame(Kind.DATA, True, 0, 1, 10)), "an initiator does not send DATA"),
        (struct.pack("!BBHIQQ", 77, 1, 0, 0, 0, 0), "unknown frame kind 77"),
    ],
)
def test_nonsense_from_one_who_has_the_secret_touches_nothing_and_ends_it(
    victim: Victim, frame: bytes, told: str
) -> None:
    stranger = Stranger(victim[0].endpoint())
    assert stranger.hello() == Frame(Kind.WELCOME, True, 0, 0, NBYTES)
    stranger.sock.sendall(frame + b"\x66" * 64)
    assert told in stranger.last_words()
    stranger.sock.close()


def test_what_is_refused_is_counted_and_told_once_a_second(victim: Victim, caplog: pytest.LogCaptureFixture) -> None:
    for name in ("first\nerror:", "second", "third"):
        stranger = Stranger(victim[0].endpoint())
        stranger.hello(name)
        stranger.sock.sendall(pack(Frame(Kind.ACK, True, 0, 1, 0)))
        assert "an initiator does not send ACK" in stranger.last_words()
        stranger.sock.close()
    loop = victim[0]._loop
    assert loop is not None
    for who, now in (("fourth", 1e12), ("fifth", 1e12 + 0.9), ("sixth", 1e12 + 1.1)):
        loop.refused(who, "so", now)
    told = [record.getMessage() for record in caplog.records if "refused" in record.getMessage()]
    assert re.fullmatch(
        r"refused a transfer connection of first\\nerror: at \S+ \(1 so far\): an initiator .*", told[0]
    )
    assert told[-2:] == [f"refused a transfer connection of {who} so far): so" for who in ("fourth (4", "sixth (6")]


def test_who_was_severed_and_comes_again_and_again_is_told_why_and_no_news_to_others(
    victim: Victim, caplog: pytest.LogCaptureFixture
) -> None:
    victim[0].sever("gone")
    for _ in range(3):
        stranger = Stranger(victim[0].endpoint())
        assert stranger.hello("gone").kind is Kind.REFUSED
        stranger.sock.close()
    assert [record for record in caplog.records if "refused" in record.getMessage()] == []


def test_a_connection_cut_in_the_middle_of_a_payload_harms_nobody(net: Net) -> None:
    victim, view = net.make("victim", NBYTES)
    stranger = Stranger(victim.endpoint())
    stranger.hello()
    stranger.sock.sendall(pack(Frame(Kind.WRITE, True, 1, 1, 100), [Entry(0, 100)]) + b"\x66" * 30)
    stranger.sock.close()
    again = Stranger(victim.endpoint())
    assert again.hello("other").kind is Kind.WELCOME
    again.sock.sendall(pack(Frame(Kind.WRITE, True, 1, 5, 10), [Entry(200, 10)]) + b"\x77" * 10)
    assert again.frame() == Frame(Kind.ACK, True, 0, 5, 0)
    assert view[200:210] == b"\x77" * 10 and view[30:200] == bytes(170)
    again.sock.close()


def test_acceptance_is_bounded(net: Net) -> None:
    victim, _ = net.make("victim", NBYTES, TcpLimits(max_inbound=3))
    inside = [Stranger(victim.endpoint()) for _ in range(3)]
    assert all(stranger.hello(f"s{i}").kind is Kind.WELCOME for i, stranger in enumerate(inside))
    outside = Stranger(victim.endpoint())
    assert outside.sock.recv(1) == b""
    inside[0].sock.close()
    inside[1].sock.sendall(pack(Frame(Kind.WRITE, True, 0, 9, 0)))
    assert inside[1].frame().kind is Kind.ACK
    assert Stranger(victim.endpoint()).hello("late").kind is Kind.WELCOME


# ---- generations -----------------------------------------------------------------------------------------------


def test_a_newer_generation_ends_the_older_before_it_is_welcome(net: Net) -> None:
    victim, view = net.make("victim", NBYTES)
    old, other = Stranger(victim.endpoint()), Stranger(victim.endpoint())
    assert old.hello("x", generation=5).kind is Kind.WELCOME
    assert other.hello("y", generation=1).kind is Kind.WELCOME
    old.sock.sendall(pack(Frame(Kind.WRITE, True, 1, 1, 100), [Entry(0, 100)]))
    new = Stranger(victim.endpoint())
    assert new.hello("x", generation=6).kind is Kind.WELCOME
    late = Stranger(victim.endpoint())
    late.prove(late.there.secret, "x", generation=5)
    assert "generation 5 of x is past, 6 is here" in late.last_words()
    try:
        old.sock.sendall(b"\x66" * 100)
        assert old.sock.recv(1) == b""
    except (ConnectionResetError, BrokenPipeError):
        pass  # as good an end
    other.sock.sendall(pack(Frame(Kind.WRITE, True, 1, 2, 4), [Entry(50, 4)]) + b"\x01" * 4)
    assert other.frame().kind is Kind.ACK
    assert view == bytes(50) + b"\x01" * 4 + bytes(NBYTES - 54)
    for stranger in (old, other, new, late):
        stranger.sock.close()


def break_connections(transport: Transport, name: str) -> None:
    """As a network does."""
    on_its_thread(transport, lambda loop: loop.cut({name}))


def on_its_thread(transport: Transport, order: Callable[[TcpLoop], None]) -> None:
    """After everything that was ordered before; waits for it."""
    loop = cast(TcpTransport, transport)._loop
    assert loop is not None
    done = threading.Event()

    def carry_out(now: float) -> None:
        order(loop)
        done.set()

    loop.do(carry_out)
    assert done.wait(5)


def test_one_transient_error_fails_its_jobs_cleanly_and_the_peer_stays(net: Net) -> None:
    nbytes = 64 * MIB
    a, view_a = net.make("a", nbytes)
    b, view_b = net.make("b", nbytes)
    view_a[:] = b"\x01" * nbytes
    a.connect("b", b.endpoint())
    a.write("b", [Span(0, 0, 1)], job=0)
    wait_jobs(a, 1)
    for job in range(1, 5):
        a.write("b", [Span(0, 0, nbytes)], job=job)
    on_its_thread(a, lambda loop: None)  # so that all of them are on their way
    break_connections(b, "a")
    ended = wait_jobs(a, 4)
    assert [end.job for end in ended if not isinstance(end, PeerLost)] == [1, 2, 3, 4]
    assert isinstance(ended[-1], JobFailed)
    view_b[:] = bytes(nbytes)  # what was broken off has ended: nothing of it lands now
    a.write("b", [Span(0, 7, 9)], job=5)
    assert done_jobs(wait_jobs(a, 1)) == [5]
    assert view_b[:7] == bytes(7) and view_b[7:16] == b"\x01" * 9 and view_b[16:] == bytes(nbytes - 16)


def test_an_idle_connection_that_breaks_comes_back_unseen(net: Net) -> None:
    a, _, b, _ = net.pair(64)
    a.write("b", [Span(0, 0, 1)], job=0)
    wait_jobs(a, 1)
    break_connections(b, "a")
    a.write("b", [Span(0, 0, 1)], job=1)
    (end,) = wait_jobs(a, 1)
    if isinstance(end, JobFailed):  # it was given before the break was noticed
        a.write("b", [Span(0, 0, 1)], job=2)
        (end,) = wait_jobs(a, 1)
    assert isinstance(end, JobDone)


def test_a_connection_that_keeps_breaking_is_given_up(net: Net) -> None:
    a, _, b, _ = net.pair(64 * MIB)
    ended: list[Completion] = []
    deadline = time.monotonic() + 10
    while not (ended and isinstance(ended[-1], PeerLost)):
        assert time.monotonic() < deadline, ended
        with contextlib.suppress(TransferError):  # it is lost, and the next poll says so
            a.write("b", [Span(0, 0, 64 * MIB)], job=len(ended))
            on_its_thread(a, lambda loop: None)
        break_connections(b, "a")
        ended += a.poll()


@pytest.mark.parametrize("turns", range(40))
def test_who_is_severed_while_it_connects_is_told_why(net: Net, turns: int) -> None:
    a, _ = net.make("a", 64, TcpLimits(num_lanes=3))
    b, _ = net.make("b", 64)
    a.connect("b", b.endpoint())
    for _ in range(turns):
        on_its_thread(b, lambda loop: None)
    assert b.sever("a")
    assert wait_lost(a) == [PeerLost("b", "b refused: a was severed here")]


# ---- those who do not answer -----------------------------------------------------------------------------------


@pytest.fixture
def silent() -> Iterator[bytes]:
    """The endpoint of a listener that accepts in the kernel and never says a word."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield msgspec.msgpack.encode(TcpEndpoint("silent", "127.0.0.1", server.getsockname()[1], bytes(16), 64))


def test_a_peer_that_never_answers_is_lost_in_time_and_nobody_else_waits(net: Net, silent: bytes) -> None:
    a, _ = net.make("a", 64, QUICK)
    b, _ = net.make("b", 64)
    a.connect("silent", silent)
    a.connect("b", b.endpoint())
    a.write("silent", [Span(0, 0, 64)], job=1)
    a.write("b", [Span(0, 0, 64)], job=2)
    ended = wait_lost(a, timeout_s=3)
    assert isinstance(ended[0], JobDone) and ended[0].job == 2, "b did not wait for the silent one"
    assert ended[1:] == [
        JobFailed(1, "silent", "silent did not answer in 0.3 s"),
        PeerLost("silent", "silent did not answer in 0.3 s"),
    ]


def test_a_peer_where_nobody_listens_is_lost_at_once(net: Net) -> None:
    a, _ = net.make("a", 64)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    a.connect("gone", msgspec.msgpack.encode(TcpEndpoint("gone", "127.0.0.1", port, bytes(16), 64)))
    ended = lost_after_write(a, "gone", Span(0, 0, 64), timeout_s=2)
    assert "Connection refused" in ended[-1].reason  # type: ignore[union-attr]


@pytest.mark.parametrize("host", ["fe80::1%eth0", "fe80::1%a\0b", "fe80::1%é"])
def test_an_address_with_a_zone_is_refused_as_it_means_nothing_elsewhere(net: Net, host: str) -> None:
    a, _ = net.make("a", 64)
    with pytest.raises(TransferError, match=r"b sent no tcp endpoint: .* is no address beyond its host"):
        a.connect("b", msgspec.msgpack.encode(TcpEndpoint("b", host, 7, bytes(16), 64)))


def test_an_endpoint_that_lies_about_the_region_is_found_out(net: Net) -> None:
    a, _ = net.make("a", 256)
    b, view_b = net.make("b", 64)
    honest = msgspec.msgpack.decode(b.endpoint(), type=TcpEndpoint)
    a.connect("b", msgspec.msgpack.encode(msgspec.structs.replace(honest, nbytes=256)))
    ended = lost_after_write(a, "b", Span(0, 0, 256))
    assert "its region is of 64 bytes, said were 256" in ended[-1].reason  # type: ignore[union-attr]
    assert view_b == bytes(64)


def test_the_queue_to_one_peer_is_bounded(net: Net, silent: bytes) -> None:
    a, _ = net.make("a", 64, TcpLimits(max_jobs=5))
    a.connect("silent", silent)
    for job in range(5):
        a.write("silent", [], job=job)
    with pytest.raises(TransferError, match="5 jobs wait for it already"):
        a.write("silent", [], job=5)


def test_lost_peers_leave_no_socket(net: Net, silent: bytes) -> None:
    a, _ = net.make("a", 64, TcpLimits(connect_s=0.05))
    before = len(open_fds())
    for i in range(10):
        a.connect(f"s{i}", silent)
    wait_for(a, lambda ended: sum(isinstance(end, PeerLost) for end in ended) == 10)
    assert len(open_fds()) == before


def test_a_peer_severed_in_another_process_writes_no_more(net: Net) -> None:
    a, view = net.make("a", 64)
    child = Child("tcp", "b", 64)
    try:
        child.ask("fill", 7)
        child.ask("connect", "a", a.endpoint().hex())
        assert child.ask("write", "a", 0, 0, 8) == ["JobDone"]
        assert a.sever("b")
        answer = child.ask("write", "a", 0, 0, 64)
        assert isinstance(answer, list) and answer[-1] in ("JobFailed", "PeerLost", "TransferError")
        assert view == b"\x07" * 8 + bytes(56)
    finally:
        child.close()


# ---- where to listen -------------------------------------------------------------------------------------------


def test_an_interface_is_honoured_and_several_or_none_are_refused() -> None:
    named = TcpTransport(me="a", host="192.0.2.1", devices=("lo",))
    named.allocate(64)
    assert msgspec.msgpack.decode(named.endpoint(), type=TcpEndpoint).host == "127.0.0.1"
    named.close()
    with pytest.raises(TransferError, match="network interface nosuch0 has no IPv4 address"):
        TcpTransport(me="a", devices=("nosuch0",))
    with pytest.raises(TransferError, match="tcp listens on one network interface, not on lo, eth9"):
        TcpTransport(me="a", devices=("lo", "eth9"))


@pytest.mark.parametrize("host", ["0.0.0.0", "::"])
def test_an_address_that_no_peer_can_use_is_refused(host: str) -> None:
    with pytest.raises(TransferError, match=f"peers cannot reach {host}"):
        TcpTransport(me="a", host=host)


def test_an_address_that_is_not_ours_is_refused() -> None:
    transport = TcpTransport(me="a", host="192.0.2.1")
    with pytest.raises(TransferError, match=r"cannot listen on 192\.0\.2\.1"):
        transport.allocate(64)
    transport.close()


# ---- frames ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(20))
def test_frames_survive_the_way_and_noise_raises_only_frame_errors(seed: int) -> None:
    rng = random.Random(seed)
    entries = [Entry(rng.randrange(1000), rng.randint(1, 24)) for _ in range(rng.randint(0, 9))]
    frame = Frame(
        Kind.WRITE, rng.random() < 0.5, len(entries), rng.randrange(1 << 64), sum(size for _, size in entries)
    )
    packed = pack(frame, entries)
    assert unpack(packed[:HEADER_NBYTES]) == frame, f"seed {seed}"
    assert unpack_entries(frame, packed[HEADER_NBYTES:], 1024) == entries, f"seed {seed}"
    for _ in range(200):
        with contextlib.suppress(FrameError):
            unpack(rng.randbytes(HEADER_NBYTES))
        with pytest.raises(FrameError):
            unpack_hello(rng.randbytes(len(pack_hello(bytes(16), 1, 0, ""))))
