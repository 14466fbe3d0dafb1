"""Backends whose ends take a second or more are tested within one process only where everything is: `--wide`."""

from __future__ import annotations

import pytest

SLOW = ("nixl-tcp", "mooncake")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """test_processes.py, between processes, runs over all of them always."""
    if config.getoption("--wide"):
        return
    kept = [item for item in items if not (item.path.name == "test_backends.py" and _net(item) in SLOW)]
    if len(kept) < len(items):
        config.hook.pytest_deselected(items=[item for item in items if item not in set(kept)])
        items[:] = kept


def _net(item: pytest.Item) -> object:
    callspec = getattr(item, "callspec", None)
    return callspec.params.get("net") if callspec is not None else None
