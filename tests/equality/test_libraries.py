"""The law through NIXL and Mooncake: whoever moves KV and when, direct or packed, whatever page sizes and dtypes."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.equality.cluster import Cluster, apart
from tests.equality.conftest import COMMON, NUM_TOKENS, Case
from tests.transfer.kit import why_absent

NUM_PROMPTS = 12
TPS = (2, 1)
"""Of every way, as in bfloat16 the sum of two ranks' parts is not that of one."""


class Way(NamedTuple):
    library: str
    direction: str
    reserve: str
    move: str
    pages: tuple[int, int]  # tokens a page, of prefill and of decode
    dtypes: tuple[str, str]

    @property
    def is_possible(self) -> bool:
        return self.move == "packed" or self.dtypes[0] == self.dtypes[1]

    @property
    def name(self) -> str:
        sides = (f"{prefill}→{decode}" for prefill, decode in (self.pages, self.dtypes))
        return ", ".join((self.library, self.direction, self.reserve, self.move, *sides))


SMALLER, LARGER = (64, 16), (16, 64)
EXACT, NARROW, WIDENED = ("float32", "float32"), ("bfloat16", "bfloat16"), ("bfloat16", "float32")
LEVELS = (
    *(("nixl", "mooncake"), ("push", "pull"), ("early", "late"), ("direct", "packed")),
    *((LARGER, SMALLER), (EXACT, NARROW, WIDENED)),
)
ALL = tuple(filter(lambda way: way.is_possible, itertools.starmap(Way, itertools.product(*LEVELS))))
PAIRS = (
    Way("nixl", "push", "early", "packed", LARGER, NARROW),
    Way("nixl", "pull", "late", "packed", LARGER, WIDENED),
    Way("nixl", "pull", "early", "direct", SMALLER, EXACT),
    Way("mooncake", "push", "late", "packed", LARGER, EXACT),
    Way("mooncake", "push", "late", "direct", LARGER, EXACT),
    Way("mooncake", "push", "early", "packed", SMALLER, WIDENED),
    Way("mooncake", "pull", "late", "direct", SMALLER, NARROW),
)
"""Any two levels that can meet do; `--all-pairs` runs the whole product."""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "way" in metafunc.fixturenames:
        chosen = ALL if metafunc.config.getoption("--all-pairs") else PAIRS
        reasons = {library: why_absent(library) for library in LEVELS[0]}
        marks = {name: pytest.mark.skipif(reason is not None, reason=str(reason)) for name, reason in reasons.items()}
        metafunc.parametrize("way", [pytest.param(way, id=way.name, marks=marks[way.library]) for way in chosen])


@pytest.fixture(scope="module")
def answers(
    cases: dict[str, Case], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[tuple[str, str]], list[list[int]]]:
    """Of transformers; for dtypes whose arithmetic it has not, of our own instances over shared memory."""
    case = cases["llama"]
    known = {EXACT: case.answers[:NUM_PROMPTS]}

    def told(dtypes: tuple[str, str]) -> list[list[int]]:
        if dtypes not in known:
            prefill, decode = (("--tp", str(tp), "--dtype", dtype) for tp, dtype in zip(TPS, dtypes, strict=True))
            common = (*COMMON, "--transfer", "shm")
            with apart(case.model, tmp_path_factory.mktemp("shm"), prefill=prefill, decode=decode, common=common) as it:
                known[dtypes] = alone(it, case)
        return known[dtypes]

    return told


def test_the_pairs_that_ci_runs_hold_any_two_levels_that_can_meet() -> None:
    def met(ways: tuple[Way, ...]) -> set[object]:
        return {pair for way in ways for pair in itertools.combinations(enumerate(way), 2)}

    assert met(PAIRS) == met(ALL) and len(ALL) == 80


def test_every_way_through_a_library_answers_alike(
    cases: dict[str, Case], answers: Callable[[tuple[str, str]], list[list[int]]], tmp_path: Path, way: Way
) -> None:
    case, due = cases["llama"], answers(way.dtypes)
    prefill, decode = (
        ("--tp", str(tp), "--page-size", str(size), "--num-pages", str(9600 // size), "--dtype", dtype)
        for tp, size, dtype in zip(TPS, way.pages, way.dtypes, strict=True)
    )
    mover = "decode" if way.direction == "pull" else "prefill"
    with apart(
        case.model,
        tmp_path,
        router=("--direction", way.direction, "--reserve", way.reserve),
        prefill=prefill,
        decode=decode,
        common=(*COMMON, "--transfer", way.library, "--move", way.move),
    ) as cluster:
        assert alone(cluster, case) == due
        if way.dtypes == EXACT:  # else it matters who else is there
            assert cluster.generate_all(case.prompts, NUM_TOKENS) == case.answers
        for instance in cluster.wait_idle()["instances"]:
            assert instance["num_free_pages"] == instance["num_pages"], instance
        metrics = cluster.get("/metrics")[1].decode()
        log = (tmp_path / f"{mover}.log").read_text()
    assert 'pd_router_events_total{what="repeated"} 0.0' in metrics
    assert f"goes by {way.library} (one host)" in log
    assert ("KV is packed: " in log) == (way.move == "packed")


def alone(cluster: Cluster, case: Case) -> list[list[int]]:
    """One after the other: in bfloat16 it matters how a prompt is cut, and so who else is there."""
    return [cluster.generate(prompt, NUM_TOKENS) for prompt in case.prompts[:NUM_PROMPTS]]
