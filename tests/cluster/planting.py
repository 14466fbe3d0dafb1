"""How a fault is planted: something of the product is replaced for as long as the test lasts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

Patch = pytest.MonkeyPatch
Plant = Callable[[Patch], None]


def instead(cls: type, method: str, replacement: Callable[..., Any]) -> Plant:
    return lambda patch: patch.setattr(cls, method, replacement)
