"""Links carry messages both ways, name their senders, and drop nonsense."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from pd.runtime.core.events import Peer, Received
from pd.runtime.wire import link
from pd.runtime.wire.codec import encode
from pd.runtime.wire.link import Hub, LinkError, Spoke
from pd.runtime.wire.messages import Cancel, Welcome, WhoAreYou
from pd.runtime.wire.values import Handle

ROUTER = Peer("router", "")
WORKER = Peer("prefill-0", "e1")
CANCEL = Cancel(Handle("r", 0), "why")


@pytest.fixture
def context() -> Iterator[zmq.Context[zmq.Socket[bytes]]]:
    with zmq.Context[zmq.Socket[bytes]]() as context:
        yield context


def hear(end: Hub | Spoke) -> Received:
    assert end.socket.poll(5000), "nothing came in 5 s"
    received = end.receive()
    assert received is not None
    return received


def test_a_spoke_is_known_by_name_and_epoch_and_answered(context: zmq.Context[zmq.Socket[bytes]]) -> None:
    hub = Hub(context, "tcp://127.0.0.1:*")
    spoke = Spoke(context, hub.address, me=WORKER, hub=ROUTER, queue=True)
    spoke.send(CANCEL)
    assert hear(hub) == Received(WORKER, CANCEL)
    hub.send(Welcome(), WORKER)
    assert hear(spoke) == Received(ROUTER, Welcome())
    hub.close()
    spoke.close()


def test_a_message_to_nobody_is_counted_and_harms_no_one(context: zmq.Context[zmq.Socket[bytes]]) -> None:
    hub = Hub(context, "tcp://127.0.0.1:*")
    spoke = Spoke(context, hub.address, me=WORKER, hub=ROUTER, queue=True)
    spoke.send(CANCEL)
    hear(hub)
    assert hub.send(WhoAreYou(), Peer("nobody", "e9"), WORKER) == [Peer("nobody", "e9")]
    assert hear(spoke).message == WhoAreYou()
    assert hub.num_dropped == 1
    hub.close()
    spoke.close()


ECHO = """
import sys, zmq
from pd.runtime.core.events import Peer
from pd.runtime.wire.link import Spoke
from pd.runtime.wire.messages import WhoAreYou
spoke = Spoke(zmq.Context(), sys.argv[1], me=Peer("0", ""), hub=Peer("leader", ""), queue=True)
spoke.send(WhoAreYou())
while spoke.socket.poll(20_000):
    while (received := spoke.receive()) is not None:
        spoke.send(received.message)
"""


def test_a_rank_that_is_stopped_for_a_while_misses_nothing(
    context: zmq.Context[zmq.Socket[bytes]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A plan that is lost on the way would leave its siblings waiting in the midst of a step."""
    monkeypatch.setattr(link, "HEARTBEAT_MS", 30)
    monkeypatch.setattr(link, "SWALLOWED_MS", 90)
    hub, rank = Hub(context, f"ipc://{tmp_path}/leader"), Peer("0", "")
    child = subprocess.Popen([sys.executable, "-c", ECHO, hub.address])
    try:
        assert hub.socket.poll(20_000), "the rank does not come"
        assert hub.receive() == Received(rank, WhoAreYou())
        os.kill(child.pid, signal.SIGSTOP)
        os.waitpid(child.pid, os.WUNTRACED)
        told = [Cancel(Handle("r", number), "why") for number in range(4)]
        assert hub.send(told[0], rank) == []
        time.sleep(0.5)
        for message in told[1:]:
            assert hub.send(message, rank) == []
        os.kill(child.pid, signal.SIGCONT)
        assert [hear(hub).message for _ in told] == told
    finally:
        child.kill()
        child.wait()
        hub.close()


def test_who_hangs_up_is_known_by_the_next_message_to_it(context: zmq.Context[zmq.Socket[bytes]]) -> None:
    hub = Hub(context, "tcp://127.0.0.1:*")
    spoke = Spoke(context, hub.address, me=WORKER, hub=ROUTER, queue=True)
    spoke.send(CANCEL)
    hear(hub)
    assert hub.refused() is None and not hub.has_lost() and hub.send(Welcome(), WORKER) == []
    spoke.close()
    deadline = time.monotonic() + 5.0
    while not hub.has_lost():
        assert time.monotonic() < deadline and hub.refused() is None
        time.sleep(0.01)
    assert not hub.has_lost(), "once"
    while hub.send(Welcome(), WORKER) != [WORKER]:
        assert time.monotonic() < deadline
    hub.close()


def test_a_restarted_worker_is_another_sender(context: zmq.Context[zmq.Socket[bytes]]) -> None:
    hub = Hub(context, "tcp://127.0.0.1:*")
    first = Spoke(context, hub.address, me=WORKER, hub=ROUTER, queue=True)
    first.send(CANCEL)
    assert hear(hub).sender == WORKER
    first.close()
    second = Spoke(context, hub.address, me=Peer("prefill-0", "e2"), hub=ROUTER, queue=True)
    second.send(CANCEL)
    assert hear(hub).sender == Peer("prefill-0", "e2")
    second.close()
    hub.close()


def test_frames_that_are_no_message_are_dropped_and_the_next_is_heard(context: zmq.Context[zmq.Socket[bytes]]) -> None:
    hub = Hub(context, "tcp://127.0.0.1:*")
    stranger = context.socket(zmq.DEALER)
    stranger.connect(hub.address)
    stranger.send(b"GET / HTTP/1.1")  # and no routing id of ours
    stranger.send_multipart([b"a", b"b", b"c"])
    stranger.close(linger=500)
    spoke = Spoke(context, hub.address, me=WORKER, hub=ROUTER, queue=True)
    spoke.socket.send(b"\xc1garbage")
    spoke.send(CANCEL)
    heard: list[Received] = []
    while not heard:
        assert hub.socket.poll(5000)
        if (received := hub.receive()) is not None:
            heard.append(received)
    assert heard == [Received(WORKER, CANCEL)]
    assert hub.num_dropped >= 1
    spoke.close()
    hub.close()


def test_a_message_of_many_frames_is_one_that_is_dropped_at_either_end(
    context: zmq.Context[zmq.Socket[bytes]],
) -> None:
    hub = Hub(context, "tcp://127.0.0.1:*")
    spoke = Spoke(context, hub.address, me=WORKER, hub=ROUTER, queue=True)
    good = encode(CANCEL)
    spoke.socket.send_multipart([good] * 5000)
    spoke.send(CANCEL)
    heard = None
    while heard is None:
        assert hub.socket.poll(5000)
        heard = hub.receive()
    assert heard == Received(WORKER, CANCEL) and hub.num_dropped == 1 and hub.receive() is None
    hub.socket.send_multipart([b"prefill-0\x1fe1", *[good] * 5000])
    hub.send(Welcome(), WORKER)
    heard = None
    while heard is None:
        assert spoke.socket.poll(5000)
        heard = spoke.receive()
    assert heard.message == Welcome() and spoke.num_dropped == 1 and spoke.receive() is None
    hub.close()
    spoke.close()


def test_without_a_queue_nothing_old_is_said_to_a_late_hub(context: zmq.Context[zmq.Socket[bytes]]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:  # a Hub would close its port a little later
        address = f"tcp://127.0.0.1:{probe.getsockname()[1]}"
    spoke = Spoke(context, address, me=WORKER, hub=ROUTER, queue=False)
    spoke.send(CANCEL)
    assert spoke.num_dropped == 1
    spoke.close()


def test_an_address_in_use_is_a_link_error_that_names_it(context: zmq.Context[zmq.Socket[bytes]]) -> None:
    hub = Hub(context, "tcp://127.0.0.1:*")
    with pytest.raises(LinkError, match=f"^cannot bind {hub.address}: Address already in use$"):
        Hub(context, hub.address)
    hub.close()


def test_descriptors_stay_flat_over_hundreds_of_peers_that_come_and_go(
    context: zmq.Context[zmq.Socket[bytes]],
) -> None:
    hub = Hub(context, "tcp://127.0.0.1:*")

    def come_and_go(number: int) -> None:
        spoke = Spoke(context, hub.address, me=Peer(f"p{number}", "e"), hub=ROUTER, queue=True)
        spoke.send(CANCEL)
        assert hear(hub).sender.name == f"p{number}"
        spoke.close()

    for number in range(20):
        come_and_go(number)
    early = num_descriptors()
    for number in range(20, 300):
        come_and_go(number)
    deadline = time.monotonic() + 5
    while num_descriptors() > early + 10 and time.monotonic() < deadline:  # ZMQ's thread closes them a little later
        time.sleep(0.05)
    assert num_descriptors() <= early + 10
    hub.close()


def num_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_a_link_that_came_back_by_itself_is_left_alone(context: zmq.Context[zmq.Socket[bytes]]) -> None:
    """ZMQ tries again who hangs up in the handshake; trying anew as well would lose what is on the new connection."""
    with socket.create_server(("127.0.0.1", 0)) as rude:
        address = f"tcp://127.0.0.1:{rude.getsockname()[1]}"
        spoke = Spoke(context, address, me=WORKER, hub=ROUTER, queue=True)
        rude.accept()[0].close()
    spoke.send(CANCEL)
    hub = Hub(context, address)
    assert hear(hub) == Received(WORKER, CANCEL)
    assert spoke.refused() is not None  # of the first try; and the connection of the second stays
    for _ in range(20):
        hub.send(Welcome(), WORKER)
        assert hear(spoke).message == Welcome()
    assert hub.num_dropped == 0
    hub.close()
    spoke.close()
