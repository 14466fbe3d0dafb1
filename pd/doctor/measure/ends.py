"""One end of a backend, as a measurement needs it: a region, an address, a write that says how long it took."""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Protocol

MODULES = {"shm": "end_pd", "tcp": "end_pd", "nixl": "end_nixl", "mooncake": "end_mooncake"}
WRITE_S = 15.0
"""Of one write: 256 MiB at 20 MB/s. None of the libraries has a deadline of its own."""


class MeasureError(Exception):
    """The backend failed; the message is what a person reads."""


class End(Protocol):
    """Made with (backend, name, host, nbytes). Owns its region."""

    region: memoryview

    def address(self) -> bytes:
        """What the other end needs to reach this one, at most 32 KiB."""

    def meet(self, address: bytes) -> None:
        """Reach the other end. Called once, by both."""

    def write(self, nbytes: int) -> float:
        """Copy the first `nbytes` of our region over the other's. Seconds until they are visible there."""

    def tend(self) -> None:
        """Let a passive library do its part; called again and again while waiting."""

    def close(self) -> None: ...


def load(backend: str) -> ModuleType:
    """Import what the backend needs. Raises ModuleNotFoundError where its library is not installed."""
    return importlib.import_module(f"pd.doctor.measure.{MODULES[backend]}")


def make_end(backend: str, *, name: str, host: str, nbytes: int) -> End:
    """`host`: the local address at which the other side may reach this one."""
    end: End = load(backend).make(backend, name=name, host=host, nbytes=nbytes)
    return end
