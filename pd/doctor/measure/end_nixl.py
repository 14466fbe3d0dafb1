"""nixl with its UCX backend, host memory."""

from __future__ import annotations

import os
import time

import msgspec

from pd.doctor.measure.ends import WRITE_S, MeasureError
from pd.doctor.measure.memory import Memory
from pd.doctor.measure.nixl_api import nixl_agent, nixl_agent_config


class NixlAddress(msgspec.Struct, frozen=True, array_like=True):
    metadata: bytes
    base: int


class NixlEnd:
    """No progress thread: it would burn a core, and `tend` and `write` poll anyway."""

    def __init__(self, name: str, nbytes: int) -> None:
        self._agent = nixl_agent(name, nixl_agent_config(enable_prog_thread=False, backends=["UCX"]))
        self._memory = Memory(nbytes)
        self.region = self._memory.view
        self._agent.register_memory([(self._memory.address, nbytes, 0, "")], "DRAM")
        self._peer = ""
        self._base = 0

    def address(self) -> bytes:
        return msgspec.msgpack.encode(NixlAddress(self._agent.get_agent_metadata(), self._memory.address))

    def meet(self, address: bytes) -> None:
        there = msgspec.msgpack.decode(address, type=NixlAddress)
        peer = self._agent.add_remote_agent(there.metadata)
        self._peer = peer.decode() if isinstance(peer, bytes) else peer
        self._base = there.base

    def write(self, nbytes: int) -> float:
        mine = self._agent.get_xfer_descs([(self._memory.address, nbytes, 0)], "DRAM")
        theirs = self._agent.get_xfer_descs([(self._base, nbytes, 0)], "DRAM")
        handle = self._agent.initialize_xfer("WRITE", mine, theirs, self._peer)
        began = time.perf_counter()
        state = self._agent.transfer(handle)
        while state == "PROC" and time.perf_counter() - began < WRITE_S:
            state = self._agent.check_xfer_state(handle)
        seconds = time.perf_counter() - began
        if state != "DONE":
            said = "failed" if state == "ERR" else f"is not done after {WRITE_S:.0f} s"
            raise MeasureError(f"nixl: a write of {nbytes} bytes {said}")
        self._agent.release_xfer_handle(handle)
        return seconds

    def tend(self) -> None:
        self._agent.get_new_notifs()

    def close(self) -> None:
        """The process ends after this and takes agent and memory with it."""


def make(backend: str, *, name: str, host: str, nbytes: int) -> NixlEnd:
    """nixl chooses its interfaces itself (UCX_NET_DEVICES). Between hosts it may use only what crosses hosts: two
    network namespaces of one host would else be measured through its memory."""
    if not host.startswith("127."):
        os.environ.setdefault("UCX_TLS", "^sm")
    return NixlEnd(name, nbytes)
