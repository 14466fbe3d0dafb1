"""Fixtures of the tests of the C++ ops."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from pd.runtime.engine import cpu_build

NATIVE = cpu_build.load().module


@pytest.fixture
def one_thread_and_poisoned_memory() -> Iterator[None]:
    """Whatever an op leaves unwritten in a fresh float tensor is NaN, in an integer one the largest value."""
    torch.set_num_threads(1)
    # The public switch does the same after importing all of inductor, seconds long.
    torch._C._set_deterministic_algorithms(True)
    yield
    torch._C._set_deterministic_algorithms(False)


@pytest.fixture(params=NATIVE.available() if NATIVE else [])
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    """Each instruction set in turn. Without C++ ops nothing is collected but the fallbacks' tests."""
    assert NATIVE is not None
    NATIVE.use(request.param)
    yield request.param
    NATIVE.use(NATIVE.available()[0])
