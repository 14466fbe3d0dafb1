"""Why a connection did not come about: a link's handshakes that failed, in a person's words."""

from __future__ import annotations

import logging

import zmq
from zmq.utils.monitor import recv_monitor_message

REMEDY = "give every process of the cluster the same --cluster-key FILE, or none of them any"

_FAILED = zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
_MAX_A_LOOK = 64
_AGAIN_S = 10.0
"""Between two lines about the same fault of a connection, which is tried every second."""
_MAX_FAULTS = 256


class Watch:
    """Beside one socket, owned by its thread."""

    def __init__(self, socket: zmq.Socket[bytes], *, is_bound: bool, has_key: bool) -> None:
        self._socket = socket
        self._is_bound = is_bound
        self._has_key = has_key
        self._monitor = socket.get_monitor_socket(_FAILED | (zmq.EVENT_DISCONNECTED if is_bound else 0))
        self.num_failed = 0
        self.has_lost = False
        """A connection that had come about was closed (of a bound end)."""
        self.has_given_up = False
        """ZMQ tries no more (of a connected end): after any other failure it tries again by itself."""

    def look(self) -> str | None:
        """The last failure since the last look that says something, or None."""
        said = None
        for _ in range(_MAX_A_LOOK):
            if not self._monitor.poll(0):
                break
            event = recv_monitor_message(self._monitor)
            if event["event"] == zmq.EVENT_DISCONNECTED:
                self.has_lost = True
                continue
            self.has_given_up |= event["event"] != zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
            why = self._why(event["event"], event["value"])
            if why is not None:
                self.num_failed += 1
                said = why
        return said

    def close(self) -> None:
        self._socket.disable_monitor()
        self._monitor.close(0)

    def _why(self, event: int, value: int) -> str | None:
        """None: the other end went away, which a port scan or a dying process does too."""
        if not self._is_bound and self._has_key:  # who closes first is chance, so this end often sees no more
            return "it has another cluster key, or none"
        if not self._is_bound and event == zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL:
            return "it hangs up at once: one with a cluster key does, and one that is not there behind a proxy"
        if event == zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL:
            return None
        if event == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL:
            if value == zmq.PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH:
                return (
                    "it has no cluster key, and we have one" if self._has_key else "it has a cluster key, and we none"
                )
            if value != zmq.PROTOCOL_ERROR_ZMTP_CRYPTOGRAPHIC:
                return "it is no process of ours"
        return "it has another cluster key"


class Complaints:
    """Faults of connections as log lines, each at most every _AGAIN_S."""

    def __init__(self, log: logging.Logger) -> None:
        self._log = log
        self._said_at: dict[str, float] = {}

    def say(self, fault: str | None, now: float) -> None:
        if fault is None or now - self._said_at.get(fault, -_AGAIN_S) < _AGAIN_S:
            return
        if len(self._said_at) >= _MAX_FAULTS:
            self._said_at.clear()
        self._said_at[fault] = now
        self._log.error("error: %s", fault)
        self._log.error("hint: %s", REMEDY)
