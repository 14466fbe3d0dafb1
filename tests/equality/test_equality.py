"""The law: separating prefill from decode never changes an answer.

Real processes, against transformers and against our own colocated server.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

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


NUM_ALONE = 6


class Told(NamedTuple):
    """What a cluster answers to the case's prompts: to 32 at once, then to some alone, and from the prefix cache."""

    greedy: list[list[int]]
    greedy_alone: list[list[int]]
    sampled: list[list[int]]
    sampled_alone: list[list[int]]
    instances: list[dict[str, Any]]  # when all is over


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "backend" in metafunc.fixturenames:
        chosen = ALL if metafunc.config.getoption("--all-pairs") else BY_TURNS
        metafunc.parametrize(("family", "pair", "backend"), chosen, ids=str)


@pytest.fixture(scope="module")
def colocated(cases: dict[str, Case], tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Told]:
    """Of a family: each cluster is started once, and asked all that any test wants to know."""

    @functools.cache
    def told(family: str) -> Told:
        with together(cases[family].model, tmp_path_factory.mktemp("together"), common=COMMON) as cluster:
            return _ask(cluster, cases[family])

    return told


@pytest.fixture(scope="module")
def parted(
    cases: dict[str, Case], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str, tuple[int, int], str], Told]:
    """As `colocated`, of prefill and decode apart."""

    @functools.cache
    def told(family: str, pair: tuple[int, int], backend: str) -> Told:
        prefill, decode = (("--tp", str(tp)) for tp in pair)
        common, logs = (*COMMON, "--transfer", backend), tmp_path_factory.mktemp("apart")
        with apart(cases[family].model, logs, prefill=prefill, decode=decode, common=common) as cluster:
            return _ask(cluster, cases[family])

    return told


def test_apart_answers_as_transformers(
    cases: dict[str, Case], parted: Callable[..., Told], family: str, pair: tuple[int, int], backend: str
) -> None:
    _assert_as_transformers(parted(family, pair, backend), cases[family])


def test_apart_samples_as_colocated(
    colocated: Callable[[str], Told], parted: Callable[..., Told], family: str, pair: tuple[int, int], backend: str
) -> None:
    told, due = parted(family, pair, backend), colocated(family).sampled
    assert told.sampled == due
    assert told.sampled_alone == due[:NUM_ALONE]


@pytest.mark.parametrize("library", backends("nixl", "mooncake"))
def test_apart_answers_as_transformers_through_a_library(
    cases: dict[str, Case], parted: Callable[..., Told], library: str
) -> None:
    _assert_as_transformers(parted("llama", {"nixl": (3, 2), "mooncake": (1, 2)}[library], library), cases["llama"])


@pytest.mark.parametrize("family", FAMILIES)
def test_colocated_answers_as_transformers(
    cases: dict[str, Case], colocated: Callable[[str], Told], family: str
) -> None:
    _assert_as_transformers(colocated(family), cases[family])


@pytest.mark.parametrize("family", FAMILIES)
def test_colocated_samples_alone_as_among_others(
    cases: dict[str, Case], colocated: Callable[[str], Told], family: str
) -> None:
    told = colocated(family)
    assert told.sampled_alone == told.sampled[:NUM_ALONE]
    assert told.sampled != cases[family].answers


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


def _ask(cluster: Cluster, case: Case) -> Told:
    def at_once(**sampling: Any) -> list[list[int]]:
        return cluster.generate_all(case.prompts, NUM_TOKENS, **sampling)

    def alone(**sampling: Any) -> list[list[int]]:
        return [cluster.generate(prompt, NUM_TOKENS, **sampling) for prompt in case.prompts[:NUM_ALONE]]

    answers = at_once(), alone(), at_once(**SAMPLED), alone(**SAMPLED)
    return Told(*answers, instances=cluster.wait_idle()["instances"])


def _assert_as_transformers(told: Told, case: Case) -> None:
    assert told.greedy == case.answers
    assert told.greedy_alone == case.answers[:NUM_ALONE]
    for instance in told.instances:
        assert instance["num_free_pages"] == instance["num_pages"], instance
