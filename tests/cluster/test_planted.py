"""The simulation can fail: every planted fault is seen, by the small schedules that most of the suite is made of."""

from __future__ import annotations

import pytest

from tests.cluster.faults import FAULTS
from tests.cluster.many import first_failing


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_caught(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    FAULTS[fault](monkeypatch)
    assert first_failing() is not None
