"""`pd bench compare` finds the rate at which each server breaks, and says how sure it is of the ratio."""

from __future__ import annotations

import random
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from pd.bench.compare.command import _Comparison, compare
from pd.bench.compare.curve import Capacity, attainment, capacity, ratio
from pd.bench.compare.shape import Shape, foreign, ours, running
from pd.bench.lines import read, written
from pd.bench.load.plan import check
from pd.bench.options import CompareOptions
from pd.bench.specs import cores, ranks
from pd.runtime.config import ConfigError


def run(share: float, num: int = 100) -> list[bool]:
    """`share` of them met the goals, evenly spread."""
    return [int((index + 1) * share) > int(index * share) for index in range(num)]


def test_capacity_lies_where_attainment_falls_below_the_target() -> None:
    curve = {1.0: [run(1.0), run(1.0)], 2.0: [run(0.95)], 4.0: [run(0.75)]}
    assert capacity(curve, 0.9) == Capacity(pytest.approx(2.5))  # type: ignore[arg-type]
    assert capacity(curve, 0.5) == Capacity(4.0, is_least=True)
    assert str(capacity(curve, 0.5)) == "at least 4.00"
    assert capacity({1.0: [run(0.5)]}, 0.9) == Capacity(1.0, is_most=True)
    assert attainment([run(1.0), run(0.5)]) == 0.75


def test_the_ratios_interval_holds_it_and_narrows_with_more_requests() -> None:
    seed = random.randrange(1 << 30)
    dice = random.Random(seed)

    def sampled(curve: dict[float, float], num: int) -> dict[float, list[list[bool]]]:
        return {rate: [[dice.random() < share for _ in range(num)]] for rate, share in curve.items()}

    fast, slow = {2.0: 1.0, 4.0: 0.95, 6.0: 0.6}, {1.0: 1.0, 2.0: 0.95, 3.0: 0.6}
    widths = []
    for num in (40, 1600):
        found = ratio(sampled(fast, num), sampled(slow, num), 0.8, seed=1, draws=100)
        assert found is not None and found.low <= found.value <= found.high, f"seed {seed}: {found}"
        widths.append(found.high - found.low)
    assert found.value == pytest.approx(2.0, rel=0.15), f"seed {seed}"
    assert [wide > 2 * narrow for wide, narrow in pairwise(widths)] == [True], f"seed {seed}: {widths}"


def test_there_is_no_ratio_where_one_never_met_its_goals() -> None:
    assert ratio({1.0: [run(0.1)]}, {1.0: [run(1.0)]}, 0.9, seed=0) is None
    found = ratio({1.0: [run(1.0)]}, {1.0: [run(1.0)], 2.0: [run(0.0)]}, 0.9, seed=0, draws=50)
    assert found is not None and found.is_bound


def synthetic(name: str, num_slots: int, answer_s: float) -> Shape:
    words = (sys.executable, "-m", "tests.bench.servers", "{port}", str(num_slots), str(answer_s))
    return Shape(name, words, tuple(cores("--cores", "0", [0, 1])))


async def test_the_server_of_twice_the_slots_keeps_up_with_a_higher_rate(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One answers 10 requests a second, the other 160: at 20 a second the first one's queue only grows."""
    output = tmp_path / "compare.jsonl"
    options = CompareOptions(
        slo="ttft:400", rates="4,20", repeats=1, duration=2.0, arrival="constant", dataset="random,input=5,output=5"
    )
    wanted = check(options, command="pd bench compare")
    shapes = [synthetic("narrow", 1, 0.1), synthetic("wide", 16, 0.1)]
    with written(str(output)) as lines:
        assert await _Comparison(options, wanted, lines).run("m", (4.0, 20.0), shapes) == 0
    out = capsys.readouterr().out
    assert "wide: 90 % of requests met ttft:400 up to at least 20.00 requests/s" in out
    assert "wide / narrow: " in out and "a capacity is only a bound, so try higher --rates" in out
    found = read(output)
    assert [(one["name"], one["rate"], one["options"]["seed"]) for one in found if one["kind"] == "run"] == [  # type: ignore[index]
        ("narrow", 4.0, 0),
        ("narrow", 20.0, 1),
        ("wide", 4.0, 0),
        ("wide", 20.0, 1),
    ]
    shares = [one["attainment"] for one in found if one["kind"] == "summary"]
    assert shares[0] == shares[2] == shares[3] == 1.0
    assert shares[1] < 0.8  # type: ignore[operator]


async def test_what_one_server_did_is_told_though_the_other_does_not_start(capsys: pytest.CaptureFixture[str]) -> None:
    options = CompareOptions(slo="ttft:5000", repeats=1, duration=0.5, dataset="random,input=5,output=5")
    wanted = check(options, command="pd bench compare")
    broken = Shape("broken", (sys.executable, "-c", "raise SystemExit('out of luck')"), (0,))
    with written(None) as lines:
        status = await _Comparison(options, wanted, lines).run("m", (8.0,), [synthetic("good", 4, 0.1), broken])
    out = capsys.readouterr().out
    assert status == 1
    assert "good: 90 % of requests met ttft:5000 up to at least 8.00 requests/s" in out
    assert "broken is left out of repeat 1: broken ended with status 1 before it could serve:\nout of luck" in out


async def test_a_server_that_does_not_start_is_told_with_its_last_words() -> None:
    shape = Shape("broken", (sys.executable, "-c", "print('out of luck'); raise SystemExit(3)"), (0,))
    with pytest.raises(ConfigError) as caught:
        async with running(shape, "m"):
            raise AssertionError("it runs")
    assert str(caught.value).splitlines() == ["broken ended with status 3 before it could serve:", "out of luck"]


def test_both_shapes_are_pd_serve_on_the_same_cores() -> None:
    shape = ours("apart", ["--prefill=tp=2"], cores=(0, 1), further=["--dtype=float32"])
    assert shape.on(5, "M")[1:] == [
        *("-P", "-m", "pd", "serve", "M", "--port=5", "--cores=0,1", "--prefill=tp=2", "--dtype=float32")
    ]
    other = foreign("env A=1 vllm serve {model} --port {port}", cores=(0, 1))
    assert (other.name, other.on(5, "M")) == ("vllm", ["env", "A=1", "vllm", "serve", "M", "--port", "5"])
    assert ranks(["tp=2,cores=0", "", "name=x,tp=3"]) == 6


GOOD = CompareOptions(slo="ttft:100")


@pytest.mark.parametrize(
    ("options", "error"),
    [
        (CompareOptions(), "--slo is missing: what a good answer is"),
        (replace(GOOD, rates="1,0"), "--rates is 0, must be above 0"),
        (replace(GOOD, repeats=0), "--repeats is 0, must be at least 1"),
        (replace(GOOD, target=1.5), "--target is 1.5, must be above 0 and at most 1"),
        (replace(GOOD, arrival="trace"), "--arrival trace has its own rate"),
        (replace(GOOD, cores="0,99"), "--cores names [99]; this process may use "),
        (replace(GOOD, cores="x"), "--cores is 'x', must be numbers and ranges"),
        (replace(GOOD, vs=["vllm serve"]), "--vs is 'vllm serve': it must hold {port}"),
        (replace(GOOD, model="/no/such"), "model directory /no/such does not exist"),
    ],
)
def test_wrong_use_is_told_before_anything_starts(options: CompareOptions, error: str) -> None:
    with pytest.raises(ConfigError) as caught:
        compare(options)
    assert str(caught.value).startswith(error)
