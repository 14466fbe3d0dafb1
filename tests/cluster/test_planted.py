"""The simulation can fail: every planted fault is seen, by the small schedules that most of the suite is made of."""

from __future__ import annotations

import pytest

from tests.cluster.faults import FAULTS
from tests.cluster.many import all_first_failing
from tests.cluster.run import Outcome


@pytest.fixture(scope="module")
def seen(request: pytest.FixtureRequest) -> dict[str, Outcome | None]:
    chosen = [item.callspec.params["fault"] for item in request.session.items if item.fspath == request.fspath]
    return dict(all_first_failing(chosen))


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_caught(fault: str, seen: dict[str, Outcome | None]) -> None:
    assert seen[fault] is not None
