"""Kernels run on the GPU where there is one, else in Triton's interpreter on the CPU.

Whether they are interpreted is decided when they are imported, so it is decided here, before any test module imports
them; compiling for other devices (tests/kernels/compile.py) happens in processes of its own.
"""

from __future__ import annotations

import importlib
import os
import pkgutil
from collections.abc import Iterator

import pytest
import torch

_HAS_GPU = torch.cuda.is_available()

if not _HAS_GPU:
    _before = os.environ.get("TRITON_INTERPRET")
    os.environ["TRITON_INTERPRET"] = "1"
    pytest.importorskip("triton", reason="triton is not installed: the kernels cannot even be interpreted")
    import pd.kernels
    from tests.kernels import interpreter

    for _module in pkgutil.iter_modules(pd.kernels.__path__):
        importlib.import_module(f"pd.kernels.{_module.name}")
    assert pd.kernels.target.INTERPRETED, "something imported triton or the kernels before the interpreter was chosen"
    interpreter.install()
    del os.environ["TRITON_INTERPRET"]
    if _before is not None:
        os.environ["TRITON_INTERPRET"] = _before


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """On a GPU machine `pytest -m gpu` holds these tests as well."""
    for item in items:
        if _HAS_GPU and "device" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.gpu)


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda" if _HAS_GPU else "cpu")


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
