"""`pd bench latency` times every cell it was asked for and writes what it saw."""

from __future__ import annotations

from pathlib import Path

import pytest

from pd.bench.latency import doubt, latency
from pd.bench.lines import read
from pd.bench.options import LatencyOptions
from pd.runtime.config import ConfigError
from tests.tiny import make_tiny


def test_every_cell_is_timed_and_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, output = make_tiny("llama", tmp_path / "tiny"), tmp_path / "out.jsonl"
    options = LatencyOptions(
        model=str(model), prompts="8,40", batches="1,3", contexts="20", rounds=2, threads=1, output=str(output)
    )
    assert latency(options) == 0
    head, *cells = read(output)
    assert (head["kind"], head["model"]) == ("latency", "tiny")
    assert [(cell["step"], cell["batch"], cell["length"], len(cell["seconds"])) for cell in cells] == [  # type: ignore[arg-type]
        ("prefill", 1, 8, 2),
        ("prefill", 1, 40, 2),
        ("decode", 1, 20, 24),
        ("decode", 3, 20, 24),
    ]
    assert all(0 < cell["floor_s"] < min(cell["seconds"]) for cell in cells)  # type: ignore[operator, call-overload]
    rows = [line.split()[:3] for line in capsys.readouterr().out.splitlines()]
    assert ["decode", "3", "20"] in rows


def test_all_faults_are_told_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        latency(LatencyOptions(prompts="0", batches="1,x", rounds=0))
    assert str(caught.value).splitlines() == [
        "--prompts is '0': 0 is not at least 1",
        "--batches is '1,x': 'x' is no whole number",
        "--rounds is 0, must be at least 1",
    ]


def test_a_step_below_its_floor_is_doubted() -> None:
    assert doubt([1.0, 1.3]) is None
    assert (doubt([0.9, 1.3]) or "").startswith("1 of 2 steps lie below their floor: the machine was too busy")
