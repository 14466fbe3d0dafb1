"""Deltas, joined, are the whole text, and no character is ever cut."""

from __future__ import annotations

import random

import pytest
from tokenizers import Tokenizer, decoders, models

from pd.runtime.front.detokenize import ByteDetokenizer, Detokenizer, Pieces, WindowDetokenizer, spelling
from tests.front.fakes import IM_START, VOCAB_SIZE, byte_fallback, byte_level, tokens

BYTE_LEVEL = byte_level()
FALLBACK = byte_fallback()
SPECIAL = frozenset(range(IM_START - 1, VOCAB_SIZE))
TEXT = "Grüße, 世界! 👩‍👩‍👧 ok"


def fast(tokenizer: Tokenizer, skip: frozenset[int] = frozenset()) -> ByteDetokenizer:
    spell = spelling(tokenizer)
    assert spell is not None
    return ByteDetokenizer(Pieces(tokenizer, spell), skip=skip)


def deltas(detokenizer: Detokenizer, ids: list[int]) -> list[str]:
    return [*(detokenizer.feed(token_id) for token_id in ids), detokenizer.flush()]


@pytest.mark.parametrize("skip", [True, False])
@pytest.mark.parametrize("seed", range(100))
def test_random_byte_level_tokens_equal_the_full_decode(seed: int, skip: bool) -> None:
    dice = random.Random(seed)
    ids = [dice.randrange(VOCAB_SIZE + 3) for _ in range(dice.randrange(40))]
    out = deltas(fast(BYTE_LEVEL, SPECIAL if skip else frozenset()), ids)
    assert "".join(out) == BYTE_LEVEL.decode(ids, skip_special_tokens=skip), f"seed {seed}"


@pytest.mark.parametrize("seed", range(50))
def test_added_tokens_of_any_letters_equal_the_full_decode(seed: int) -> None:
    dice = random.Random(seed)
    tokenizer = byte_level()
    tokenizer.add_tokens(["é", "a b", "Ġx", "世", "½"])
    ids = [dice.randrange(VOCAB_SIZE - 3, VOCAB_SIZE + 6) for _ in range(12)]
    assert "".join(deltas(fast(tokenizer), ids)) == tokenizer.decode(ids, skip_special_tokens=False), f"seed {seed}"


def test_each_character_goes_out_whole_with_its_last_byte() -> None:
    ids = tokens(TEXT)
    out = deltas(fast(BYTE_LEVEL), ids)
    expected = [b"" for _ in ids]
    position = 0
    for letter in TEXT:
        position += len(letter.encode())
        expected[position - 1] = letter.encode()
    assert [piece.encode() for piece in out[:-1]] == expected


def test_unfinished_character_is_one_replacement_at_the_end() -> None:
    ids = tokens("a👧")[:-1]
    assert deltas(fast(BYTE_LEVEL), ids) == ["a", "", "", "", "\ufffd"]
    assert BYTE_LEVEL.decode(ids) == "a\ufffd"


@pytest.mark.parametrize("seed", range(100))
def test_byte_fallback_continues_the_prompt_as_the_full_decode(seed: int) -> None:
    """Bytes only in whole characters: rule 2 of the module."""
    dice = random.Random(seed)
    words = [[259 + dice.randrange(14)] for _ in range(8)]
    letters = [[3 + byte for byte in letter.encode()] for letter in "é世👧\n"]
    ids = [token_id for _ in range(12) for token_id in dice.choice(words + letters)]
    prompt = FALLBACK.encode("hello a").ids
    whole = FALLBACK.decode(prompt + ids)
    assert whole == FALLBACK.decode(prompt) + "".join(deltas(fast(FALLBACK), ids)), f"seed {seed}"


def test_byte_fallback_never_cuts_a_character_and_marks_malformed_bytes() -> None:
    ids = [3 + byte for byte in "世".encode()] + [3 + 0xFF] + [3 + byte for byte in "é".encode()][:1]
    assert deltas(fast(FALLBACK), ids) == ["", "", "世", "\ufffd", "", "\ufffd"]


@pytest.mark.parametrize("seed", range(40))
def test_window_equals_the_fast_way_on_whole_characters(seed: int) -> None:
    dice = random.Random(seed)
    ids = tokens("".join(dice.choices(TEXT, k=15)))
    prompt = tokens("prompt")
    out = deltas(WindowDetokenizer(BYTE_LEVEL, prompt, skip=True), ids)
    assert out == deltas(fast(BYTE_LEVEL), ids), f"seed {seed}"


def test_window_lets_malformed_bytes_out_after_a_while() -> None:
    letters = [token_id for token_id in range(256) if BYTE_LEVEL.decode([token_id]) == "\ufffd"]
    out = deltas(WindowDetokenizer(BYTE_LEVEL, [], skip=True), letters[:1] * 40)
    assert "".join(out) == "\ufffd" * 40
    assert out[8].startswith("\ufffd")


def test_decoder_that_does_more_than_join_bytes_gets_the_window() -> None:
    tokenizer = Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    assert spelling(tokenizer) is None
    tokenizer.decoder = decoders.WordPiece()
    assert spelling(tokenizer) is None
    out = deltas(WindowDetokenizer(tokenizer, [0], skip=True), [1, 0, 1])
    assert "".join(out) == " b a b"


def test_metaspace_is_a_space() -> None:
    tokenizer = Tokenizer(models.WordLevel({"▁a": 0, "b": 1}, unk_token="b"))
    tokenizer.decoder = decoders.Metaspace()
    assert deltas(fast(tokenizer), [0, 1, 0]) == [" a", "b", " a", ""]
