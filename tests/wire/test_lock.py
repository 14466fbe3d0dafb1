"""With a cluster key only its holders meet, and both sides say why others do not."""

from __future__ import annotations

import itertools
import socket
import time
from collections.abc import Callable, Iterator

import pytest
import zmq

from pd.runtime.core.events import Peer, Received
from pd.runtime.wire.link import Hub, Spoke
from pd.runtime.wire.lock import Lock
from pd.runtime.wire.messages import Cancel, Welcome
from pd.runtime.wire.values import Handle

ROUTER = Peer("router", "")
CANCEL = Cancel(Handle("r", 0), "why")
ONE, OTHER = b"1" * 32, b"2" * 32
Context = zmq.Context[zmq.Socket[bytes]]


class Side:
    """A process's end: its own ZMQ context and lock."""

    def __init__(self, key: bytes | None) -> None:
        self.context = Context()
        self.lock = Lock(self.context, key).__enter__()
        self.links: list[Hub | Spoke] = []

    def hub(self) -> Hub:
        self.links.append(hub := Hub(self.context, "tcp://127.0.0.1:*", lock=self.lock))
        return hub

    def spoke(self, address: str, name: str = "prefill-0") -> Spoke:
        spoke = Spoke(self.context, address, me=Peer(name, "e1"), hub=ROUTER, queue=True, lock=self.lock)
        self.links.append(spoke)
        return spoke

    def close(self) -> None:
        for link in self.links:
            link.close()
        self.lock.__exit__(None, None, None)
        self.context.term()


@pytest.fixture
def side() -> Iterator[Callable[[bytes | None], Side]]:
    made: list[Side] = []

    def make(key: bytes | None) -> Side:
        made.append(Side(key))
        return made[-1]

    yield make
    for one in made:
        one.close()


def hear(link: Hub | Spoke) -> Received:
    assert link.socket.poll(5000), "nothing came in 5 s"
    received = link.receive()
    assert received is not None
    return received


def until_refused(*links: Hub | Spoke) -> list[str]:
    """What each says; asking a spoke makes it try again."""
    deadline = time.monotonic() + 5
    said: dict[Hub | Spoke, str] = {}
    while len(said) < len(links):
        assert time.monotonic() < deadline, f"within 5 s only {said}"
        for link in links:
            if (why := link.refused()) is not None:
                said[link] = why
        time.sleep(0.02)
    return [said[link] for link in links]


def test_holders_of_one_key_speak_both_ways(side: Callable[[bytes | None], Side]) -> None:
    hub = side(ONE).hub()
    spoke = side(ONE).spoke(hub.address)
    spoke.send(CANCEL)
    assert hear(hub) == Received(Peer("prefill-0", "e1"), CANCEL)
    hub.send(Welcome(), Peer("prefill-0", "e1"))
    assert hear(spoke).message == Welcome()
    assert hub.refused() is None and spoke.refused() is None
    assert spoke.socket.getsockopt(zmq.MECHANISM) == zmq.CURVE


SAID = {
    # (the hub's key, the spoke's): what each says of the other
    (ONE, OTHER): ("another cluster key", "another cluster key, or none"),
    (ONE, None): ("it has no cluster key, and we have one", "a cluster key"),
    (None, ONE): ("it has a cluster key, and we none", "another cluster key, or none"),
}


@pytest.mark.parametrize("keys", SAID, ids=["another", "hub-only", "spoke-only"])
def test_who_disagrees_is_not_heard_and_both_are_told_while_holders_are_served(
    side: Callable[[bytes | None], Side], keys: tuple[bytes | None, bytes | None]
) -> None:
    hub_key, spoke_key = keys
    hub = side(hub_key).hub()
    stranger = side(spoke_key).spoke(hub.address, "stranger")
    stranger.send(CANCEL)
    said = until_refused(hub, stranger)
    assert [expected in heard for expected, heard in zip(SAID[keys], said, strict=True)] == [True, True], said
    assert hub.num_refused > 0
    friend = side(hub_key).spoke(hub.address, "friend")
    for _ in range(3):
        friend.send(CANCEL)
        assert hear(hub).sender.name == "friend"


def test_the_servers_public_key_alone_opens_nothing(side: Callable[[bytes | None], Side]) -> None:
    """The doorkeeper asks for the key of the connected end too."""
    home = side(ONE)
    hub = home.hub()
    stranger = home.context.socket(zmq.DEALER)
    public, private = zmq.curve_keypair()
    home.lock.connect(stranger)
    stranger.curve_publickey, stranger.curve_secretkey = public, private
    stranger.connect(hub.address)
    stranger.send(b"hello")
    assert "another cluster key" in until_refused(hub)[0]
    assert not hub.socket.poll(100)
    stranger.close(0)


def test_what_speaks_no_zmq_is_told_apart_and_harms_nobody(side: Callable[[bytes | None], Side]) -> None:
    home = side(ONE)
    hub = home.hub()
    host, port = hub.address.removeprefix("tcp://").split(":")
    for words in (b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" * 4, b"\x00" * 200, b""):
        with socket.create_connection((host, int(port))) as stranger:
            stranger.sendall(words)
            stranger.settimeout(2)
            for _ in itertools.takewhile(bool, iter(lambda: _read(stranger), b"")):
                pass
    friend = home.spoke(hub.address, "friend")
    friend.send(CANCEL)
    assert hear(hub).sender.name == "friend"


def _read(stranger: socket.socket) -> bytes:
    try:
        return stranger.recv(1 << 16)
    except (TimeoutError, ConnectionResetError):
        return b""
