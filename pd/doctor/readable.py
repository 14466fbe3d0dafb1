"""Waiting for descriptors of any number: `select.select` refuses those from 1,024 up, which a large process has."""

from __future__ import annotations

import select


def readable(*descriptors: int, timeout_s: float) -> set[int]:
    """Those that have something to read, or have ended; empty if none has until the time is up."""
    poller = select.poll()
    for descriptor in descriptors:
        poller.register(descriptor, select.POLLIN)
    return {descriptor for descriptor, _ in poller.poll(max(0.0, timeout_s) * 1000)}
