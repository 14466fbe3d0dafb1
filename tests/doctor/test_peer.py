"""Two hosts, on loopback: what the service answers, what it refuses, and what the visitor makes of it."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator

import msgspec
import pytest

from pd.doctor.answers import Visit
from pd.doctor.check import examine_all
from pd.doctor.checks.peer import peer_checks
from pd.doctor.facts import Matters, differences, gather
from pd.doctor.local import ThisMachine
from pd.doctor.measure.frames import LARGEST, Frames, PeerError
from pd.doctor.measure.initiator import measure
from pd.doctor.peer import serve
from pd.doctor.peer.protocol import (
    Called,
    Hello,
    Lend,
    Lent,
    Listen,
    Open,
    Opened,
    Probe,
    Refused,
    Stamp,
    Stamped,
    Welcome,
)
from pd.doctor.peer.serve import Service, try_port
from pd.doctor.peer.visit import Host, borrow_target, parse
from pd.doctor.recorded import Recorded, Recording
from pd.doctor.result import Status

FACTS = {"pd": "0.1.0", "nixl": "1.5.1"}


@pytest.fixture
def service() -> Iterator[str]:
    service = Service("127.0.0.1", 0, FACTS)
    thread = threading.Thread(target=service.serve, daemon=True)
    thread.start()
    yield "{}:{}".format(*service.address)
    service.close()
    thread.join(timeout=5)
    assert not thread.is_alive()


def test_a_visitor_is_welcomed_with_facts(service: str) -> None:
    host = Host(service)
    assert host.greet() == Welcome(1, FACTS, 65536)
    assert host.ask(Stamp(), Stamped).wall_s > 1e9
    host.close()


def test_another_version_is_refused_with_both(service: str) -> None:
    host = Host(service)
    with pytest.raises(PeerError, match="version 1, yours 2"):
        host.ask(Hello(2), Welcome)
    host.close()


def test_a_fresh_port_is_reached_and_takes_one_connection(service: str) -> None:
    host = Host(service)
    port = host.ask(Open(), Opened).port
    assert try_port("127.0.0.1", port) == ""
    host.close()


def test_a_port_where_nobody_listens_says_so(service: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    assert try_port("127.0.0.1", port) == "Connection refused"


def test_a_lent_target_is_measured(service: str) -> None:
    frames = borrow_target(service, "tcp", nbytes=1 << 20)
    timings = measure("tcp", frames, host="127.0.0.1", sizes=(65536, 1 << 20))
    frames.close()
    assert [t.nbytes for t in timings] == [65536, 1 << 20]


def test_an_unknown_backend_is_not_lent(service: str) -> None:
    with pytest.raises(PeerError, match="no backend"):
        borrow_target(service, "os.system", nbytes=1)


@pytest.mark.parametrize(
    "question",
    [
        Lend("tcp", (256 << 20) + 1),
        Lend("x" * 65, 1),
        Probe(22, (1500,)),
        Probe(5000, (70000,)),
        Probe(5000, (1500,) * 17),
    ],
)
def test_questions_out_of_bounds_end_the_visit(service: str, question: msgspec.Struct) -> None:
    host = Host(service)
    host.frames.send(question)
    with pytest.raises(PeerError, match="closed"):
        host.frames.receive()
    host.close()
    again = Host(service)  # and the service lives on
    assert again.greet().facts == FACTS
    again.close()


@pytest.mark.parametrize("sent", [b"GET / HTTP/1.1\r\n\r\n", (LARGEST + 1).to_bytes(4, "big"), b"\0\0\0\2\xc1\xc1"])
def test_nonsense_ends_the_visit_alone(service: str, sent: bytes) -> None:
    with socket.create_connection(parse(service)) as sock:
        sock.sendall(sent)
        sock.settimeout(5)
        with contextlib.suppress(ConnectionResetError):  # what it did not read is thrown away so
            assert sock.recv(1) == b""
    host = Host(service)
    assert host.greet().version == 1
    host.close()


def test_more_visits_than_slots_are_told(service: str, monkeypatch: pytest.MonkeyPatch) -> None:
    hosts = [Host(service) for _ in range(serve.MAX_VISITS)]
    for host in hosts:
        host.greet()
    late = Host(service)
    assert isinstance(late.frames.receive(), Refused)
    for host in (*hosts, late):
        host.close()


def test_datagrams_go_nowhere_but_to_the_visitor(service: str) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        sock.bind(("127.0.0.1", 0))
        sock.settimeout(5)
        host = Host(service)
        assert host.ask(Listen(), Opened).port > 0
        assert host.ask(Probe(sock.getsockname()[1], (1500,)), Called).error == ""
        assert len(sock.recv(65536)) == 1500 - 28
        host.close()


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        ("h", ("h", 8590)),
        ("h:1", ("h", 1)),
        ("10.0.0.1:9", ("10.0.0.1", 9)),
        ("[::1]:5", ("::1", 5)),
        ("fe80::1", ("fe80::1", 8590)),
    ],
)
def test_addresses_are_read(address: str, expected: tuple[str, int]) -> None:
    assert parse(address) == expected


@pytest.mark.parametrize("address", ["", ":1", "h:0", "h:65536", "h:x", "a:b:c", "[::1", "h h"])
def test_addresses_that_are_none_are_refused(address: str) -> None:
    with pytest.raises(ValueError, match="--peer"):
        parse(address)


def test_a_visit_to_loopback_is_whole(service: str) -> None:
    machine = ThisMachine()
    visit = machine.ask(Visit, service)
    assert isinstance(visit, Visit)
    assert (visit.error, visit.out, visit.back, visit.there) == ("", "", "", FACTS)
    assert (visit.interface, visit.mtu_here, visit.whole_out, visit.whole_back) == ("lo", 65536, 65535, 65535)
    assert 0 < visit.latency_s < 1 and abs(visit.skew_s) < 1


def visited(peer: str = "H", **values: object) -> Recorded:
    facts = gather(Recorded(Recording(about="", sources=())))
    base = {"error": "", "here": facts, "there": facts, "latency_s": 1e-4, "mtu_here": 1500, "mtu_there": 1500}
    raw = msgspec.json.encode({**base, "whole_out": 1500, "whole_back": 1500, **values})
    slow = b'{"backend": "tcp", "timings": [{"nbytes": 65536, "seconds": 1e-3}], "error": ""}'
    answers = {f"visit {peer}": msgspec.Raw(raw), f"loopback tcp {peer}": msgspec.Raw(slow)}
    return Recorded(Recording(about="", sources=(), answers=answers))


@pytest.mark.parametrize(
    ("values", "check", "status", "words"),
    [
        ({}, "versions", Status.PASS, "equal"),
        ({"error": "H: Connection refused"}, "reach", Status.FAIL, "Connection refused"),
        ({"error": "H: Connection refused"}, "mtu", Status.SKIP, "Connection refused"),
        ({"out": "no answer in 3 s: a firewall drops it"}, "ports", Status.FAIL, "from here to there"),
        ({"back": "Connection refused"}, "ports", Status.FAIL, "from there to here"),
        ({"skew_s": -7.5}, "clock", Status.WARN, "7.5 s behind"),
        ({"latency_s": 0.02}, "latency", Status.WARN, "20 ms"),
        ({"mtu_there": 9000}, "mtu", Status.FAIL, "1500 here, 9000 there"),
        ({"whole_back": 1450}, "mtu", Status.FAIL, "passes 1450"),
        ({"whole_out": 0, "whole_back": 0}, "mtu", Status.SKIP, "UDP is blocked"),
        ({}, "auto", Status.PASS, "tcp"),
    ],
)
def test_a_visit_is_judged(values: dict[str, object], check: str, status: Status, words: str) -> None:
    found = {e.check.id: e.result for e in examine_all(peer_checks("H"), visited(**values))}
    result = found[f"peer.{check}"]
    assert result.status is status and words in result.read, result


@pytest.mark.parametrize(
    ("peer", "served", "opened"),
    [("H", "<its address>; then", "allow 8590/tcp"), ("H:7001", "<its address> --port 7001; then", "allow 7001/tcp")],
)
def test_who_is_not_reached_is_to_serve_and_open_the_port_that_was_asked(peer: str, served: str, opened: str) -> None:
    machine = visited(peer, error=f"{peer}: Connection refused")
    (found,) = [e.result for e in examine_all(peer_checks(peer), machine) if e.check.id == "peer.reach"]
    assert served in found.fix and opened in found.fix, found.fix


def test_only_differences_that_matter_fail() -> None:
    here = {"nixl": "1.5.1", "kernel": "6.8", "torch": "2.9", "wire version": "1", "pd": "0.1.0"}
    there = {"nixl": "1.4.0", "kernel": "5.15", "torch": "2.8", "wire version": "1", "pd": "0.1.0"}
    assert {d.name: d.matters for d in differences(here, there)} == {
        "nixl": Matters.YES,
        "kernel": Matters.NO,
        "torch": Matters.MAYBE,
    }
    assert [d.matters for d in differences({"nixl": "1.5.1"}, {"nixl": "-"})] == [Matters.NO]


def test_a_visit_that_is_refused_is_one_error(service: str) -> None:
    frames: Frames[Lent] = Frames(socket.create_connection(parse(service)), Lent)
    frames.send(Lend("shm", 4096))
    assert frames.receive() == Lent()
    frames.close()
