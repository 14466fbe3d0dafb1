"""Mooncake's transfer engine over TCP, host memory."""

from __future__ import annotations

import time

import msgspec
from mooncake.engine import TransferEngine

from pd.doctor.measure.ends import MeasureError
from pd.doctor.measure.memory import Memory


class MooncakeAddress(msgspec.Struct, frozen=True, array_like=True):
    session: str  # host:port
    base: int


class MooncakeEnd:
    def __init__(self, host: str, nbytes: int) -> None:
        self._engine = TransferEngine()
        if code := self._engine.initialize(host, "P2PHANDSHAKE", "tcp", ""):
            raise MeasureError(f"mooncake: initialize on {host} returned {code}")
        self._host = host
        self._memory = Memory(nbytes)
        self.region = self._memory.view
        if code := self._engine.register_memory(self._memory.address, nbytes):
            raise MeasureError(f"mooncake: registering {nbytes} bytes returned {code}")
        self._there = MooncakeAddress("", 0)

    def address(self) -> bytes:
        session = f"{self._host}:{self._engine.get_rpc_port()}"
        return msgspec.msgpack.encode(MooncakeAddress(session, self._memory.address))

    def meet(self, address: bytes) -> None:
        self._there = msgspec.msgpack.decode(address, type=MooncakeAddress)

    def write(self, nbytes: int) -> float:
        began = time.perf_counter()
        there = self._there
        if code := self._engine.transfer_sync_write(there.session, self._memory.address, there.base, nbytes):
            raise MeasureError(f"mooncake: a write of {nbytes} bytes to {there.session} returned {code}")
        return time.perf_counter() - began

    def tend(self) -> None:
        """It has threads of its own."""

    def close(self) -> None:
        """The process ends after this and takes engine and memory with it."""


def make(backend: str, *, name: str, host: str, nbytes: int) -> MooncakeEnd:
    return MooncakeEnd(host, nbytes)
