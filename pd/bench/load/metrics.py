"""A run's figures, as the field defines them. Pure.

| figure | is |
|---|---|
| TTFT | from when a request was due to its first token |
| ITL | each gap between two chunks of tokens |
| TPOT | (latency - TTFT) / (tokens - 1), one a request; none for an answer of one token |
| E2E | from when a request was due to its last token |
| goodput | requests a second that met every goal; attainment: their part of all requests, failed ones included |
| a rate | over the run: from its start to its last answer's end |

These are vLLM's definitions (`vllm bench serve`), but for two: it counts from when a request was sent, we from when it
was due; and it takes a chat's opening chunk, which holds a role and no text, for a token.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass

from pd.bench.load.goals import Goals
from pd.bench.load.outcome import INTERRUPTED, Outcome


@dataclass(frozen=True, slots=True)
class Spread:
    """Of some seconds; zeros where there were none."""

    num: int
    mean: float
    p50: float
    p90: float
    p95: float
    p99: float
    max: float

    @staticmethod
    def of(values: Iterable[float]) -> Spread:
        ordered = sorted(values)
        if not ordered:
            return Spread(0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
        p50, p90, p95, p99 = (percentile(ordered, percent) for percent in (50, 90, 95, 99))
        return Spread(len(ordered), math.fsum(ordered) / len(ordered), p50, p90, p95, p99, ordered[-1])


@dataclass(frozen=True, slots=True)
class Summary:
    seconds: float
    num_requests: int  # sent; those the run's end cut off are not among them
    num_ok: int
    num_interrupted: int
    errors: dict[str, int]  # by kind
    prompt_tokens: int
    answer_tokens: int
    requests_s: float
    prompt_tokens_s: float
    answer_tokens_s: float
    ttft: Spread
    itl: Spread
    tpot: Spread
    e2e: Spread
    late: Spread
    goals: str
    goodput_s: float | None  # None without goals
    attainment: float | None
    doubts: dict[str, int]  # about the server's token counts

    def json(self) -> dict[str, object]:
        return asdict(self)


def summarize(outcomes: Sequence[Outcome], goals: Goals, *, seconds: float) -> Summary:
    """`seconds`: the run's length. Latencies are of the requests that succeeded."""
    counted = [outcome for outcome in outcomes if outcome.error != INTERRUPTED]
    good = [outcome for outcome in counted if outcome.error is None]
    met = sum(goals.are_met(outcome) for outcome in counted)
    prompt_tokens = sum(outcome.num_prompt or 0 for outcome in good)
    answer_tokens = sum(outcome.num_tokens for outcome in good)
    span = max(seconds, 1e-9)
    return Summary(
        seconds=seconds,
        num_requests=len(counted),
        num_ok=len(good),
        num_interrupted=len(outcomes) - len(counted),
        errors=dict(Counter(outcome.error for outcome in counted if outcome.error)),
        prompt_tokens=prompt_tokens,
        answer_tokens=answer_tokens,
        requests_s=len(good) / span,
        prompt_tokens_s=prompt_tokens / span,
        answer_tokens_s=answer_tokens / span,
        ttft=Spread.of(outcome.ttft_s for outcome in good if outcome.ttft_s is not None),
        itl=Spread.of(gap for outcome in good for gap in outcome.gaps_s),
        tpot=Spread.of(outcome.tpot_s for outcome in good if outcome.tpot_s is not None),
        e2e=Spread.of(outcome.e2e_s for outcome in good if outcome.e2e_s is not None),
        late=Spread.of(outcome.late_s for outcome in counted if outcome.late_s is not None),
        goals=str(goals),
        goodput_s=met / span if goals else None,
        attainment=met / len(counted) if goals and counted else None,
        doubts=dict(Counter(doubt for outcome in counted if (doubt := outcome.doubts()))),
    )


def percentile(ordered: Sequence[float], percent: float) -> float:
    """Of sorted values, between two by linear interpolation, as numpy does."""
    place = (len(ordered) - 1) * percent / 100
    below = math.floor(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)
