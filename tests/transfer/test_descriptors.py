"""The table of descriptors in docs/protocol.md is what the plan makes of the models it names."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from pd.transfer.layout import KVKind, KVLayout, tp_shards
from pd.transfer.plan import Route, pair_up

NUM_TOKENS, PAGE = 2048, 16
NUM_PLANNED = 2
"""Pages: no two are neighbours, so each costs the same, and a request has the same for each of its pages."""
USUAL = ("layer", "kv", "page", "token", "head", "dim")
"""As many engines keep it: a tensor for K and one for V of each layer, tokens outside heads."""
MODELS = {
    "Llama-3 8B": (KVLayout(32, 8, 128, PAGE, "bfloat16"), 32),
    "Llama-3 70B": (KVLayout(80, 8, 128, PAGE, "bfloat16"), 64),
    "Qwen3-32B": (KVLayout(64, 8, 128, PAGE, "bfloat16"), 64),
    "DeepSeek-V3": (KVLayout(61, 1, 576, PAGE, "bfloat16", kind=KVKind.MLA), 128),
}
PAIRS = ((1, 1), (8, 8), (8, 4), (4, 8), (8, 3), (6, 4))


def most(model: str, tp_src: int, tp_dst: int, *, order: tuple[str, ...] | None = None) -> int:
    """Descriptors of one request, of the source rank that has most; no two of its pages are neighbours."""
    layout, num_query_heads = MODELS[model]
    layout = layout if order is None else replace(layout, order=order)
    src, dst = (tp_shards(layout, num_query_heads, tp, 2 * NUM_PLANNED) for tp in (tp_src, tp_dst))
    pages = range(0, 2 * NUM_PLANNED, 2)
    counts = [0] * tp_src
    for pair in pair_up(src, dst):
        a, b = src[pair.src], dst[pair.dst]
        counts[pair.src] += len(Route(layout, a, layout, b, pair).spans(pages, pages, 0, NUM_PLANNED * PAGE))
    return max(counts) * NUM_TOKENS // (NUM_PLANNED * PAGE)


def row(model: str) -> str:
    cells = [f"{most(model, *pair)} / {most(model, *pair, order=USUAL)}" for pair in PAIRS]
    return f"| {model} | " + " | ".join(cells) + " |"


@pytest.mark.parametrize("model", MODELS)
def test_the_documented_descriptors_are_those_of_the_plan(model: str) -> None:
    text = (Path(__file__).parents[2] / "docs" / "protocol.md").read_text()
    (documented,) = re.findall(rf"^\| {re.escape(model)} \|.*$", text, re.MULTILINE)
    assert documented == row(model)
