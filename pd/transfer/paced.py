"""A transport around another that tells once a peer how fast KV went there: a slow way that nobody notices is this
field's known wound."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field

from pd.transfer.transport import Completion, JobDone, JobFailed, PeerLost, Span, Transport

log = logging.getLogger(__name__)

ENOUGH_NBYTES = 64 << 20
"""Moved to a peer before its pace is told: a request or two of a usual model."""
_LARGE_NBYTES = 1 << 20
"""Smaller jobs say more of messages than of the way."""


@dataclass(slots=True)
class Pace:
    """Of each peer until it is told. Pure."""

    _peers: dict[str, list[tuple[int, float]]] = field(default_factory=dict)
    _told: set[str] = field(default_factory=set)

    def note(self, peer: str, nbytes: int, seconds: float) -> str | None:
        """A job that is done. Returns what is to be said of the peer, once: the best job counts, as others waited."""
        if peer in self._told or nbytes < _LARGE_NBYTES or seconds <= 0:
            return None
        jobs = self._peers.setdefault(peer, [])
        jobs.append((nbytes, seconds))
        moved = sum(size for size, _ in jobs)
        if moved < ENOUGH_NBYTES:
            return None
        del self._peers[peer]
        self._told.add(peer)
        best = max(size / took for size, took in jobs)
        return f"{best / 1e9:.2f} GB/s at best of {len(jobs)} jobs, {moved / 2**20:.0f} MiB"

    def forget(self, peer: str) -> None:
        """It is lost; should it come again, its pace is told again."""
        self._peers.pop(peer, None)
        self._told.discard(peer)


class Paced:
    """See `Transport`, and `inner`, which does it all."""

    def __init__(self, inner: Transport) -> None:
        self.inner = inner
        self.name = inner.name
        self.wake_fd = inner.wake_fd
        self.spare_nbytes = inner.spare_nbytes
        self._open: dict[int, str] = {}  # jobs, and their peers
        self._pace = Pace()

    def allocate(self, nbytes: int) -> memoryview:
        return self.inner.allocate(nbytes)

    def register(self, address: int, nbytes: int, device: int | None = None) -> None:
        self.inner.register(address, nbytes, device)

    def endpoint(self) -> bytes:
        return self.inner.endpoint()

    def connect(self, peer: str, endpoint: bytes) -> None:
        self.inner.connect(peer, endpoint)

    def describe(self, peer: str) -> str | None:
        return self.inner.describe(peer)

    def write(self, peer: str, spans: Sequence[Span], *, job: int) -> None:
        self.inner.write(peer, spans, job=job)
        self._open[job] = peer

    def read(self, peer: str, spans: Sequence[Span], *, job: int) -> None:
        self.inner.read(peer, spans, job=job)
        self._open[job] = peer

    def poll(self) -> list[Completion]:
        ended = self.inner.poll()
        for end in ended:
            match end:
                case JobDone(job=job, nbytes=nbytes, seconds=seconds):
                    peer = self._open.pop(job)
                    if (told := self._pace.note(peer, nbytes, seconds)) is not None:
                        log.info("KV to or from %s goes at %s, by %s", peer, told, self.name)
                case JobFailed(job=job):
                    self._open.pop(job, None)
                case PeerLost(peer=peer):
                    self._pace.forget(peer)
        return ended

    def sever(self, peer: str) -> bool:
        self._pace.forget(peer)
        return self.inner.sever(peer)

    def close(self) -> None:
        self.inner.close()
