"""Each recorded machine gets the diagnosis that its report or its vendor's documentation gives."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest

from pd.doctor.catalog import CHECKS
from pd.doctor.check import Examined, examine_all
from pd.doctor.recorded import Recorded, load
from pd.doctor.result import Result, Status

MACHINES = sorted(Path(__file__).parent.glob("machines/*.json"))
HEALTHY = ("cpu-only", "h100-cx7", "mi300x")


@functools.cache
def diagnose(path: Path) -> dict[str, Examined]:
    return {e.check.id: e for e in examine_all(CHECKS, Recorded(load(path)))}


def text(result: Result) -> str:
    return "\n".join((result.read, result.means, result.fix, *result.details))


@pytest.mark.parametrize("path", MACHINES, ids=lambda p: p.stem)
def test_a_recorded_machine_gets_its_diagnosis(path: Path) -> None:
    recording, found = load(path), diagnose(path)
    assert recording.expect, f"{path.name} expects nothing"
    for name, (status, *words) in recording.expect.items():
        result = found[name].result
        assert result.status.value == status, f"{name}: {result}"
        assert [w for w in words if w not in text(result)] == [], f"{name}: {result}"


@pytest.mark.parametrize("path", MACHINES, ids=lambda p: p.stem)
def test_no_check_breaks_on_a_recorded_machine(path: Path) -> None:
    broken = [e.result.read for e in diagnose(path).values() if "the check itself failed" in e.result.read]
    assert broken == []


@pytest.mark.parametrize("name", HEALTHY)
def test_a_healthy_machine_fails_nothing(name: str) -> None:
    found = diagnose(Path(__file__).parent / f"machines/{name}.json")
    measured = {"transfer.shm", "transfer.tcp"}  # not recorded where nobody could measure
    failed = {i: e.result.read for i, e in found.items() if e.result.status is Status.FAIL and i not in measured}
    assert failed == {}


@pytest.mark.parametrize("path", MACHINES, ids=lambda p: p.stem)
def test_what_is_wrong_is_said_with_its_meaning_and_its_fix(path: Path) -> None:
    for examined in diagnose(path).values():
        if examined.result.status in (Status.WARN, Status.FAIL):
            assert examined.result.means and examined.result.fix, examined.check.id


def test_every_machine_says_where_it_comes_from() -> None:
    assert len(MACHINES) >= 14
    assert [p.name for p in MACHINES if not load(p).sources] == []


def test_every_check_but_the_measured_ones_finds_fault_somewhere_or_passes() -> None:
    """A check that no recorded machine ever reaches is one that nobody has seen work."""
    reached = {i for path in MACHINES for i, e in diagnose(path).items() if e.result.status is not Status.SKIP}
    assert {c.id for c in CHECKS} - reached == set()
