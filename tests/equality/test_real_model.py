"""The default model in float32, apart, answers as transformers does."""

from __future__ import annotations

from pathlib import Path

from transformers import AutoTokenizer

from pd.runtime.checkpoint import resolve
from tests.equality.cluster import apart
from tests.equality.reference import greedy_along

NUM_TOKENS = 64
SUBJECTS = (
    "The capital of France", "Water boils", "A prime number", "The moon", "In 1969,", "My grandmother's soup",
    "The stock market", "To sort a list in Python,", "Photosynthesis", "Once upon a time, a fox", "The fastest train",
    "Dear Sir or Madam,", "Chess players", "Why do cats purr?", "def fibonacci(n):", "The Roman Empire", "Gravity",
    "Roses are red,", "The best way to learn a language", "An electron",
)  # fmt: skip


def test_the_default_model_apart_answers_as_transformers(tmp_path: Path) -> None:
    checkpoint = resolve(None)
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    prompts = [tokenizer(subject)["input_ids"] for subject in SUBJECTS]
    plain = ("--dtype", "float32", "--num-pages", "400", "--threads", "1", "--device", "cpu")
    common = (*plain, "--served-name", checkpoint.name)
    with apart(checkpoint, tmp_path, common=common) as cluster:
        answers = cluster.generate_all(prompts, NUM_TOKENS)
    for prompt, answer in zip(prompts, answers, strict=True):
        assert answer == greedy_along(checkpoint, prompt, answer)
