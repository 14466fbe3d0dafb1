"""Mooncake's transfer engine: whether it imports and comes up over TCP on loopback."""

from __future__ import annotations

from importlib import metadata

from mooncake.engine import TransferEngine

from pd.doctor.answers import Mooncake


def answer() -> Mooncake:
    code = TransferEngine().initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "")
    return Mooncake(version=_version(), error="" if code == 0 else f"initialize returned {code}")


def _version() -> str:
    wanted = "mooncake-transfer-engine"
    found = [d for d in metadata.distributions() if d.metadata["Name"].lower().startswith(wanted)]
    return (
        " ".join((found[0].metadata["Name"].removeprefix(wanted).lstrip("-"), found[0].version)).strip()
        if found
        else ""
    )
