"""Stop strings: found wherever the pieces are cut, and no part of one is let out."""

from __future__ import annotations

import random

import pytest

from pd.runtime.front.stops import StopFinder


def reference(text: str, stops: tuple[str, ...], *, include: bool) -> tuple[str, bool]:
    """Letter by letter: the first stop that the text so far ends with."""
    for end in range(1, len(text) + 1):
        ended = [stop for stop in stops if text[:end].endswith(stop)]
        if ended:
            return text[: end if include else end - max(map(len, ended))], True
    return text, False


def run(pieces: list[str], stops: tuple[str, ...], *, include: bool) -> tuple[list[str], bool]:
    finder = StopFinder(stops, include=include)
    out = []
    for piece in pieces:
        text, is_found = finder.feed(piece)
        out.append(text)
        if is_found:
            return out, True
    return [*out, finder.flush()], False


def cut(text: str, dice: random.Random) -> list[str]:
    marks = sorted(dice.randrange(len(text) + 1) for _ in range(dice.randrange(6)))
    return [text[a:b] for a, b in zip([0, *marks], [*marks, len(text)], strict=True)]


@pytest.mark.parametrize("seed", range(300))
def test_outcome_is_the_reference_for_any_cut_and_nothing_of_a_stop_leaks(seed: int) -> None:
    dice = random.Random(seed)
    stops = tuple("".join(dice.choices("ab", k=dice.randrange(1, 5))) for _ in range(dice.randrange(1, 4)))
    text = "".join(dice.choices("abc", weights=(3, 3, 1), k=dice.randrange(20)))
    include = dice.random() < 0.3
    expected, is_found = reference(text, stops, include=include)
    out, found = run(cut(text, dice), stops, include=include)
    assert ("".join(out), found) == (expected, is_found), f"seed {seed}: {text!r} {stops}"


def test_beginning_of_a_stop_is_held_back_until_it_is_none() -> None:
    finder = StopFinder(("STOP",))
    assert finder.feed("xS") == ("x", False)
    assert finder.feed("T") == ("", False)
    assert finder.feed("Y") == ("STY", False)
    assert finder.feed("ST") == ("", False)
    assert finder.flush() == "ST"


def test_text_that_cannot_be_a_stop_is_not_held() -> None:
    assert StopFinder(("\n\n", "END")).feed("hello") == ("hello", False)


def test_stop_first_complete_wins_over_one_that_began_before() -> None:
    assert StopFinder(("abcd", "bc")).feed("xabcd") == ("xa", True)
