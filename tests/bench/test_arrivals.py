"""Arrivals have the rate and the burstiness they say."""

from __future__ import annotations

import statistics
from itertools import islice, pairwise

import pytest

from pd.bench import specs
from pd.bench.load import arrivals

NUM = 20_000


def times(text: str, rate: float | None = 4.0, num: int = NUM, own: tuple[float | None, ...] = ()) -> list[float]:
    spec = specs.spec("--arrival", text, arrivals.KINDS)
    return list(islice(arrivals.times(spec, rate, seed=1, own=own), num))


def variation(found: list[float]) -> float:
    """Standard deviation over mean, of the gaps."""
    gaps = [after - before for before, after in pairwise(found)]
    return statistics.stdev(gaps) / statistics.mean(gaps)


@pytest.mark.parametrize(
    ("text", "wanted"), [("poisson", 1.0), ("gamma,shape=0.25", 2.0), ("gamma,shape=4", 0.5), ("constant", 0.0)]
)
def test_the_rate_is_kept_and_the_burstiness_is_as_named(text: str, wanted: float) -> None:
    found = times(text)
    assert NUM / found[-1] == pytest.approx(4.0, rel=0.04)
    assert variation(found) == pytest.approx(wanted, abs=0.05)


def test_the_same_seed_gives_the_same_times() -> None:
    assert times("poisson", num=10) == times("poisson", num=10)


def test_a_ramp_goes_from_one_rate_to_another_and_stays() -> None:
    found = times("ramp,to=40,over=200", rate=2.0)

    def rate(start: float, stop: float) -> float:
        return sum(start <= at_s < stop for at_s in found) / (stop - start)

    assert rate(0, 20) == pytest.approx(2 + 38 * 0.05, rel=0.4)
    assert rate(90, 110) == pytest.approx(21, rel=0.15)
    assert rate(220, 400) == pytest.approx(40, rel=0.05)


def test_a_trace_keeps_its_times_scaled() -> None:
    assert times("trace,scale=2", None, own=(1.0, 4.0, 2.0)) == [0.5, 1.0, 2.0]


@pytest.mark.parametrize(
    ("text", "rate", "says"),
    [
        ("poisson", None, "--arrival poisson needs a --rate"),
        ("ramp", 1.0, "--arrival ramp needs to=RATE"),
        ("gamma,shape=0", 1.0, "--arrival gamma: shape=0, must be a number above 0"),
        ("trace", None, "--arrival trace needs a dataset with times"),
    ],
)
def test_what_makes_no_sense_is_refused(text: str, rate: float | None, says: str) -> None:
    with pytest.raises(ValueError) as caught:
        times(text, rate)
    assert str(caught.value).startswith(says)
