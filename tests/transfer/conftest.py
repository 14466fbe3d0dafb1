"""Backends whose ends take a second or more are tested within one process only where everything is: `--wide`."""

from __future__ import annotations

import pytest

SLOW = ("nixl-tcp", "mooncake")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """test_processes.py, between processes, runs over all of them always."""
    if config.getoption("--wide"):
        return
    kept: list[pytest.Item] = []
    left: list[pytest.Item] = []
    for item in items:
        (left if item.path.name == "test_backends.py" and _net(item) in SLOW else kept).append(item)
    if left:
        config.hook.pytest_deselected(items=left)
        items[:] = kept


def _net(item: pytest.Item) -> object:
    callspec = getattr(item, "callspec", None)
    return callspec.params.get("net") if callspec is not None else None
