"""A model that does not fit is told what it needs, what there is, and which options help."""

from __future__ import annotations

import pytest

from pd.runtime.config import ConfigError
from pd.runtime.engine.room import Room

GIB = 1 << 30


def room(weights: int) -> Room:
    return Room("cuda:1 (H200)", free=70 * GIB, whole=140 * GIB, weights=weights, tp=2)


def test_weights_that_do_not_fit() -> None:
    with pytest.raises(ConfigError) as fault:
        room(75 * GIB).check_weights()
    assert str(fault.value) == (
        "the model does not fit: a rank of tp 2 needs 75.0 GiB for weights, "
        "cuda:1 (H200) has 70.0 GiB free of 140.0 GiB"
    )
    assert "--tp" in fault.value.hint and "CUDA_VISIBLE_DEVICES" in fault.value.hint
    room(69 * GIB).check_weights()


def test_a_pool_that_is_too_small() -> None:
    fault = room(69 * GIB).pool_fault(100, page_size=16, page_nbytes=2 << 20, max_model_len=32768)
    assert str(fault) == (
        "the KV pool is too small: 100 pages of 16 tokens; max_model_len is 32768, which takes 2048 pages, 4.0 GiB a "
        "rank of tp 2. cuda:1 (H200) had 70.0 GiB free before 69.0 GiB of weights"
    )
    assert all(option in fault.hint for option in ("--kv-memory", "--num-pages", "--max-model-len", "--tp"))


def test_a_pool_without_a_page_says_what_one_takes() -> None:
    fault = room(69 * GIB).pool_fault(0, page_size=16, page_nbytes=2 << 20, max_model_len=None)
    assert "0 pages of 16 tokens; at least one is needed, 2.0 MiB a rank of tp 2." in str(fault)
    fault = room(69 * GIB).pool_fault(0, page_size=16, page_nbytes=2 << 20, max_model_len=9)
    assert "max_model_len is 9, which takes 1 page, 2.0 MiB a rank" in str(fault)
