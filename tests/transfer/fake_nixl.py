"""NIXL's agent, as far as pd uses it, within this process: it moves bytes from address to address, at once or when it
is told, and writes down what it was told too early or too late."""

from __future__ import annotations

import ctypes
import sys
import types
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

Rows = list[tuple[int, int, int]]


class NixlError(Exception):
    """Of no base class that pd knows."""


@dataclass(eq=False)
class Prepared:
    owner: str
    rows: Rows
    is_released: bool = False


@dataclass(eq=False)
class Transfer:
    peer: str
    is_read: bool
    ours: Rows
    theirs: Rows
    is_numbered: bool
    state: str = "PROC"


@dataclass(eq=False)
class Agent:
    name: str
    is_held: bool = False
    refuses: str | None = None  # to prepare lists of this owner
    faults: list[str] = field(default_factory=list)
    peers: set[str] = field(default_factory=set)
    lists: list[Prepared] = field(default_factory=list)
    transfers: list[Transfer] = field(default_factory=list)

    def live_lists(self) -> list[Prepared]:
        return [each for each in self.lists if not each.is_released]

    def get_plugin_list(self) -> list[str]:
        return ["UCX"]

    def create_backend(self, name: str, params: dict[str, str]) -> None:
        pass

    def register_memory(self, rows: object, kind: str, backends: list[str]) -> object:
        return rows

    def deregister_memory(self, rows: object) -> None:
        pass

    def get_agent_metadata(self) -> bytes:
        return self.name.encode()

    def add_remote_agent(self, metadata: bytes) -> bytes:
        self.peers.add(metadata.decode())
        return metadata

    def remove_remote_agent(self, name: str) -> None:
        if any(each.peer == name and each.state == "PROC" for each in self.transfers):
            self.faults.append(f"told to forget {name} under a transfer")
        if any(each.owner == name for each in self.live_lists()):
            self.faults.append(f"told to forget {name} with lists of it")
        self.peers.discard(name)

    def get_new_notifs(self) -> dict[str, list[bytes]]:
        return {}

    def get_xfer_descs(self, rows: Any, kind: str) -> Rows:
        return [(address, nbytes, device) for address, nbytes, device in rows.tolist()]

    def prep_xfer_dlist(self, owner: str, rows: Any, kind: str, backends: list[str]) -> Prepared:
        if owner == self.refuses or owner not in {"NIXL_INIT_AGENT", *self.peers}:
            raise NixlError("NIXL_ERR_NOT_FOUND")
        ((address, nbytes, device, step, many),) = rows.tolist()
        self.lists.append(Prepared(owner, [(address + k * step, nbytes, device) for k in range(many)]))
        return self.lists[-1]

    def release_dlist_handle(self, prepared: Prepared) -> None:
        if prepared.is_released:
            self.faults.append("a list was released twice")
        prepared.is_released = True

    def initialize_xfer(self, operation: str, ours: Rows, theirs: Rows, peer: str, backends: list[str]) -> Transfer:
        return self._made(Transfer(peer, operation == "READ", ours, theirs, is_numbered=False))

    def make_prepped_xfer(
        self, operation: str, ours: Prepared, mine: Any, theirs: Prepared, yours: Any, backends: list[str]
    ) -> Transfer:
        if ours.is_released or theirs.is_released or ours.owner != "NIXL_INIT_AGENT":
            self.faults.append("a transfer was made of lists that are not there")
        assert mine.dtype == yours.dtype == np.uint32 and len(mine) == len(yours) > 0
        here, there = [ours.rows[i] for i in mine.tolist()], [theirs.rows[i] for i in yours.tolist()]
        return self._made(Transfer(theirs.owner, operation == "READ", here, there, is_numbered=True))

    def _made(self, transfer: Transfer) -> Transfer:
        assert [row[1] for row in transfer.ours] == [row[1] for row in transfer.theirs] and transfer.peer in self.peers
        self.transfers.append(transfer)
        return transfer

    def transfer(self, transfer: Transfer) -> str:
        if not self.is_held:
            self.carry_out(transfer)
        return transfer.state

    def carry_out(self, transfer: Transfer) -> None:
        for (ours, nbytes, _), (theirs, _, _) in zip(transfer.ours, transfer.theirs, strict=True):
            ctypes.memmove(*((ours, theirs) if transfer.is_read else (theirs, ours)), nbytes)
        transfer.state = "DONE"

    def check_xfer_state(self, transfer: Transfer) -> str:
        return transfer.state

    def release_xfer_handle(self, transfer: Transfer) -> None:
        if transfer.state == "PROC":
            self.faults.append("told to forget a transfer that is on its way")


def install(monkeypatch: pytest.MonkeyPatch) -> list[Agent]:
    """In NIXL's place, whether that is here or not. The agents, in the order in which they are made."""
    agents: list[Agent] = []

    def start(name: str, config: object) -> Agent:
        agents.append(Agent(name))
        return agents[-1]

    module = types.ModuleType("nixl._api")
    module.nixl_agent, module.nixl_agent_config = start, dict  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "nixl", types.ModuleType("nixl"))
    monkeypatch.setitem(sys.modules, "nixl._api", module)
    return agents
