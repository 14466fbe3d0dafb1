"""Options and order of the whole suite; and triton, imported first: that decides whether kernels are interpreted."""

from __future__ import annotations

import gc
import importlib
import importlib.util
import os
from pathlib import Path

import pytest

_GPU_NODES = ("/dev/nvidiactl", "/dev/kfd")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--wide", action="store_true", help="kernels: many more shapes; transfer: all backends")


_LONGEST = ("equality", "kernels", "engine", "bench", "cluster", "transfer", "runtime", "doctor")
"""Folders of tests, as they begin. Nothing depends on it but how long one worker waits for the others at the end, and
that there are schedules to compute (`cluster`, with what the others leave of the cores) while those after it wait."""


gc.disable()  # until all is imported, and stays: looking for garbage in it takes a quarter of the collection


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop() -> None:
    gc.freeze()
    gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    places = {name: place for place, name in enumerate(_LONGEST)}
    items.sort(key=lambda item: places.get(item.path.parent.name, len(places)))


def _interpret() -> None:
    """Torch and transformers import triton when they like, and then its own functions could not be interpreted."""
    before = os.environ.get("TRITON_INTERPRET")
    os.environ["TRITON_INTERPRET"] = "1"
    importlib.import_module("triton.language")
    if before is None:
        del os.environ["TRITON_INTERPRET"]


if importlib.util.find_spec("triton") is not None and not any(Path(node).exists() for node in _GPU_NODES):
    _interpret()
