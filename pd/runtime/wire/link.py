"""ZMQ links between processes: a Hub is bound and hears everyone, a Spoke is connected to one Hub.

Rules
1. One thread owns a link. Nothing here blocks: a message that cannot go now is dropped and counted; deadlines in the
   brains speak of what is lost, never the link.
2. A sender's routing id is its Peer (name and epoch), so a restarted process is another sender.
3. A frame that is no message is dropped and counted, and so is a message of more than one frame, however many.
   It never raises out of `receive`.
4. With a Lock the other end has proven that it holds the cluster's key; `refused` tells of those that could not.
"""

from __future__ import annotations

import contextlib

import zmq

from pd.runtime.core.events import Peer, Received
from pd.runtime.wire.codec import MAX_MESSAGE_BYTES, WireError, decode, encode
from pd.runtime.wire.lock import Lock
from pd.runtime.wire.messages import AnyMessage
from pd.runtime.wire.watch import Watch

_SEPARATOR = b"\x1f"
_MAX_QUEUED = 10_000
"""Messages a peer may lie behind before new ones to it are dropped: at 100 steps a second, over a minute and a half."""

HEARTBEAT_MS, SWALLOWED_MS = 2_000, 6_000
"""A connection that swallows packets is closed after three. None within a host does: there only a process that is
stopped for a while is silent, and to close its connection would lose what is on it, plans and answers that nobody says
again."""

_LINGER_MS = 200
"""For a last Bye or RankFailed to leave."""


class LinkError(Exception):
    """The address cannot be bound: in use, not ours, or malformed."""


class Hub:
    """Bound end: hears every Spoke connected to it, and answers those it has heard."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], address: str, *, lock: Lock | None = None) -> None:
        """Bind `address`; port `*` or 0 takes a free one. No lock: everyone may come. Raises LinkError."""
        self.socket = context.socket(zmq.ROUTER)
        self.socket.setsockopt(zmq.ROUTER_HANDOVER, 1)  # a reconnect takes over from its own half-dead connection
        self.socket.setsockopt(zmq.ROUTER_MANDATORY, 1)  # so that a send to nobody is counted, not lost unseen
        _set_limits(self.socket, address)
        if lock is not None:
            lock.bind(self.socket)
        self._watch = Watch(self.socket, is_bound=True, has_key=lock is not None and not lock.is_open)
        try:
            self.socket.bind(address)
        except zmq.ZMQError as error:
            self._watch.close()
            self.socket.close(0)
            reason = zmq.strerror(error.errno or 0)  # the error's own text adds the address once more
            raise LinkError(f"cannot bind {address}: {reason}") from error
        self.address = self.socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self.num_dropped = 0

    def send(self, message: AnyMessage, *to: Peer) -> list[Peer]:
        """Returns those that are not connected."""
        frame = encode(message)
        gone: list[Peer] = []
        for peer in to:
            try:
                self.socket.send_multipart([_routing_id(peer), frame], zmq.NOBLOCK)
            except zmq.ZMQError as error:  # EAGAIN: it lies too far behind
                self.num_dropped += 1
                if error.errno == zmq.EHOSTUNREACH:
                    gone.append(peer)
        return gone

    def receive(self) -> Received | None:
        """The next message, or None when none waits."""
        while True:
            try:
                routing_id, *parts = _parts(self.socket, 2)
            except zmq.Again:
                return None
            try:
                (frame,) = parts
                return Received(_peer(routing_id), decode(frame))
            except (WireError, ValueError):
                self.num_dropped += 1

    def has_message(self) -> bool:
        return bool(int(self.socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN)  # 10 µs less than `poll`

    def refused(self) -> str | None:
        """Why someone who tried since the last call could not come in, in a sentence; None: nobody failed."""
        why = self._watch.look()
        return None if why is None else f"refused a connection at {self.address}: {why}"

    def has_lost(self) -> bool:
        """Whether a connection was closed since the last call, as `refused` has seen it. A send tells whose."""
        has_lost, self._watch.has_lost = self._watch.has_lost, False
        return has_lost

    @property
    def num_refused(self) -> int:
        """Connections that failed in the handshake, as `refused` has seen them."""
        return self._watch.num_failed

    def close(self) -> None:
        self._watch.close()
        self.socket.close()


class Spoke:
    """Connected end: speaks to one Hub, and hears it. Reconnects by itself for as long as it is open."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        address: str,
        *,
        me: Peer,
        hub: Peer,
        queue: bool,
        lock: Lock | None = None,
    ) -> None:
        """`hub` is who we believe to be there. `queue`: keep messages while not connected, else drop them."""
        self.socket = context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.ROUTING_ID, _routing_id(me))
        self.socket.setsockopt(zmq.IMMEDIATE, 0 if queue else 1)
        self.socket.setsockopt(zmq.RECONNECT_IVL, 100)
        self.socket.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
        _set_limits(self.socket, address)
        if lock is not None:
            lock.connect(self.socket)
        self._watch = Watch(self.socket, is_bound=False, has_key=lock is not None and not lock.is_open)
        self.socket.connect(address)
        self.address = address
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
                parts = _parts(self.socket, 1)
            except zmq.Again:
                return None
            try:
                (frame,) = parts
                return Received(self.hub, decode(frame))
            except (WireError, ValueError):
                self.num_dropped += 1

    def refused(self) -> str | None:
        """Why the connection failed when it was last tried, in a sentence; None: it did not fail since last asked.

        It is tried anew where ZMQ itself gave the address up for good, as it does when the other end's greeting does
        not suit; nowhere else, because there may be a new connection meanwhile, with messages on it.
        """
        why = self._watch.look()
        if self._watch.has_given_up:
            self._watch.has_given_up = False
            with contextlib.suppress(zmq.ZMQError):
                self.socket.disconnect(self.address)
            self.socket.connect(self.address)
        if why is None:
            return None
        return f"no connection to {self.hub.name} at {self.address}: {why}"

    def close(self) -> None:
        self._watch.close()
        self.socket.close()


def _set_limits(socket: zmq.Socket[bytes], address: str) -> None:
    socket.setsockopt(zmq.LINGER, _LINGER_MS)  # from the start: it holds for a `disconnect` too
    socket.setsockopt(zmq.SNDHWM, _MAX_QUEUED)
    socket.setsockopt(zmq.RCVHWM, _MAX_QUEUED)
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
    if not address.startswith("ipc:"):
        socket.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT_MS)
        socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, SWALLOWED_MS)


def _parts(socket: zmq.Socket[bytes], num_parts: int) -> list[bytes]:
    """The next message's parts. Of one that has more, one more; the rest is read and forgotten, part by part."""
    parts = [socket.recv(zmq.NOBLOCK)]
    while socket.getsockopt(zmq.RCVMORE):
        part = socket.recv(zmq.NOBLOCK)
        if len(parts) <= num_parts:
            parts.append(part)
    return parts


def _routing_id(peer: Peer) -> bytes:
    return peer.name.encode() + _SEPARATOR + peer.epoch.encode()


def _peer(routing_id: bytes) -> Peer:
    """Raises ValueError for an id no Spoke of ours would have."""
    name, epoch = routing_id.split(_SEPARATOR)
    return Peer(name.decode(), epoch.decode())
