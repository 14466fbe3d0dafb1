"""An operator's word to the router: drain an instance, and how far that is."""

from __future__ import annotations

import os
import socket
import sys
import time

import zmq

from pd.runtime.config import ConfigError
from pd.runtime.core.events import ROUTER, Peer
from pd.runtime.keys import read_cluster_key
from pd.runtime.roles.process import new_epoch
from pd.runtime.wire.link import Spoke
from pd.runtime.wire.lock import Lock
from pd.runtime.wire.messages import DrainInstance, DrainReport, Refusal
from pd.runtime.wire.watch import REMEDY

_AGAIN_S = 0.5
_SILENT_S = 10.0
"""Without an answer: then no router is there."""


def drain(name: str, *, router: str, cluster_key: str | None) -> int:
    """Ask until the instance has left: 0. Raises ConfigError: no such instance, no router, or another key."""
    with zmq.Context[zmq.Socket[bytes]]() as context, Lock(context, read_cluster_key(cluster_key)) as lock:
        me = Peer(f"operator-{socket.gethostname()}-{os.getpid()}", new_epoch())
        try:
            link = Spoke(context, router, me=me, hub=Peer(ROUTER, ""), queue=True, lock=lock)
        except zmq.ZMQError as error:
            raise ConfigError(f"--router is {router!r}: {error}", hint="it must be tcp://HOST:PORT") from error
        try:
            return _until_gone(link, name)
        finally:
            link.close()


def _until_gone(link: Spoke, name: str) -> int:
    said, heard_at = "", time.monotonic()
    while True:
        link.send(DrainInstance(name, "told to by an operator"))
        link.socket.poll(int(_AGAIN_S * 1000))
        while (received := link.receive()) is not None:
            heard_at = time.monotonic()
            match received.message:
                case Refusal(reason=reason):
                    raise ConfigError(reason, hint="the name is the one in the router's /state")
                case DrainReport(is_gone=True):
                    _say(f"{name} has left")
                    return 0
                case DrainReport() as report:
                    said = _tell(report, said)
                case _:
                    pass
        if (why := link.refused()) is not None:
            raise ConfigError(why, hint=REMEDY)
        if time.monotonic() - heard_at > _SILENT_S:
            raise ConfigError(f"no router answers at {link.address}", hint="give --router the address it binds")
        time.sleep(_AGAIN_S)


def _tell(report: DrainReport, said: str) -> str:
    """Say it where it is new."""
    text = f"{report.worker} is draining: {report.num_open} requests left"
    if not said and not report.num_others:
        _say("no other instance of its role takes work: until one does, new requests get 503")
    if text != said:
        _say(text)
    return text


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()
