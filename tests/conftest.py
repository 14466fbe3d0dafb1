"""Options of the whole suite; and triton, imported first of all: that decides whether kernels are interpreted."""

from __future__ import annotations

import importlib
import importlib.util
import os
from pathlib import Path

import pytest

_GPU_NODES = ("/dev/nvidiactl", "/dev/kfd")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--wide", action="store_true", help="kernels: many more shapes; transfer: all backends")


def _interpret() -> None:
    """Torch and transformers import triton when they like, and then its own functions could not be interpreted."""
    before = os.environ.get("TRITON_INTERPRET")
    os.environ["TRITON_INTERPRET"] = "1"
    importlib.import_module("triton.language")
    if before is None:
        del os.environ["TRITON_INTERPRET"]


if importlib.util.find_spec("triton") is not None and not any(Path(node).exists() for node in _GPU_NODES):
    _interpret()
