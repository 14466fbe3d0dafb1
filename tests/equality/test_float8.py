"""The law over float8 pages: apart answers as colocated, token for token. No reference has this arithmetic."""

from __future__ import annotations

from pathlib import Path

from tests.equality.cluster import apart, together
from tests.equality.conftest import COMMON, NUM_TOKENS, Case

FLOAT8 = (*COMMON, "--kv-cache-dtype", "fp8_e4m3")


def test_over_float8_pages_apart_answers_as_colocated(cases: dict[str, Case], tmp_path: Path) -> None:
    """All at once, then some alone and from the prefix cache. Decode's pages are larger: KV is repacked on its way."""
    case = cases["qwen3"]
    with together(case.model, tmp_path / "together", common=FLOAT8) as cluster:
        expected = cluster.generate_all(case.prompts, NUM_TOKENS)
    decode = ("--page-size", "64", "--num-pages", "200")
    with apart(case.model, tmp_path / "apart", decode=decode, common=FLOAT8) as cluster:
        assert cluster.generate_all(case.prompts, NUM_TOKENS) == expected
        assert [cluster.generate(prompt, NUM_TOKENS) for prompt in case.prompts[:6]] == expected[:6]
        assert "(KV float8_e4m3fn)" in (tmp_path / "apart" / "decode.log").read_text()
        for instance in cluster.wait_idle()["instances"]:
            assert instance["num_free_pages"] == instance["num_pages"], instance
    num_alike = sum(got[0] == due[0] for got, due in zip(expected, case.answers, strict=True))
    assert num_alike > len(expected) / 2, "and most begin as float32 does"
