"""Every shipped launch compiles for every target, within its memory, without spills; docs/kernels.md tells the figures.

`pytest --wide` compiles many more; `python -m tests.kernels.test_compile` writes the document's table anew.
"""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.kernels.dry_run import TARGETS
from tests.kernels.shipped import SHIPPED, WIDE

DOCUMENT = Path(__file__).parents[2] / "docs" / "kernels.md"
BEGIN, END = "<!-- table: python -m tests.kernels.test_compile -->\n", "<!-- end of table -->\n"
MATRIX_KERNELS = ("decode", "prefill", "mla", "grouped_gemm")
Row = dict[str, object]


@functools.cache
def compiled(is_wide: bool) -> dict[tuple[str, str], Row]:
    """By launch and target. Two processes at a time."""

    def compile_for(targets: list[str]) -> str:
        command = [sys.executable, "-m", "tests.kernels.compile", *targets, *["--wide"] * is_wide]
        environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
        return subprocess.run(command, capture_output=True, text=True, check=True, env=environment).stdout

    with ThreadPoolExecutor(2) as pool:
        lines = "".join(pool.map(compile_for, (list(TARGETS)[:3], list(TARGETS)[3:]))).splitlines()
    rows = map(json.loads, lines)
    return {(row["name"], row["target"]): row for row in rows}


def faults(row: Row) -> list[str]:
    if "error" in row:
        return [str(row["error"])]
    found, names = [], [kernel["kernel"] for kernel in row["kernels"]]
    for kernel in row["kernels"]:
        if kernel["spilled_nbytes"]:
            found.append(f"{kernel['kernel']} spills {kernel['spilled_nbytes']} bytes")
        if names.count(kernel["kernel"]) > 1:
            found.append(f"{kernel['kernel']} is compiled again for another batch")
        if kernel["kernel"] in MATRIX_KERNELS and not kernel["uses_matrix_cores"] and "fp32" not in str(row["name"]):
            found.append(f"{kernel['kernel']} does not use the matrix cores")
    return found


@pytest.mark.parametrize("target", TARGETS)
def test_every_shipped_launch_compiles_within_its_limits(target: str, request: pytest.FixtureRequest) -> None:
    """The driver refuses more shared memory than there is, as the real one does."""
    is_wide = request.config.getoption("--wide")
    rows = compiled(is_wide)
    found = {name: said for name in (SHIPPED | WIDE if is_wide else SHIPPED) if (said := faults(rows[name, target]))}
    assert not found, "\n".join(f"{target} {name}: {'; '.join(said)}" for name, said in found.items())


def test_the_document_tells_what_they_take() -> None:
    text = DOCUMENT.read_text()
    written = text.split(BEGIN)[1].split(END)[0]
    assert written == table(compiled(False)), "run python -m tests.kernels.test_compile and look at what changed"


def table(rows: dict[tuple[str, str], Row]) -> str:
    """Shared memory in KiB / registers a thread, a kernel a line."""
    lines = [f"| launch | kernel | {' | '.join(TARGETS)} |", "|---|---|" + "---|" * len(TARGETS)]
    for name in SHIPPED:
        columns = [rows[name, target]["kernels"] for target in TARGETS]
        for kernels in zip(*columns, strict=True):
            cells = [f"{k['shared_nbytes'] / 1024:.3g} / {k['registers']}" for k in kernels]
            lines.append(f"| {name} | {kernels[0]['kernel']} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def write() -> None:
    before, rest = DOCUMENT.read_text().split(BEGIN)
    DOCUMENT.write_text(before + BEGIN + table(compiled(False)) + END + rest.split(END)[1])


if __name__ == "__main__":
    write()
