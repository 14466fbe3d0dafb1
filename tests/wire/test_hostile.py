"""Hostile frames at a live hub, well-formed nonsense at the brains: dropped or answered, and all others are served."""

from __future__ import annotations

import random

import msgspec
import pytest
import zmq

from pd.runtime.core.events import Peer, Received, Tick
from pd.runtime.wire.codec import encode
from pd.runtime.wire.link import Hub, Spoke
from pd.runtime.wire.messages import Cancel, Fenced, Reserve
from pd.runtime.wire.values import Handle, Role
from tests.core.brains import EPOCH, Instance, reserve_for
from tests.core.brains import hello as peer_hello
from tests.core.routing import hello, pair_bench, sent
from tests.wire.test_codec import KINDS, anything

CANCEL = Cancel(Handle("r", 0), "why")
ROUTER = Peer("router", "")


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_a_damaged_message_of_every_kind_leaves_the_hub_serving_others(kind: type) -> None:
    seed = 11
    dice = random.Random(f"{seed} {kind.__name__}")
    with zmq.Context[zmq.Socket[bytes]]() as context:
        hub = Hub(context, "tcp://127.0.0.1:*")
        stranger = Spoke(context, hub.address, me=Peer("stranger", "e"), hub=ROUTER, queue=True)
        friend = Spoke(context, hub.address, me=Peer("friend", "e"), hub=ROUTER, queue=True)
        num_sent = 0
        for _ in range(30):
            frame = bytearray(encode(anything(kind, dice)))
            for _ in range(dice.randint(0, 4)):
                frame[dice.randrange(len(frame))] = dice.randrange(256)
            parts = [bytes(frame[: dice.randint(0, len(frame))]) for _ in range(dice.choice([1, 1, 1, 2, 3]))]
            stranger.socket.send_multipart(parts)
            num_sent += 1
        friend.send(CANCEL)
        num_heard, was_served = 0, False
        while num_heard + hub.num_dropped < num_sent or not was_served:
            assert hub.socket.poll(5000), f"seed {seed}: {num_heard} heard, {hub.num_dropped} dropped of {num_sent}"
            received = hub.receive()
            if received is not None and received.sender.name == "friend":
                assert received.message == CANCEL
                was_served = True
            elif received is not None:
                assert isinstance(received.message, KINDS) and received.sender == Peer("stranger", "e")
                num_heard += 1
        assert hub.num_dropped > 0, f"seed {seed}"
        for link in (hub, stranger, friend):
            link.close()


@pytest.mark.parametrize("seed", range(10))
def test_well_formed_nonsense_from_anyone_leaves_the_router_serving(seed: int) -> None:
    """Of every kind there is, from members, from their old lives, and from strangers; about open requests too."""
    dice = random.Random(seed)
    bench = pair_bench()
    bench.submit("open", max_tokens=200)
    senders = [Peer("d0", "1"), Peer("p0", "1"), Peer("d0", "0"), Peer("nobody", "e"), Peer("router", ""), Peer("", "")]
    for _ in range(300):
        message = anything(dice.choice(KINDS), dice)
        if dice.random() < 0.5 and hasattr(message, "handle"):
            message = _about_the_open_request(message, dice)
        bench.on(Received(dice.choice(senders), message))
        if dice.random() < 0.1:
            bench.now += dice.random() / 4
            bench.on(Tick())
    bench.join(hello("p9", Role.PREFILL), hello("d9", Role.DECODE))
    bench.wait(0.2, beating=["p9", "d9"])
    if not bench.brain.missing():
        effects = bench.submit("after")
        assert sent(effects, Reserve) or sent(bench.wait(3.0, beating=["p9", "d9"]), Reserve), f"seed {seed}"


@pytest.mark.parametrize("role", [Role.PREFILL, Role.DECODE, Role.COLOCATED])
@pytest.mark.parametrize("seed", range(5))
def test_well_formed_nonsense_from_a_peer_leaves_an_instance_whole(role: Role, seed: int) -> None:
    """Its pages are conserved (checked after every event), and it drains as if nothing had been said."""
    dice = random.Random(seed)
    me = Instance(role)
    life = Peer("p", EPOCH)
    if role is not Role.COLOCATED:
        me.meet(peer_hello("p", Role.DECODE if role is Role.PREFILL else Role.PREFILL))
    request = reserve_for("open", 4, life=life, max_tokens=4)
    if role is Role.DECODE:
        me.router(request)
    others = [attempt for attempt in range(-1, 4) if attempt != request.handle.attempt]
    for _ in range(300):
        message = anything(dice.choice(KINDS), dice)
        if dice.random() < 0.3 and hasattr(message, "handle"):
            message = msgspec.structs.replace(message, handle=Handle("open", dice.choice(others)))
        me.peer(dice.choice([life, Peer("p", "old"), Peer("stranger", "e")]), message)
    me.wait(0.3)
    me.drain()
    me.router(Cancel(request.handle, "the end"))
    me.peer(life, Fenced(request.handle, "the end"))
    me.wait(1.0)
    assert me.brain.is_idle(), f"seed {seed}"


def _about_the_open_request(message: object, dice: random.Random) -> object:
    return msgspec.structs.replace(message, handle=Handle("open", dice.randint(-1, 2)))  # type: ignore[type-var]
