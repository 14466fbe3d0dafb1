"""Tiny checkpoints and their reference answers, made once a session."""

from __future__ import annotations

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


@pytest.fixture(scope="session")
def cases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Case]:
    families = ("llama", "qwen2", "qwen3", "qwen3_moe", "deepseek_v3", "mistral")
    return {family: _make(family, tmp_path_factory.mktemp(family)) for family in families}


def _make(family: str, folder: Path) -> Case:
    overrides = {"sliding_window": 40} if family == "mistral" else {}
    model = make_tiny(family, folder / f"tiny-{family}", **overrides)
    asked = prompts(VOCAB_SIZE - 3, num_prompts=32, seed=7)
    return Case(model, asked, greedy(model, asked, NUM_TOKENS))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all-pairs", action="store_true", help="equality of every family with every pair of shapes")
