"""Our figures are `vllm bench serve`'s on the same streams: recorded from vLLM's own code, in vllm_figures.json."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pd.bench.load import goals
from pd.bench.load.metrics import Spread, Summary, summarize
from pd.bench.load.outcome import Outcome

RECORDED = json.loads((Path(__file__).parent / "vllm_figures.json").read_text())
FIGURES = RECORDED["figures"]


def summary() -> Summary:
    outcomes = [
        Outcome(
            index,
            stream["sent"],
            sent_s=stream["sent"],
            chunks_s=stream["chunks"],
            num_asked=100,
            num_prompt=stream["prompt"],
            num_answer=stream["tokens"],
            error=None if stream["ok"] else "disconnected",
        )
        for index, stream in enumerate(RECORDED["streams"])
    ]
    return summarize(outcomes, goals.parse("ttft:400,tpot:60"), seconds=12.5)


def test_rates_and_goodput_are_vllms() -> None:
    found = summary()
    assert (found.num_ok, sum(found.errors.values())) == (FIGURES["completed"], FIGURES["failed"])
    assert (found.prompt_tokens, found.answer_tokens) == (FIGURES["total_input"], FIGURES["total_output"])
    assert found.requests_s == pytest.approx(FIGURES["request_throughput"])
    assert found.answer_tokens_s == pytest.approx(FIGURES["output_throughput"])
    assert found.goodput_s == pytest.approx(FIGURES["request_goodput"])


@pytest.mark.parametrize(("ours", "theirs"), [("ttft", "ttft"), ("itl", "itl"), ("tpot", "tpot"), ("e2e", "e2el")])
def test_latencies_are_vllms(ours: str, theirs: str) -> None:
    spread: Spread = getattr(summary(), ours)
    wanted = [FIGURES[f"mean_{theirs}_ms"], *(value for _, value in FIGURES[f"percentiles_{theirs}_ms"])]
    found = [spread.mean, spread.p50, spread.p90, spread.p95, spread.p99]
    assert [value * 1e3 for value in found] == pytest.approx(wanted)
