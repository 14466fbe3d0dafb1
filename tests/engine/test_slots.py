"""What a rank keeps of a slot between steps, and what it must not keep."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from pd.runtime.engine.build import Engine
from pd.runtime.engine.cpu_build import has_bf16_gemm
from pd.runtime.wire.plans import SlotInit, StepKind, StepPlan
from pd.runtime.wire.values import Sampling, Token
from tests.engine.driving import Driver, build_engine, generate, ids_of, prompt_of, rank_config
from tests.engine.exact import needs_cpp
from tests.tiny import VOCAB_SIZE, make_tiny


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    engine = build_engine(rank_config(make_tiny("llama", tmp_path_factory.mktemp("llama"))))
    yield engine
    engine.close()


def prompt(length: int, seed: int) -> list[int]:
    return prompt_of(length, seed=seed, vocab_size=VOCAB_SIZE)


def test_slot_and_pages_are_free_to_take_in_the_step_that_retires_them(engine: Engine) -> None:
    long, short = prompt(60, 1), prompt(9, 2)
    driver = Driver(engine)
    driver.admit(2, long)
    driver.run((2, 0, 60, True))
    driver.retire(2)
    driver.admit(2, short)
    ids = ids_of(driver.run((2, 0, 9, True)))
    for position in range(9, 14):
        ids += ids_of(driver.run((2, position, position + 1, True)))
    driver.retire(2)
    driver.run()
    assert ids == ids_of(generate(engine, short, 6))


def test_request_comes_back_with_its_answer_so_far_and_goes_on(engine: Engine) -> None:
    """A retried attempt: the prompt and the tokens already streamed are known, none of their KV is."""
    whole = ids_of(generate(engine, prompt(11, 3), 12))
    assert ids_of(generate(engine, prompt(11, 3) + whole[:5], 7)) == whole[5:]


def test_pages_filled_before_admission_are_used_as_they_are(engine: Engine) -> None:
    """As after a hand-over or with a cached prefix: only the last token is computed here."""
    tokens = prompt(20, 4)
    expected = ids_of(generate(engine, tokens, 1))
    driver = Driver(engine)
    driver.admit(0, tokens)
    driver.run((0, 0, 19, False))
    pages = tuple(driver.pages_of(0))
    init = SlotInit(1, tuple(tokens), 20, driver.greedy, pages)
    driver.adopt(init)
    assert ids_of(driver.run((1, 19, 20, True))) == expected
    driver.retire(0)
    driver.retire(1)
    driver.run()


def test_sampled_token_feeds_the_next_step_without_the_host(engine: Engine) -> None:
    """Two steps are planned before the first one's token is looked at."""
    tokens = prompt(6, 5)
    expected = ids_of(generate(engine, tokens, 3))
    driver = Driver(engine)
    driver.admit(4, tokens)
    answers = [driver.run(chunk) for chunk in ((4, 0, 6, True), (4, 6, 7, True), (4, 7, 8, True))]
    driver.retire(4)
    driver.run()
    assert [answer[0].id for answer in answers] == expected


def test_tokens_come_in_the_order_of_sampling_chunks(engine: Engine) -> None:
    prompts = {1: prompt(12, 6), 0: prompt(1, 7), 6: prompt(5, 8), 3: prompt(1, 9)}
    driver = Driver(engine)
    for slot, tokens in prompts.items():
        driver.admit(slot, tokens)
    ids = ids_of(driver.run(*((slot, 0, len(tokens), slot != 6) for slot, tokens in prompts.items())))
    for slot in prompts:
        driver.retire(slot)
    driver.run()
    assert ids == [ids_of(generate(engine, prompts[slot], 1))[0] for slot in (1, 0, 3)]


def test_step_without_chunks_answers_nothing(engine: Engine) -> None:
    assert engine.step(StepPlan(0, StepKind.IDLE)) == ()


def test_longest_request_fills_the_last_position(engine: Engine) -> None:
    """max_model_len tokens of prompt and answer: the last is sampled for the last position and never computed."""
    limit = engine.card.max_model_len
    tokens = prompt(limit - 1, 10)
    assert len(generate(engine, tokens, 1, pieces=(200, 200))) == 1


@needs_cpp
@pytest.mark.parametrize("family", ["llama", "deepseek_v3"])
def test_decode_is_the_same_bits_in_any_batch(family: str, tmp_path: Path) -> None:
    engine = build_engine(rank_config(make_tiny(family, tmp_path)))
    prompts = {slot: prompt(5 + 9 * slot, slot) for slot in range(6)}
    ask = Sampling(max_tokens=9, temperature=0.0, logprobs=5)

    def decode(slots: Sequence[int]) -> dict[int, list[Token]]:
        driver = Driver(engine, seed=len(slots))
        answers: dict[int, list[Token]] = {slot: [] for slot in slots}
        for slot in slots:
            driver.admit(slot, prompts[slot], ask)
            driver.run((slot, 0, len(prompts[slot]), True))
        for step in range(4):
            tokens = driver.run(*((s, len(prompts[s]) + step, len(prompts[s]) + step + 1, True) for s in slots))
            for slot, token in zip(slots, tokens, strict=True):
                answers[slot].append(token)
        for slot in slots:
            driver.retire(slot)
        driver.run()
        return answers

    together = decode(range(6))
    assert together == {slot: decode([slot])[slot] for slot in range(6)}
    engine.close()


@needs_cpp
@pytest.mark.parametrize(
    ("family", "dtype"), [("qwen3", "float32"), ("qwen3", "bfloat16"), ("deepseek_v3", "bfloat16")]
)
def test_an_answer_is_the_same_bits_however_its_tokens_come(family: str, dtype: str, tmp_path: Path) -> None:
    """The prompt cut anywhere; and the answer's first tokens as a part of the prompt, as after a lost instance."""
    if dtype == "bfloat16" and has_bf16_gemm():
        pytest.skip("this CPU multiplies many rows of bfloat16 in oneDNN, which rounds otherwise than our op for few")
    engine = build_engine(rank_config(make_tiny(family, tmp_path), dtype=dtype))
    try:
        tokens = prompt(90, 3)
        whole = generate(engine, tokens, 6, logprobs=5)
        assert generate(engine, tokens, 6, pieces=(1, 39, 17), logprobs=5) == whole
        assert generate(engine, tokens + ids_of(whole[:4]), 2, pieces=(33,), logprobs=5) == whole[4:]
    finally:
        engine.close()
