"""The figures are the field's: by hand on small cases, and beside numpy."""

from __future__ import annotations

import random

import numpy
import pytest

from pd.bench.load import goals
from pd.bench.load.goals import Goals
from pd.bench.load.metrics import Spread, summarize
from pd.bench.load.outcome import INTERRUPTED, Outcome
from pd.bench.load.tables import one_line


def outcome(chunks: list[float], *, due: float = 0.0, tokens: int | None = None, error: str | None = None) -> Outcome:
    return Outcome(
        0, due, sent_s=due + 0.001, chunks_s=chunks, num_asked=100, num_prompt=10, num_answer=tokens, error=error
    )


def test_one_answers_figures() -> None:
    one = outcome([1.5, 1.6, 2.0], due=1.0, tokens=6)
    assert one.ttft_s == pytest.approx(0.5)
    assert one.gaps_s == pytest.approx([0.1, 0.4])
    assert one.tpot_s == pytest.approx((1.0 - 0.5) / 5)
    assert one.e2e_s == pytest.approx(1.0)
    assert one.late_s == pytest.approx(0.001)


def test_without_usage_a_chunk_is_a_token_and_that_is_said() -> None:
    one = outcome([1.0, 2.0])
    assert one.num_tokens == 2
    assert one.doubts() == "no usage"


def test_usage_beyond_what_was_asked_or_far_from_the_text_is_doubted() -> None:
    assert outcome([1.0], tokens=101).doubts() == "usage outside 1 to max_tokens"
    far = outcome([1.0, 2.0], tokens=50)
    far.num_text = 40
    assert far.doubts() == "usage differs from the text"
    far.num_text = 46
    assert far.doubts() is None


def test_percentiles_are_numpys() -> None:
    seed = random.randrange(1 << 30)
    dice = random.Random(seed)
    for num in (1, 2, 3, 10, 101):
        values = [dice.random() for _ in range(num)]
        spread = Spread.of(values)
        wanted = numpy.percentile(values, (50, 90, 95, 99))
        assert (spread.p50, spread.p90, spread.p95, spread.p99) == pytest.approx(tuple(wanted)), f"seed {seed}"
        assert (spread.mean, spread.max, spread.num) == pytest.approx((numpy.mean(values), max(values), num))


def test_a_run_counts_what_succeeded_and_names_what_failed() -> None:
    outcomes = [
        outcome([0.1, 0.2], tokens=2),
        outcome([0.3, 0.5], tokens=3),
        outcome([0.1], tokens=None, error="disconnected"),
        outcome([], error="status 429"),
        outcome([0.1], error=INTERRUPTED),
    ]
    found = summarize(outcomes, Goals(ttft_s=0.2), seconds=2.0)
    assert (found.num_requests, found.num_ok, found.num_interrupted) == (4, 2, 1)
    assert found.errors == {"disconnected": 1, "status 429": 1}
    assert (found.prompt_tokens, found.answer_tokens) == (20, 5)
    assert (found.requests_s, found.answer_tokens_s) == (1.0, 2.5)
    assert (found.goodput_s, found.attainment) == (0.5, 0.25)
    assert found.ttft.num == 2


def test_nothing_sent_is_zeros_and_no_attainment() -> None:
    found = summarize([], Goals(ttft_s=1.0), seconds=0.0)
    assert (found.num_requests, found.requests_s, found.attainment, found.ttft.p99) == (0, 0.0, None, 0.0)


def test_goals_are_read_in_milliseconds_or_with_their_unit() -> None:
    assert goals.parse("ttft:500,tpot:50ms, itl:0.2s,e2e:10s") == Goals(0.5, 0.05, 0.2, 10.0)
    assert str(goals.parse("tpot:50,ttft:0.5s")) == "ttft:500,tpot:50"


@pytest.mark.parametrize("text", ["", "ttft", "ttft:", "ttft:0", "ttft:-1", "foo:1", "ttft:1,ttft:2", "e2e:x"])
def test_wrong_goals_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="--slo is"):
        goals.parse(text)


def test_each_goal_is_held_by_itself() -> None:
    one = outcome([0.2, 0.3, 0.7], tokens=3)
    assert goals.parse("ttft:200,tpot:250,itl:400.1,e2e:700").are_met(one)
    for missed in ("ttft:199", "tpot:249", "itl:399", "e2e:699"):
        assert not goals.parse(missed).are_met(one)


def test_a_single_token_meets_any_pace() -> None:
    assert goals.parse("tpot:1").are_met(outcome([0.5], tokens=1))


def test_what_the_first_failure_of_a_kind_said_is_told_in_one_line() -> None:
    assert one_line('{"error": {"message": "n is\\n too much", "code": null}}') == "n is too much"
    assert one_line("<html>\n no") == "<html> no"
    assert len(one_line("x" * 300)) == 120
    assert one_line("[1]") == "[1]"
