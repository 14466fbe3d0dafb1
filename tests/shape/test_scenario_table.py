"""The table of the field's scenarios names tests that exist, for each of the forty."""

from __future__ import annotations

import re
from pathlib import Path

from tests.shape.source import modules

TABLE = Path(__file__).parents[1] / "cluster" / "README.md"


def test_every_scenario_has_tests_that_exist_or_a_reason() -> None:
    rows = re.findall(r"^\| (\d+) \| (.+?) \| (.+?) \|$", TABLE.read_text(encoding="utf-8"), re.MULTILINE)
    assert [int(number) for number, _, _ in rows] == list(range(1, 41))
    there = {function.name for module in modules("tests") for function in module.functions()}
    for number, _, held_by in rows:
        missing = set(re.findall(r"`(test_\w+)`", held_by)) - there
        assert not missing, f"scenario {number}: {missing}"
        assert "`" in held_by or "every random run" in held_by or held_by.startswith("there "), f"scenario {number}"
