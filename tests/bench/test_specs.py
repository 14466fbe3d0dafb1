"""What people write in options is read whole, or refused with the piece that is wrong."""

from __future__ import annotations

import pytest

from pd.bench import specs

KINDS = {"random": {"input": "512", "output": "64"}, "mooncake": {"scale": "1"}}


def test_counts_keep_their_order() -> None:
    assert specs.counts("--batches", "16, 1,4") == (16, 1, 4)
    assert specs.rates("--rates", "0.5,1e1") == (0.5, 10.0)


def test_a_spec_has_its_kinds_defaults() -> None:
    assert specs.spec("--dataset", "random,output=8", KINDS) == specs.Spec(
        "random", None, {"input": "512", "output": "8"}
    )
    assert specs.spec("--dataset", "mooncake:a/b.jsonl,scale=2", KINDS) == specs.Spec(
        "mooncake", "a/b.jsonl", {"scale": "2"}
    )


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("1,x", "--n is '1,x': 'x' is no whole number"),
        ("1,0", "--n is '1,0': 0 is not at least 1"),
        ("", "--n is '': '' is no whole number"),
    ],
)
def test_a_wrong_count_is_named(text: str, says: str) -> None:
    with pytest.raises(ValueError) as caught:
        specs.counts("--n", text)
    assert str(caught.value) == says


@pytest.mark.parametrize("text", ["0", "-1", "nan", "inf", "two"])
def test_a_rate_is_a_number_above_0(text: str) -> None:
    with pytest.raises(ValueError, match=f"(?s)--rate.*{text}"):
        specs.positive("--rate", text)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("ransom", "--d is 'ransom': 'ransom' must be one of random, mooncake"),
        ("random,8", "--d is 'random,8': '8' is not KEY=VALUE"),
        ("random,inptu=8", "--d is 'random,inptu=8': unknown key 'inptu'; random knows input, output"),
    ],
)
def test_a_wrong_spec_is_named(text: str, says: str) -> None:
    with pytest.raises(ValueError) as caught:
        specs.spec("--d", text, KINDS)
    assert str(caught.value) == says
