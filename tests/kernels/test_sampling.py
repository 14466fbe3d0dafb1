"""Penalties, floors, the draw and the grammar's mask do what the engine's sampler does, which is their first reader."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from pd.kernels import floors, grammar_mask, penalties, race
from pd.runtime.engine import noise
from tests.kernels.bench import randn

SEEDS = (0, 1, 2**31, 2**63 - 1, -1, -(2**63))
"""As signed bits; the unsigned 64-bit seeds' extremes."""


def rows(values: list[float], device: torch.device, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.tensor(values, dtype=dtype, device=device)


@pytest.mark.parametrize("num_vocab", [1, 7, 1003, 70000])
def test_the_draw_is_the_engines_own(num_vocab: int, device: torch.device) -> None:
    """`noise.race`, whose words `tests/engine` holds against Philox in Python's integers."""
    logits = randn(len(SEEDS), num_vocab, seed=num_vocab, device=device) * 2
    floor_R = rows([-torch.inf, -torch.inf, 0.0, -1.0, 0.5, -torch.inf], device).minimum(logits.amax(1))
    seed_R = torch.tensor(SEEDS, dtype=torch.int64, device=device)
    position_R = torch.tensor([0, 1, 77, 4095, 131071, 2**31 - 1], dtype=torch.int64, device=device)
    ids = race.race(logits, floor_R, seed_R, position_R)
    assert torch.equal(ids, noise.race(logits, floor_R, seed_R, position_R))
    assert torch.equal(ids, race.reference(logits, floor_R, seed_R, position_R))


def test_the_noise_is_exact_to_float32(device: torch.device) -> None:
    """Drawn with all logits equal, the winner of 4 million cells is the one with the largest -log(e)."""
    num_rows, num_vocab = 8, 65536
    seed_R = torch.arange(num_rows, device=device) * 12345
    position_R = torch.arange(num_rows, device=device)
    logits = torch.zeros(num_rows, num_vocab, device=device)
    no_floor = torch.full((num_rows,), -torch.inf, device=device)
    expected = (-race.noise_reference(seed_R, position_R, num_vocab)).argmax(-1)
    assert torch.equal(race.race(logits, no_floor, seed_R, position_R), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_argmax_takes_the_lowest_id_on_ties(dtype: torch.dtype, device: torch.device) -> None:
    logits = randn(5, 70001, seed=1, dtype=dtype, device=device)
    logits[1, [69000, 12, 65540]] = 9.0
    logits[2] = 0.0
    logits[3] = -torch.inf
    logits[3, 70000] = -1e30
    assert race.argmax(logits).tolist() == logits.cpu().float().numpy().argmax(-1).tolist()


@pytest.mark.parametrize("seed", range(3))
def test_floors_equal_sorting(seed: int, device: torch.device) -> None:
    """Ties, filters alone and together, ones that let all or only the best live."""
    settings = [
        *((0.0, 1000, 1.0), (0.1, 1000, 1.0), (0.0, 1, 1.0), (0.0, 50, 1.0), (0.0, 999, 1.0), (0.0, 1000, 0.9)),
        *((0.0, 1000, 0.0), (0.0, 1000, 1e-9), (0.05, 40, 0.8), (1.0, 1000, 0.999), (0.0, 3, 0.5), (0.0, 1000, 0.9999)),
    ]
    logits = randn(len(settings), 1000, seed=seed, device=device) * [0.1, 3, 20][seed]
    if seed == 1:
        logits = (logits * 2).round() / 2  # many ties
    min_p_R, top_p_R = (rows([s[i] for s in settings], device) for i in (0, 2))
    top_k_R = rows([s[1] for s in settings], device, torch.int32)
    actual, expected = (f(logits, min_p_R, top_k_R, top_p_R) for f in (floors.floors, floors.reference))
    lives, should = logits >= actual[:, None], logits >= expected[:, None]
    assert torch.equal(lives, should), (lives != should).nonzero()
    assert torch.equal(actual, expected)


def test_a_floor_of_one_token_and_of_minus_infinity(device: torch.device) -> None:
    logits = rows([[-torch.inf, 2.0, -torch.inf]], device)
    floor = floors.floors(logits, rows([0.0], device), rows([2], device, torch.int32), rows([0.5], device))
    assert (logits >= floor).tolist() == [[False, True, False]]


def test_penalties_are_exact(device: torch.device) -> None:
    logits = randn(5, 1003, seed=1, device=device) * 4
    answer = torch.randint(0, 4, (6, 1003), generator=torch.Generator().manual_seed(2)).int().to(device)
    prompt = (randn(6, 1003, seed=3, device=device) > 1).to(device)
    named = {
        "row_of_N": rows([4, 0, 2], device, torch.int64),
        "history_of_N": rows([1, 5, 0], device, torch.int64),
        "strengths_3N": rows([[1.3, 1.0, 0.7], [0.5, 0.0, -0.4], [0.2, 1.5, 0.0]], device),
    }
    expected = logits.clone()
    penalties.reference(expected, (answer, prompt), **named)
    penalties.penalise(logits, (answer, prompt), **named)
    assert torch.equal(logits, expected)


def test_the_grammars_mask_forbids_what_it_does_not_name(device: torch.device) -> None:
    generator = np.random.default_rng(5)
    words = torch.from_numpy(generator.integers(-(2**31), 2**31, (2, 32)).astype(np.int32)).to(device)
    logits = randn(4, 1003, seed=5, device=device)
    expected = logits.clone()
    mask_of = rows([1, -1, 0, 1], device, torch.int32)
    grammar_mask.grammar_mask(logits, words, mask_of)
    grammar_mask.reference(expected, words, mask_of)
    assert torch.equal(logits, expected)
    allowed = np.unpackbits(words[1].cpu().numpy().view(np.uint8), bitorder="little")[:1003].astype(bool)
    assert torch.equal(logits[0].isfinite().cpu(), torch.from_numpy(allowed))
