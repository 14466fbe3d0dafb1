"""KV in float8: rounded and saturated when it is written, and a model over it is one whose K and V were rounded."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from torch import Tensor

from pd.runtime.config import ConfigError, KVConfig
from pd.runtime.engine import cpu_ops
from pd.runtime.engine.build import Engine
from pd.transfer.float8 import E4M3, cast
from tests.engine.driving import NUM_PAGES, PAGE, build_engine, generate, ids_of, logprobs_of, prompt_of, rank_config
from tests.tiny import VOCAB_SIZE, make_tiny


def test_a_cast_rounds_to_nearest_even_and_saturates() -> None:
    values = {
        0.0: 0.0, 1.0: 1.0, 1.0625: 1.0, 1.1875: 1.25, -1.1: -1.125, 2**-9: 2**-9, 2**-10: 0.0, 3 * 2**-10: 2**-8,
        448.0: 448.0, 464.0: 448.0, 465.0: 448.0, -1e30: -448.0, float("inf"): 448.0,
    }  # fmt: skip
    for dtype in (torch.float32, torch.bfloat16):
        given = torch.tensor(list(values)).to(dtype)
        exact = given.float() == torch.tensor(list(values))  # bfloat16 does not have 465 and 1.1
        assert torch.equal(cast(given, E4M3).float()[exact], torch.tensor(list(values.values()))[exact])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_written_is_the_rotated_k_and_v_rounded(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    qkv = (300 * torch.randn(5, 7, 8, generator=generator)).to(dtype).split_with_sizes((3, 2, 2), dim=1)
    angles = tuple(torch.rand(5, 4, generator=generator) for _ in range(2))
    places = {"pages_T": torch.tensor([0, 0, 3, 1, 2]), "offsets_T": torch.tensor([0, 1, 3, 2, 0])}
    plain = tuple(torch.zeros(4, 2, 4, 8, dtype=dtype) for _ in range(2))
    narrow = tuple(torch.zeros(4, 2, 4, 8, dtype=E4M3) for _ in range(2))
    for pools in (plain, narrow):
        q_THE, k_TKE, v_TKE = (x.clone() for x in qkv)
        cpu_ops.rope_and_write_reference((q_THE, k_TKE, v_TKE), angles, pools, **places)
    for wide, got in zip(plain, narrow, strict=True):
        assert wide.abs().max() > 448, "something is to be saturated"
        assert torch.equal(got.float(), cast(wide, E4M3).float())


@pytest.fixture(scope="module", params=["qwen3", "deepseek_v3"])
def tiny(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(request.param, tmp_path_factory.mktemp("tiny"))


def engine_of(checkpoint: Path, kv_dtype: str) -> Engine:
    return build_engine(rank_config(checkpoint, kv=KVConfig(page_size=PAGE, num_pages=NUM_PAGES, dtype=kv_dtype)))


def rounding_engine(checkpoint: Path) -> Engine:
    """Of float32 pages, in which all that is written is rounded."""
    engine = engine_of(checkpoint, "auto")

    def write(qkv: tuple[Tensor, Tensor, Tensor], angles: tuple[Tensor, Tensor], pools: tuple[Tensor, Tensor],
              *, pages_T: Tensor, offsets_T: Tensor) -> None:  # fmt: skip
        cpu_ops.rope_and_write_reference(qkv, angles, pools, pages_T=pages_T, offsets_T=offsets_T)
        for pool in pools:
            pool[pages_T, :, offsets_T] = cast(pool[pages_T, :, offsets_T], E4M3).float()

    runner = engine._runner
    assert runner is not None
    runner.ops = dataclasses.replace(runner.ops, rope_and_write=write)
    return engine


def test_a_model_over_float8_pages_is_one_whose_k_and_v_are_rounded(tiny: Path) -> None:
    prompt = prompt_of(21, seed=4, vocab_size=VOCAB_SIZE)
    engines = engine_of(tiny, "fp8_e4m3"), rounding_engine(tiny), engine_of(tiny, "auto")
    narrow, rounding, plain = (generate(e, prompt, 8, pieces=(9,), logprobs=VOCAB_SIZE) for e in engines)
    assert engines[0].layout.dtype == "float8_e4m3fn" and engines[0].card.dtype == "float32"
    assert "float32 (KV float8_e4m3fn)" in engines[0].notes.start_up
    assert len(engines[0].region) * 4 == len(engines[2].region)
    for engine in engines:
        engine.close()
    assert ids_of(narrow) == ids_of(rounding)
    for got, due in zip(narrow, rounding, strict=True):
        torch.testing.assert_close(logprobs_of(got), logprobs_of(due), atol=1e-5, rtol=0)
    assert (logprobs_of(narrow[0]) - logprobs_of(plain[0])).abs().max() > 1e-3, "rounding shows"


def test_an_unknown_dtype_of_pages_is_named_with_the_known_ones(tiny: Path) -> None:
    with pytest.raises(ConfigError, match="kv dtype 'int4' is unknown") as fault:
        engine_of(tiny, "int4")
    assert "fp8_e4m3" in fault.value.hint
