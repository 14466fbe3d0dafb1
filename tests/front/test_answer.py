"""One answer: its deltas do not depend on grouping, stops cut it, and what is counted is told."""

from __future__ import annotations

import random

import pytest

from pd.runtime.front.answer import Answer, Delta
from pd.runtime.front.text import Text, load_text
from pd.runtime.wire.values import Finish
from tests.front.fakes import IM_END, byte_level, emits, tokens, write_model


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Text:
    return load_text(write_model(tmp_path_factory.mktemp("model"), byte_level()))


def play(
    text: Text,
    ids: list[int],
    *,
    finish: Finish = Finish.LENGTH,
    group: int = 1,
    logprobs: bool = False,
    **options: object,
) -> tuple[list[Delta], int]:
    """The deltas up to the ending, and how many tokens were counted."""
    detokenizer = text.detokenizer([1], skip_special_tokens=True)
    answer = Answer(detokenizer, logprobs=logprobs, **options)
    deltas = []
    for emit in emits(ids, finish, group=group, logprobs=True):
        deltas.append(answer.take(emit))
        if deltas[-1].finish:
            break
    return deltas, answer.num_tokens


def joined(deltas: list[Delta]) -> str:
    return "".join(delta.text for delta in deltas)


@pytest.mark.parametrize("seed", range(60))
def test_grouping_changes_nothing(text: Text, seed: int) -> None:
    dice = random.Random(seed)
    ids = tokens("".join(dice.choices("ab世👧", k=12)))
    stop = ("ab", "世a") if dice.random() < 0.7 else ()
    finish = dice.choice([Finish.STOP, Finish.LENGTH])
    single, num_single = play(text, ids, finish=finish, stop=stop, logprobs=True)
    grouped, num_grouped = play(text, ids, finish=finish, stop=stop, logprobs=True, group=dice.randrange(2, 9))
    assert joined(single) == joined(grouped), f"seed {seed}"
    assert (num_single, single[-1].finish) == (num_grouped, grouped[-1].finish), f"seed {seed}"
    for deltas in (single, grouped):
        probs = [prob for delta in deltas for prob in delta.logprobs]
        assert [prob.token.id for prob in probs] == ids[:num_single], f"seed {seed}"


def test_stop_string_over_token_borders_cuts_and_counts_to_its_last_token(text: Text) -> None:
    deltas, num_tokens = play(text, tokens("one STOP two"), stop=("STOP",))
    assert (joined(deltas), deltas[-1].finish, num_tokens) == ("one ", "stop", 8)
    assert [delta.text for delta in deltas] == ["o", "n", "e", " ", "", "", "", ""]


def test_stop_string_may_begin_in_the_first_token(text: Text) -> None:
    deltas, num_tokens = play(text, tokens("STOP two"), stop=("STOP",))
    assert (joined(deltas), num_tokens) == ("", 4)


def test_included_stop_string_is_part_of_the_text(text: Text) -> None:
    deltas, _ = play(text, tokens("one STOP two"), stop=("STOP",), include_stop=True)
    assert joined(deltas) == "one STOP"


def test_stop_token_is_counted_and_not_spoken(text: Text) -> None:
    ids = [*tokens("hi"), tokens("!")[0]]
    deltas, num_tokens = play(text, ids, finish=Finish.STOP)
    assert (joined(deltas), deltas[-1].finish, num_tokens) == ("hi", "stop", 3)
    deltas, _ = play(text, ids, finish=Finish.STOP, include_stop=True)
    assert joined(deltas) == "hi!"


def test_last_token_of_a_full_length_is_spoken(text: Text) -> None:
    deltas, num_tokens = play(text, tokens("hi!"), finish=Finish.LENGTH)
    assert (joined(deltas), deltas[-1].finish, num_tokens) == ("hi!", "length", 3)


def test_special_tokens_are_skipped_within(text: Text) -> None:
    deltas, num_tokens = play(text, [*tokens("a"), IM_END, *tokens("b")])
    assert (joined(deltas), num_tokens) == ("ab", 3)


def test_held_beginning_of_a_stop_goes_out_at_the_end(text: Text) -> None:
    deltas, _ = play(text, tokens("one ST"), stop=("STOP",))
    assert (joined(deltas), deltas[-1].finish) == ("one ST", "length")


def test_stop_string_within_min_tokens_does_not_end(text: Text) -> None:
    deltas, num_tokens = play(text, tokens("x.y.z"), stop=(".",), min_tokens=3)
    assert (joined(deltas), num_tokens) == ("x.y", 4)


def test_logprobs_tell_where_their_token_begins(text: Text) -> None:
    deltas, _ = play(text, tokens("a世b"), logprobs=True)
    probs = [prob for delta in deltas for prob in delta.logprobs]
    assert [prob.offset for prob in probs] == [0, 1, 1, 1, 2]
    assert [len(delta.logprobs) for delta in deltas] == [1, 0, 0, 3, 1]
