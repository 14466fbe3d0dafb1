"""Tiny checkpoints and their reference answers, made once a session."""

from __future__ import annotations

import fcntl
import json
import os
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.equality.reference import CHUNK, PAGE, greedy, prompts
from tests.tiny import VOCAB_SIZE, make_tiny

NUM_TOKENS = 20
COMMON = (
    "--dtype", "float32", "--page-size", str(PAGE), "--max-prefill-tokens", str(CHUNK), "--num-pages", "600",
    "--max-running", "48", "--threads", "1", "--device", "cpu",
)  # fmt: skip


@dataclass(frozen=True)
class Case:
    """A checkpoint, 32 prompts, and what transformers answers."""

    model: Path
    prompts: list[list[int]]
    answers: list[list[int]]


class Cases(dict[str, Case]):
    """Of families, each made when it is first asked for, by one of all processes of a session."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._folder = folder

    def __missing__(self, family: str) -> Case:
        folder = self._folder / f"tiny-{family}"
        model, known = folder / f"tiny-{family}", folder / "answers.json"
        asked = prompts(VOCAB_SIZE - 3, num_prompts=32, seed=7)
        folder.mkdir(exist_ok=True)
        with open(folder / "lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not known.exists():
                overrides = {"sliding_window": 40} if family == "mistral" else {}
                answers = greedy(make_tiny(family, model, **overrides), asked, NUM_TOKENS)
                known.write_text(json.dumps(answers))
        self[family] = case = Case(model, asked, json.loads(known.read_text()))
        return case


@pytest.fixture(scope="session")
def cases(tmp_path_factory: pytest.TempPathFactory) -> Cases:
    own = tmp_path_factory.getbasetemp()
    return Cases(own.parent if "PYTEST_XDIST_WORKER" in os.environ else own)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all-pairs", action="store_true", help="equality of every family with every pair of shapes")
