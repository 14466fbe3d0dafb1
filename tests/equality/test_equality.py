"""The law: separating prefill from decode never changes an answer.

Real processes, against transformers and against our own colocated server.
"""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch

from pd.runtime.engine.cpu_build import has_bf16_gemm, native_for
from tests.equality.cluster import Cluster, apart, together
from tests.equality.conftest import COMMON, NUM_TOKENS, Case
from tests.transfer.kit import backends

PAIRS = ((1, 1), (2, 1), (1, 2), (3, 2), (2, 4))
BACKENDS = ("shm", "tcp")
FAMILIES = ("llama", "qwen2", "qwen3", "deepseek_v3", "qwen3_moe", "mistral")
ALL = tuple(itertools.product(FAMILIES, PAIRS, BACKENDS))
BY_TURNS = tuple(
    (FAMILIES[(i + j) % len(FAMILIES)], pair, backend)
    for i, pair in enumerate(PAIRS)
    for j, backend in enumerate(BACKENDS)
)
"""Each pair through each backend, families taking turns; `--all-pairs` runs the whole product."""

SAMPLED = {"temperature": 0.9, "top_p": 0.95, "top_k": 50, "seed": 1234}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "backend" in metafunc.fixturenames:
        chosen = ALL if metafunc.config.getoption("--all-pairs") else BY_TURNS
        metafunc.parametrize(("family", "pair", "backend"), chosen, ids=str)


def test_apart_answers_as_transformers(
    cases: dict[str, Case], tmp_path: Path, family: str, pair: tuple[int, int], backend: str
) -> None:
    _answers_as_transformers(cases[family], tmp_path, pair, backend)


@pytest.mark.parametrize("library", backends("nixl", "mooncake"))
def test_apart_answers_as_transformers_through_a_library(cases: dict[str, Case], tmp_path: Path, library: str) -> None:
    pair = {"nixl": (3, 2), "mooncake": (1, 2)}[library]
    _answers_as_transformers(cases["llama"], tmp_path, pair, library)


@pytest.mark.parametrize("family", FAMILIES)
def test_colocated_answers_as_transformers_and_samples_as_apart(
    cases: dict[str, Case], tmp_path: Path, family: str
) -> None:
    case = cases[family]
    with together(case.model, tmp_path / "together", common=COMMON) as cluster:
        assert cluster.generate_all(case.prompts, NUM_TOKENS) == case.answers
        sampled = cluster.generate_all(case.prompts, NUM_TOKENS, **SAMPLED)
        assert [cluster.generate(p, NUM_TOKENS, **SAMPLED) for p in case.prompts[:6]] == sampled[:6]
        _assert_all_free(cluster)
    assert sampled != case.answers
    with apart(case.model, tmp_path / "apart", common=COMMON, prefill=("--tp", "2")) as cluster:
        assert cluster.generate_all(case.prompts, NUM_TOKENS, **SAMPLED) == sampled
        assert [cluster.generate(p, NUM_TOKENS, **SAMPLED) for p in case.prompts[:6]] == sampled[:6]


@pytest.mark.skipif(
    native_for(torch.empty(0)) is None or has_bf16_gemm(),
    reason="needs the C++ operators, and a CPU where they compute all of bfloat16 (no AVX512-BF16)",
)
def test_in_bfloat16_too_answers_are_the_same_together_and_apart(cases: dict[str, Case], tmp_path: Path) -> None:
    """Bit for bit: other chunks, other batches, prefix caches, and another instance decodes."""
    case, narrow = cases["qwen3"], ("--dtype", "bfloat16")
    with together(case.model, tmp_path / "together", common=(*COMMON, *narrow)) as cluster:
        answers = cluster.generate_all(case.prompts, NUM_TOKENS)
    assert answers != case.answers, "bfloat16 is not float32"
    wide = (*narrow, "--max-prefill-tokens", "1000")
    with apart(case.model, tmp_path / "apart", common=COMMON, prefill=wide, decode=narrow) as cluster:
        assert cluster.generate_all(case.prompts, NUM_TOKENS) == answers
        assert [cluster.generate(prompt, NUM_TOKENS) for prompt in case.prompts[:12]] == answers[:12]


def _answers_as_transformers(case: Case, folder: Path, pair: tuple[int, int], backend: str) -> None:
    prefill, decode = (("--tp", str(tp)) for tp in pair)
    common = (*COMMON, "--transfer", backend)
    with apart(case.model, folder, prefill=prefill, decode=decode, common=common) as cluster:
        assert cluster.generate_all(case.prompts, NUM_TOKENS) == case.answers  # 32 at once
        alone = [cluster.generate(prompt, NUM_TOKENS) for prompt in case.prompts[:6]]  # and from the prefix cache
        assert alone == case.answers[:6]
        _assert_all_free(cluster)


def _assert_all_free(cluster: Cluster) -> None:
    for instance in cluster.wait_idle()["instances"]:
        assert instance["num_free_pages"] == instance["num_pages"], instance
