"""What `pd launch` says of a machine before it starts anything."""

from __future__ import annotations

from pathlib import Path

import pytest

from pd.doctor.at_start import warnings
from pd.doctor.recorded import Recorded, load

MACHINES = Path(__file__).parent / "machines"


@pytest.mark.parametrize("name", ["cpu-only", "h100-cx7", "mi300x"])
def test_nothing_is_said_of_a_healthy_machine(name: str) -> None:
    assert list(warnings(Recorded(load(MACHINES / f"{name}.json")))) == []


def test_what_fails_is_said_in_a_line_with_the_check_to_read_on() -> None:
    (said,) = warnings(Recorded(load(MACHINES / "h100-memlock-64k.json")))
    assert said.startswith("locked memory: 64 KiB and no CAP_IPC_LOCK. RDMA locks every byte it registers")
    assert said.endswith("(pd doctor --only machine.memlock)")
