"""The law, whatever way KV moves: answers stay those of transformers, and a prefix that decode holds is not sent."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.equality.cluster import Cluster, apart
from tests.equality.conftest import COMMON, NUM_TOKENS, Case


class Way(NamedTuple):
    router: tuple[str, ...] = ()
    prefill: tuple[str, ...] = ()
    decode: tuple[str, ...] = ()


LARGER, ODD = ("--page-size", "64", "--num-pages", "200"), ("--page-size", "24", "--num-pages", "500")
LATE, PULL = ("--reserve", "late"), ("--direction", "pull")
WAYS = {
    "early push, larger pages": Way(prefill=("--tp", "2"), decode=LARGER),
    "late push": Way(LATE, decode=("--tp", "2")),
    "early pull, smaller pages, tcp": Way(PULL, prefill=(*LARGER, "--transfer", "tcp"), decode=("--transfer", "tcp")),
    "late pull, pages of 24 and 16": Way((*LATE, *PULL), prefill=("--tp", "3", *ODD), decode=("--tp", "2")),
}


@pytest.mark.parametrize("way", WAYS)
def test_every_way_answers_as_transformers_and_sends_no_prefix_twice(
    cases: dict[str, Case], tmp_path: Path, way: str
) -> None:
    case, chosen = cases["qwen3"], WAYS[way]
    options = {"router": chosen.router, "prefill": chosen.prefill, "decode": chosen.decode, "common": COMMON}
    with apart(case.model, tmp_path, **options) as cluster:
        assert cluster.generate_all(case.prompts, NUM_TOKENS) == case.answers  # 32 at once
        assert counted(cluster, "pd_held_tokens_total") < sum(map(len, case.prompts)) / 10, "they have little in common"
        for prompt, answer in zip(case.prompts[8:12], case.answers[8:12], strict=True):  # lengths 149, 32, 200, 97
            assert cluster.generate(prompt + answer[:10], NUM_TOKENS - 10) == answer[10:], "a conversation's next turn"
        held = counted(cluster, "pd_held_tokens_total")
        assert held >= 128 + 192 + 64, "whole pages of 64 at the least, or of 48 where they are of 24 and 16"
        for instance in cluster.wait_idle()["instances"]:
            assert instance["num_free_pages"] == instance["num_pages"], instance


def test_kv_of_another_dtype_is_converted_alike_whoever_moves_it(cases: dict[str, Case], tmp_path: Path) -> None:
    """Prefill in bfloat16, decode in float32: no reference has this arithmetic, so both ways are held to each other."""
    case, answers = cases["llama"], []
    prefill, decode = ("--dtype", "bfloat16", "--tp", "2"), ("--tp", "3", *LARGER)
    for router, mover in (((), "prefill"), (PULL, "decode")):
        logs = tmp_path / mover
        with apart(case.model, logs, router=router, prefill=prefill, decode=decode, common=COMMON) as cluster:
            # One after the other: in bfloat16 it matters how a prompt is cut, and so who else is there.
            answers.append([cluster.generate(prompt, NUM_TOKENS) for prompt in case.prompts[:12]])
            assert "KV is packed: " in (logs / f"{mover}.log").read_text()
    assert answers[0] == answers[1]
    num_alike = sum(got[0] == due[0] for got, due in zip(answers[0], case.answers[:12], strict=True))
    assert num_alike > len(answers[0]) / 2, "and most begin as float32 alone does"


def counted(cluster: Cluster, name: str) -> float:
    match = re.search(rf"^{name} (\S+)$", cluster.get("/metrics")[1].decode(), re.MULTILINE)
    assert match is not None, f"no metric {name}"
    return float(match[1])
