"""ZMQ links between processes: a Hub is bound and hears everyone, a Spoke is connected to one Hub.

Rules
1. One thread owns a link. Nothing here blocks: a message that cannot go now is dropped and counted; deadlines in the
   brains speak of what is lost, never the link.
2. A sender's routing id is its Peer (name and epoch), so a restarted process is another sender.
3. A frame that is no message is dropped and counted. It never raises out of `receive`.
"""

from __future__ import annotations

import zmq

from pd.runtime.core.events import Peer, Received
from pd.runtime.wire.codec import MAX_MESSAGE_BYTES, WireError, decode, encode
from pd.runtime.wire.messages import AnyMessage

_SEPARATOR = b"\x1f"
_MAX_QUEUED = 10_000
"""Messages a peer may lie behind before new ones to it are dropped: at 100 steps a second, over a minute and a half."""


class LinkError(Exception):
    """The address cannot be bound: in use, not ours, or malformed."""


class Hub:
    """Bound end: hears every Spoke connected to it, and answers those it has heard."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], address: str) -> None:
        """Bind `address`; port `*` or 0 takes a free one. Raises LinkError."""
        self.socket = context.socket(zmq.ROUTER)
        self.socket.setsockopt(zmq.ROUTER_HANDOVER, 1)  # a reconnect takes over from its own half-dead connection
        self.socket.setsockopt(zmq.ROUTER_MANDATORY, 1)  # so that a send to nobody is counted, not lost unseen
        _set_limits(self.socket)
        try:
            self.socket.bind(address)
        except zmq.ZMQError as error:
            self.socket.close(0)
            raise LinkError(f"cannot bind {address}: {error}") from error
        self.address = self.socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self.num_dropped = 0

    def send(self, message: AnyMessage, *to: Peer) -> None:
        frame = encode(message)
        for peer in to:
            try:
                self.socket.send_multipart([_routing_id(peer), frame], zmq.NOBLOCK)
            except zmq.ZMQError:  # EAGAIN: it lies too far behind; EHOSTUNREACH: it is gone
                self.num_dropped += 1

    def receive(self) -> Received | None:
        """The next message, or None when none waits."""
        while True:
            try:
                frames = self.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return None
            try:
                routing_id, frame = frames
                return Received(_peer(routing_id), decode(frame))
            except (WireError, ValueError):
                self.num_dropped += 1

    def has_message(self) -> bool:
        return bool(self.socket.poll(0))

    def close(self) -> None:
        self.socket.close(linger=200)


class Spoke:
    """Connected end: speaks to one Hub, and hears it. Reconnects by itself for as long as it is open."""

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], address: str, *, me: Peer, hub: Peer, queue: bool
    ) -> None:
        """`hub` is who we believe to be there. `queue`: keep messages while not connected, else drop them."""
        self.socket = context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.ROUTING_ID, _routing_id(me))
        self.socket.setsockopt(zmq.IMMEDIATE, 0 if queue else 1)
        self.socket.setsockopt(zmq.RECONNECT_IVL, 100)
        self.socket.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
        _set_limits(self.socket)
        self.socket.connect(address)
        self.hub = hub
        self.num_dropped = 0

    def send(self, message: AnyMessage) -> None:
        try:
            self.socket.send(encode(message), zmq.NOBLOCK)
        except zmq.Again:
            self.num_dropped += 1

    def receive(self) -> Received | None:
        while True:
            try:
                frame = self.socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return None
            try:
                return Received(self.hub, decode(frame))
            except WireError:
                self.num_dropped += 1

    def close(self) -> None:
        self.socket.close(linger=200)  # ms: time for a last Bye or RankFailed to leave


def _set_limits(socket: zmq.Socket[bytes]) -> None:
    socket.setsockopt(zmq.SNDHWM, _MAX_QUEUED)
    socket.setsockopt(zmq.RCVHWM, _MAX_QUEUED)
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
    socket.setsockopt(zmq.HEARTBEAT_IVL, 2_000)  # ms; a connection that swallows packets is closed after three
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, 6_000)


def _routing_id(peer: Peer) -> bytes:
    return peer.name.encode() + _SEPARATOR + peer.epoch.encode()


def _peer(routing_id: bytes) -> Peer:
    """Raises ValueError for an id no Spoke of ours would have."""
    name, epoch = routing_id.split(_SEPARATOR)
    return Peer(name.decode(), epoch.decode())
