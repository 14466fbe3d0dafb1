"""The sampler against a plain row-by-row reading of its rules, written here in numpy."""

from __future__ import annotations

import math
import random
from collections import Counter
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from pd.runtime.engine import noise
from pd.runtime.engine.sampler import Sampler
from pd.runtime.wire.plans import SlotInit
from pd.runtime.wire.values import Sampling, Token

CPU = torch.device("cpu")
VOCAB = 1003  # not a multiple of 4, 8 or 16


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


# ---- the reference --------------------------------------------------------------------------------------------


def philox_words(counter: tuple[int, int, int, int], key: tuple[int, int]) -> list[int]:
    """Philox4x32-7 in Python's integers, from Salmon et al. 2011, section 3.2."""
    c, k = list(counter), list(key)
    for _ in range(7):
        p0, p1 = c[0] * 0xD2511F53, c[2] * 0xCD9E8D57
        c = [(p1 >> 32) ^ c[1] ^ k[0], p1 & 0xFFFFFFFF, (p0 >> 32) ^ c[3] ^ k[1], p0 & 0xFFFFFFFF]
        k = [(k[0] + 0x9E3779B9) & 0xFFFFFFFF, (k[1] + 0xBB67AE85) & 0xFFFFFFFF]
    return c


def race_times(seed: int, position: int, vocab_size: int) -> np.ndarray:
    seed %= 2**64
    words = [
        word
        for call in range((vocab_size + 3) // 4)
        for word in philox_words((call, position, 0, 0), (seed & 0xFFFFFFFF, seed >> 32))
    ]
    words32 = np.array(words[:vocab_size], dtype=np.uint32).astype(np.float32)
    uniform = np.minimum(words32 * np.float32(2**-32) + np.float32(2**-33), np.float32(1 - 2**-24))
    return -np.log1p(-uniform.astype(np.float64))


@dataclass(frozen=True, slots=True)
class Row:
    tokens: tuple[int, ...]
    num_prompt: int
    sampling: Sampling


def expected(logits: np.ndarray, row: Row) -> int:
    """One row, rule by rule, in float64 but for the edits the sampler makes in float32."""
    s, answer = row.sampling, row.tokens[row.num_prompt :]
    z = logits.astype(np.float32).copy()
    if len(answer) < s.min_tokens:
        z[[i for i in s.stop_token_ids if i < len(z)]] = -np.inf
    for i, value in s.logit_bias:
        z[i] += np.float32(value)
    for i in set(row.tokens):
        z[i] = z[i] / np.float32(s.repetition_penalty) if z[i] > 0 else z[i] * np.float32(s.repetition_penalty)
    for i, count in Counter(answer).items():
        z[i] -= np.float32(s.frequency_penalty) * np.float32(count)
        z[i] -= np.float32(s.presence_penalty)
    if s.temperature == 0:
        return int(z.argmax())
    z = z / np.float32(s.temperature)
    p = np.exp(z.astype(np.float64) - z.max())
    alive = p >= np.float64(np.float32(s.min_p)) * (1 - 1e-6)
    if s.top_k is not None and s.top_k < len(z):
        alive &= z >= np.sort(z)[-s.top_k]
    if s.top_p < 1:
        order = np.argsort(-z, kind="stable")
        mass = np.where(alive[order], p[order] / p[alive].sum(), 0)
        before = np.cumsum(mass) - mass
        last = np.nonzero((before < s.top_p) & alive[order])[0][-1]
        alive &= z >= z[order][last]
    score = np.where(alive, z.astype(np.float64) - np.log(race_times(s.seed, len(row.tokens), len(z))), -np.inf)
    return int(score.argmax())


# ---- builders -------------------------------------------------------------------------------------------------


def draw(logits: torch.Tensor, rows: list[Row], slots: list[int] | None = None) -> list[int]:
    """Sample each row once, in a fresh sampler."""
    slots = slots or list(range(len(rows)))
    sampler = Sampler(vocab_size=logits.shape[1], max_slots=64, device=CPU)
    for slot, row in zip(slots, rows, strict=True):
        sampler.admit(SlotInit(slot, row.tokens, row.num_prompt, row.sampling, ()))
    ids, readout = sampler.sample(logits, slots, [len(row.tokens) for row in rows])
    tokens = readout.tokens()
    assert ids.dtype == torch.int64
    assert [token.id for token in tokens] == ids.tolist()
    return ids.tolist()


def random_logits(seed: int, num_rows: int, vocab_size: int = VOCAB) -> torch.Tensor:
    return torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(seed)) * 3


def random_row(rng: random.Random, **fixed: object) -> Row:
    tokens = tuple(rng.randrange(VOCAB) for _ in range(rng.randint(1, 30)))
    every = {
        "max_tokens": 100,
        "seed": rng.choice([0, 1, 7, 2**32, 2**63 + 5, 2**64 - 1, rng.randrange(2**64)]),
        "temperature": rng.choice([0.0, 0.3, 1.0, 1.7]),
        "top_p": rng.choice([1.0, 0.1, 0.5, 0.95]),
        "top_k": rng.choice([None, 1, 5, 50, 5000]),
        "min_p": rng.choice([0.0, 0.05, 0.5]),
        "min_tokens": rng.choice([0, 3, 50]),
        "stop_token_ids": tuple(rng.sample(range(VOCAB + 10), rng.choice([0, 1, 400]))),
        "presence_penalty": rng.choice([0.0, 1.5, -1.0]),
        "frequency_penalty": rng.choice([0.0, 0.7, -0.5]),
        "repetition_penalty": rng.choice([1.0, 1.3, 0.8]),
        "logit_bias": tuple((rng.randrange(VOCAB), rng.uniform(-20, 20)) for _ in range(rng.choice([0, 3]))),
    }
    return Row(tokens, rng.randint(1, len(tokens)), Sampling(**{**every, **fixed}))  # type: ignore[arg-type]


PLAIN: dict[str, object] = {
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": None,
    "min_p": 0.0,
    "min_tokens": 0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
    "logit_bias": (),
}


# ---- the noise ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("word", "answers"),
    [
        (0, ("5f6fb709", "0d893f64", "4f121f81", "4f730a48")),
        (0xFFFFFFFF, ("5207ddc2", "45165e59", "4d8ee751", "8c52f662")),
    ],
)
def test_reference_philox_gives_the_known_answers_of_random123(word: int, answers: tuple[str, ...]) -> None:
    assert philox_words((word,) * 4, (word,) * 2) == [int(answer, 16) for answer in answers]


@pytest.mark.parametrize("seed", [0, 1, -1, 2**40 + 3])
@pytest.mark.parametrize("position", [0, 1, 2**31 + 7])
def test_philox_is_the_reference_word_for_word(seed: int, position: int) -> None:
    calls = torch.tensor([0, 1, 2, 12287, 2**32 - 1])
    key = (torch.tensor(seed & 0xFFFFFFFF), torch.tensor((seed >> 32) & 0xFFFFFFFF))
    got = torch.stack(noise.philox((calls, torch.tensor(position)), key), dim=-1).tolist()
    words = ((seed & 0xFFFFFFFF), (seed >> 32) & 0xFFFFFFFF)
    assert got == [philox_words((call, position, 0, 0), words) for call in calls.tolist()]


def test_race_times_are_positive_finite_and_exponential() -> None:
    times = noise.exponential(torch.arange(64), torch.arange(64) * 977, 50_000).flatten().double()
    assert bool((times > 0).all()) and bool(times.isfinite().all())
    assert abs(float(times.mean()) - 1) < 4 / math.sqrt(times.numel())
    ranked = times.sort().values
    ideal = 1 - torch.exp(-ranked)
    gap = (ideal - torch.arange(1, len(ranked) + 1) / len(ranked)).abs().max()
    assert float(gap) < 1.95 / math.sqrt(len(ranked))  # Kolmogorov-Smirnov, 0.1 %


# ---- each feature, and all of them ----------------------------------------------------------------------------


FEATURES: dict[str, dict[str, object]] = {
    "plain": {},
    "greedy": {"temperature": 0.0},
    "cool": {"temperature": 0.4},
    "top_k": {"top_k": 7},
    "top_k_over_vocabulary": {"top_k": 10**6},
    "top_p": {"top_p": 0.6},
    "tiny_top_p": {"top_p": 1e-6},
    "min_p": {"min_p": 0.1},
    "top_k_and_top_p": {"top_k": 40, "top_p": 0.9},
    "repetition": {"repetition_penalty": 1.8, "temperature": 0.0},
    "repetition_sampled": {"repetition_penalty": 1.8},
    "presence": {"presence_penalty": 2.0, "temperature": 0.0},
    "frequency": {"frequency_penalty": 2.0, "temperature": 0.0},
    "bias": {"logit_bias": ((3, 9.0), (3, 1.0), (900, -100.0))},
    "bias_and_repetition": {"logit_bias": ((5, 12.0),), "repetition_penalty": 1.5, "temperature": 0.0},
    "min_tokens": {"min_tokens": 99, "stop_token_ids": tuple(range(1000)), "temperature": 0.0},
}


@pytest.mark.parametrize("feature", FEATURES)
def test_feature_equals_the_reference(feature: str) -> None:
    rng = random.Random(feature)
    rows = [random_row(rng, **{**PLAIN, **FEATURES[feature]}) for _ in range(24)]
    logits = random_logits(len(feature), len(rows))
    assert draw(logits, rows) == [expected(z.numpy(), row) for z, row in zip(logits, rows, strict=True)]


@pytest.mark.parametrize("seed", range(8))
def test_everything_at_once_equals_the_reference(seed: int) -> None:
    rng = random.Random(seed)
    rows = [random_row(rng) for _ in range(32)]
    logits = random_logits(seed, len(rows))
    want = [expected(z.numpy(), row) for z, row in zip(logits, rows, strict=True)]
    got = draw(logits, rows)
    wrong = [(rows[i], got[i], want[i]) for i in range(len(rows)) if got[i] != want[i]]
    assert not wrong, f"seed {seed}"


@pytest.mark.parametrize("top_p", [0.2, 0.9, 0.999])
def test_top_p_looks_beyond_its_first_candidates_when_the_mass_is_flat(top_p: float) -> None:
    logits = random_logits(5, 4, 20_000) * 0.01
    rows = [Row((1,), 1, Sampling(9, seed=i, top_p=top_p)) for i in range(4)]
    assert draw(logits, rows) == [expected(z.numpy(), row) for z, row in zip(logits, rows, strict=True)]


def test_bfloat16_logits_are_sampled_as_their_float32_values_and_left_unchanged() -> None:
    rng = random.Random(1)
    rows = [random_row(rng) for _ in range(16)]
    logits = random_logits(1, 16).bfloat16()
    before = logits.clone()
    assert draw(logits, rows) == draw(logits.float(), rows)
    assert torch.equal(logits, before)


# ---- what it may and may not depend on ------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(3))
def test_a_row_gets_the_same_token_alone_in_a_batch_and_in_another_slot(seed: int) -> None:
    rng = random.Random(seed)
    rows = [random_row(rng) for _ in range(32)]
    logits = random_logits(seed, 32)
    together = draw(logits, rows)
    alone = [draw(logits[i : i + 1], [rows[i]], [63 - i])[0] for i in range(32)]
    order = rng.sample(range(32), 32)
    shuffled = draw(logits[order], [rows[i] for i in order], order)
    assert alone == together, f"seed {seed}"
    assert shuffled == [together[i] for i in order], f"seed {seed}"


def test_threads_do_not_change_tokens() -> None:
    rng = random.Random(2)
    rows = [random_row(rng, stop_token_ids=()) for _ in range(8)]
    logits = random_logits(2, 8, 60_000)
    one = draw(logits, rows)
    torch.set_num_threads(2)
    try:
        assert draw(logits, rows) == one
    finally:
        torch.set_num_threads(1)


def test_seeds_and_positions_draw_differently() -> None:
    logits = torch.zeros(1, 4096)
    by_seed = {draw(logits, [Row((1, 2), 2, Sampling(9, seed=i))])[0] for i in range(50)}
    by_high_word = {draw(logits, [Row((1, 2), 2, Sampling(9, seed=i << 32))])[0] for i in range(50)}
    by_position = {draw(logits, [Row((1,) * i, 1, Sampling(9))])[0] for i in range(1, 51)}
    assert min(len(by_seed), len(by_high_word), len(by_position)) > 45


@pytest.mark.parametrize("filters", [{}, {"top_k": 5}, {"temperature": 0.5}])
def test_tokens_follow_the_distribution(filters: dict[str, float]) -> None:
    """Chi-square over 20,000 positions of one seed; the limit is the 99.99 % quantile's normal approximation."""
    logits = torch.tensor([1.0, 0.2, -0.5, 2.0, -3.0, 0.0, 1.5, -1.0, 0.7, -8.0, 0.1])
    num_draws = 20_000
    p = logits / filters.get("temperature", 1.0)
    if "top_k" in filters:
        p = p.masked_fill(p < p.sort().values[-5], -torch.inf)
    sampling = Sampling(9, seed=12345, **filters)  # type: ignore[arg-type]
    sampler = Sampler(vocab_size=11, max_slots=1000, device=CPU)
    for slot in range(1000):
        sampler.admit(SlotInit(slot, (1,), 1, sampling, ()))
    counts = torch.zeros(11)
    for start in range(0, num_draws, 1000):
        ids, _ = sampler.sample(logits.expand(1000, 11), range(1000), range(start + 1, start + 1001))
        counts += torch.bincount(ids, minlength=11)
    want = p.softmax(-1) * num_draws
    assert float(counts[want == 0].sum()) == 0
    common = want >= 5
    chi_square = float(((counts - want)[common].square() / want[common]).sum())
    freedom = int(common.sum()) - 1
    assert chi_square < freedom + 3.72 * math.sqrt(2 * freedom) + 7, (counts, want)


# ---- a request's life -----------------------------------------------------------------------------------------


def continued(row: Row, num_tokens: int, model: torch.Tensor) -> list[int]:
    """Sample on from `row` under a bigram model: the logits of the next token are the last token's row."""
    sampler = Sampler(vocab_size=model.shape[0], max_slots=4, device=CPU)
    sampler.admit(SlotInit(2, row.tokens, row.num_prompt, row.sampling, ()))
    tokens = list(row.tokens)
    while len(tokens) < num_tokens:
        ids, _ = sampler.sample(model[tokens[-1]][None], [2], [len(tokens)])
        tokens.append(int(ids))
    return tokens


@pytest.mark.parametrize("seed", range(4))
def test_an_attempt_repeated_from_what_was_streamed_continues_the_same(seed: int) -> None:
    model = random_logits(seed, 200, 200)
    rng = random.Random(seed)
    sampling = Sampling(
        100,
        seed=seed,
        temperature=0.9,
        top_p=0.9,
        repetition_penalty=1.2,
        frequency_penalty=0.3,
        presence_penalty=0.4,
        min_tokens=12,
        stop_token_ids=tuple(range(50)),
    )
    prompt = tuple(rng.randrange(200) for _ in range(5))
    whole = continued(Row(prompt, 5, sampling), 40, model)
    for streamed in (6, 9, 20, 39):
        again = continued(Row(tuple(whole[:streamed]), 5, sampling), 40, model)
        assert again == whole, f"seed {seed} from {streamed}"


def test_sampled_tokens_are_counted_for_the_penalties() -> None:
    logits = torch.tensor([[3.0, 2.9, 0.0, 0.0]])
    tokens = continued(Row((2,), 1, Sampling(9, temperature=0, frequency_penalty=0.5)), 5, logits.expand(4, 4))
    assert tokens == [2, 0, 1, 0, 1]


def test_stop_tokens_come_only_once_min_tokens_are_there() -> None:
    logits = torch.tensor([[9.0, 8.0, 0.0]]).expand(3, 3)
    sampling = Sampling(9, temperature=0, min_tokens=2, stop_token_ids=(0,))
    assert continued(Row((2,), 1, sampling), 5, logits) == [2, 1, 1, 0, 0]


def test_a_slot_taken_again_forgets_the_one_before() -> None:
    sampler = Sampler(vocab_size=4, max_slots=1, device=CPU)
    penalised = Sampling(9, temperature=0, presence_penalty=5.0)
    logits = torch.tensor([[3.0, 2.0, 1.0, 0.0]])
    for _ in range(3):
        sampler.admit(SlotInit(0, (3,), 1, penalised, ()))
        assert [int(sampler.sample(logits, [0], [i])[0]) for i in (1, 2)] == [0, 1]
        sampler.retire(0)


def test_greedy_takes_the_lowest_id_on_ties() -> None:
    logits = torch.zeros(3, VOCAB)
    logits[1, [7, 500, 1002]] = 4.0
    logits[2, 1002] = 1.0
    for dtype in (torch.float32, torch.bfloat16):
        rows = [Row((1,), 1, Sampling(9, temperature=0))] * 3
        assert draw(logits.to(dtype), rows) == [0, 7, 1002]


def test_a_tie_with_the_last_survivor_survives_whatever_the_batch() -> None:
    """Token 0 is likeliest, 1 to 4 tie for second: top_k 2 must leave all five."""
    logits = torch.tensor([3.0, 2.0, 2.0, 2.0, 2.0, 1.0]).expand(500, 6)
    rows = [Row((1,) * (i + 1), 1, Sampling(9, top_k=2)) for i in range(50)]
    assert set(draw(logits[:50], rows)) == {0, 1, 2, 3, 4}


# ---- log-probabilities ----------------------------------------------------------------------------------------


def test_logprobs_are_of_the_raw_distribution() -> None:
    logits = random_logits(3, 3)
    sampler = Sampler(vocab_size=VOCAB, max_slots=3, device=CPU)
    odd = Sampling(9, temperature=0.5, top_k=3, presence_penalty=2.0, logit_bias=((5, 50.0),), logprobs=4)
    for slot, sampling in enumerate((odd, Sampling(9), Sampling(9, temperature=0, logprobs=0))):
        sampler.admit(SlotInit(slot, (1, 2), 1, sampling, ()))
    tokens = sampler.sample(logits, [0, 1, 2], [2, 2, 2])[1].tokens()
    raw = logits.log_softmax(-1)
    assert tokens[0].id == 5
    assert tokens[0].logprob == pytest.approx(float(raw[0, 5]), abs=1e-6)
    best = raw[0].topk(4)
    assert [i for i, _ in tokens[0].top] == best.indices.tolist()
    assert [value for _, value in tokens[0].top] == pytest.approx(best.values.tolist(), abs=1e-6)
    assert tokens[1] == Token(tokens[1].id)
    assert tokens[2] == Token(int(raw[2].argmax()), pytest.approx(float(raw[2].max()), abs=1e-6), ())
