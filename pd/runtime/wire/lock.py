"""The lock on the links of a cluster with a key: ZMQ's CURVE, both ends proven, everything encrypted.

From the cluster's one key follow two CURVE key pairs, the bound end's and the connected end's. Who knows the key can
be either; who does not can be neither, and learns nothing.
"""

from __future__ import annotations

import hmac
from types import TracebackType
from typing import Self

import zmq
from zmq.auth.thread import ThreadAuthenticator
from zmq.utils import z85

from pd.runtime.keys import derived

_DOMAIN = "pd"


class Lock:
    """A context manager beside its ZMQ context. With `key` None it locks nothing."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], key: bytes | None) -> None:
        self.context = context
        self._doorkeeper: ThreadAuthenticator | None = None
        self._pairs = None if key is None else (_pair(key, "pd-link-bound"), _pair(key, "pd-link-connect"))

    @property
    def is_open(self) -> bool:
        """There is no key: everyone is let in."""
        return self._pairs is None

    def __enter__(self) -> Self:
        if self._pairs is not None:
            self._doorkeeper = ThreadAuthenticator(self.context)
            self._doorkeeper.start()
            self._doorkeeper.configure_curve_callback(_DOMAIN, _Only(self._pairs[1][0]))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._doorkeeper is not None:
            self._doorkeeper.stop()

    def bind(self, socket: zmq.Socket[bytes]) -> None:
        """Before the socket is bound; then only holders of the key come in."""
        if self._pairs is not None:
            socket.curve_publickey, socket.curve_secretkey = self._pairs[0]
            socket.curve_server = True
            socket.zap_domain = _DOMAIN.encode()

    def connect(self, socket: zmq.Socket[bytes]) -> None:
        """Before the socket is connected; then it speaks to holders of the key only."""
        if self._pairs is not None:
            socket.curve_publickey, socket.curve_secretkey = self._pairs[1]
            socket.curve_serverkey = self._pairs[0][0]


class _Only:
    """Lets the one public key in."""

    def __init__(self, public: bytes) -> None:
        self._public = public

    def callback(self, domain: str, key: bytes) -> bool:
        return hmac.compare_digest(key, self._public)


def _pair(key: bytes, purpose: str) -> tuple[bytes, bytes]:
    secret = z85.encode(derived(key, purpose))
    return zmq.curve_public(secret), secret
