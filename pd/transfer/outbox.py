"""Completions on their way from whatever thread moves bytes to the one that polls."""

from __future__ import annotations

import contextlib
import os
import threading
from collections import deque

from pd.transfer.transport import Completion


class Outbox:
    """A queue and the eventfd that is readable while it holds something. `put` and `ring` are for any thread, the rest
    for one: it never waits there for a thread that was put aside in the middle of ringing.

    Bounded by the jobs that backends take: each puts one completion a job and one a lost peer.
    """

    def __init__(self, *, within: Outbox | None = None) -> None:
        """`within`: rings that one's `wake_fd`, which whoever drains this must drain first."""
        self._within = within
        self.wake_fd: int = within.wake_fd if within else os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._lock = threading.Lock()
        self._waiting: deque[Completion] = deque()
        self._is_open = True

    def put(self, *completions: Completion) -> None:
        self._waiting.extend(completions)
        self.ring()

    def ring(self) -> None:
        """Make `wake_fd` readable: there is a reason to poll."""
        if self._within is not None:
            self._within.ring()
            return
        with self._lock:
            if self._is_open:
                os.eventfd_write(self.wake_fd, 1)

    def drain(self) -> list[Completion]:
        """Everything put so far, in order. Also after `close`, for what failed by it."""
        if self._is_open and self._within is None:
            with contextlib.suppress(BlockingIOError):  # nobody rang
                os.eventfd_read(self.wake_fd)
        drained: list[Completion] = []
        while self._waiting:
            drained.append(self._waiting.popleft())
        return drained

    def close(self) -> None:
        with self._lock:
            if self._is_open:
                self._is_open = False
                if self._within is None:
                    os.close(self.wake_fd)
