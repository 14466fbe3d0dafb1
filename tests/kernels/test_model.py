"""A whole tiny model through the kernels answers as it does through PyTorch, and as transformers does."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import msgspec
import pytest
import torch

from pd.kernels.paged_decode import plan_splits
from pd.runtime.config import ConfigError, DeviceConfig, KVConfig
from pd.runtime.engine import operators
from pd.runtime.engine.build import Engine
from pd.runtime.engine.operators import Shapes
from pd.runtime.engine.shards import share_of
from pd.runtime.engine.spec import read_spec
from pd.runtime.engine.warm_up import idle_steps
from pd.runtime.wire.values import Sampling, Token
from tests.engine.driving import (
    NUM_PAGES,
    PAGE,
    Driver,
    build_engine,
    generate,
    ids_of,
    logprobs_of,
    prompt_of,
    rank_config,
)
from tests.engine.reference import Reference
from tests.tiny import VOCAB_SIZE, make_tiny


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """qwen3 norms its queries and keys; mistral sees a window; qwen3_moe and deepseek have experts in one layer of two;
    deepseek's attention is over latents.
    """
    folder = tmp_path_factory.mktemp("tiny")
    return {
        "qwen3": make_tiny("qwen3", folder / "qwen3", num_hidden_layers=2),
        "qwen3_moe": make_tiny("qwen3_moe", folder / "moe", num_hidden_layers=2, decoder_sparse_step=2),
        "deepseek_v2": make_tiny("deepseek_v2", folder / "v2", num_hidden_layers=2, q_lora_rank=None),
        "deepseek_v3": make_tiny("deepseek_v3", folder / "v3", num_hidden_layers=2),
        "mistral": make_tiny("mistral", folder / "mistral", num_hidden_layers=2, sliding_window=4),
    }


def engine_of(checkpoint: Path, kernels: str, device: torch.device, *, kv_dtype: str = "auto") -> Engine:
    kv = KVConfig(page_size=PAGE, num_pages=NUM_PAGES, dtype=kv_dtype)
    return build_engine(rank_config(checkpoint, kv=kv, device=DeviceConfig(device=device.type, kernels=kernels)))


def answers(engine: Engine, sampling: Sampling) -> list[list[Token]]:
    """Two requests: one is prefilled in two chunks, the second beside the other's decode; then both decode."""
    driver = Driver(engine)
    driver.admit(0, prompt_of(6, seed=1, vocab_size=VOCAB_SIZE), sampling)
    driver.run((0, 0, 4, False))
    first = list(driver.run((0, 4, 6, True)))
    driver.admit(1, prompt_of(3, seed=2, vocab_size=VOCAB_SIZE), msgspec.structs.replace(sampling, seed=99))
    both = driver.run((1, 0, 3, True), (0, 6, 7, True))
    second = [both[0]]
    first.append(both[1])
    for i in range(2):
        both = driver.run((0, 7 + i, 8 + i, True), (1, 3 + i, 4 + i, True))
        first.append(both[0])
        second.append(both[1])
    return [first, second]


@pytest.mark.parametrize("family", ["qwen3", "mistral", "qwen3_moe", "deepseek_v2", "deepseek_v3"])
def test_a_model_through_the_kernels_is_transformers(family: str, tiny: dict[str, Path], device: torch.device) -> None:
    engine = engine_of(tiny[family], "triton", device)
    assert "Triton kernels" in engine.notes.operators
    told = answers(engine, Sampling(max_tokens=9, temperature=0.0, logprobs=VOCAB_SIZE))
    engine.close()
    reference = Reference(tiny[family])
    for tokens, prompt in zip(told, ((6, 1), (3, 2)), strict=True):
        ids, logprobs = reference.generate(prompt_of(prompt[0], seed=prompt[1], vocab_size=VOCAB_SIZE), len(tokens))
        assert ids_of(tokens) == ids
        for token, expected in zip(tokens, logprobs, strict=True):
            torch.testing.assert_close(logprobs_of(token), expected, atol=2e-4, rtol=1e-3)


def test_sampled_answers_are_those_of_pytorch(tiny: dict[str, Path], device: torch.device) -> None:
    """Penalties, every filter and the dice."""
    sampling = Sampling(
        max_tokens=9,
        temperature=0.8,
        top_k=40,
        top_p=0.9,
        min_p=0.01,
        repetition_penalty=1.2,
        frequency_penalty=0.3,
        presence_penalty=0.1,
        seed=7,
    )
    told = []
    for kernels in ("triton", "torch"):
        engine = engine_of(tiny["qwen3"], kernels, device)
        told.append([ids_of(tokens) for tokens in answers(engine, sampling)])
        engine.close()
    assert told[0] == told[1]


@pytest.mark.parametrize("family", ["qwen3", "deepseek_v3"])
def test_over_float8_pages_the_kernels_answer_as_pytorch(
    family: str, tiny: dict[str, Path], device: torch.device
) -> None:
    told, prompt = [], prompt_of(5, seed=1, vocab_size=VOCAB_SIZE)
    for kernels in ("triton", "torch"):
        engine = engine_of(tiny[family], kernels, device, kv_dtype="fp8_e4m3")
        told.append(generate(engine, prompt, 3, logprobs=VOCAB_SIZE))
        engine.close()
    assert ids_of(told[0]) == ids_of(told[1])
    for token, expected in zip(*told, strict=True):  # a K on the border between two codes may take the other
        torch.testing.assert_close(logprobs_of(token), logprobs_of(expected), atol=0.02, rtol=0)


@pytest.mark.parametrize("family", ["mistral", "deepseek_v3"])
def test_idle_steps_compile_what_serving_launches_and_leave_the_pool_as_it_is(
    family: str, tiny: dict[str, Path], device: torch.device
) -> None:
    engine = engine_of(tiny[family], "triton", device)
    runner = engine._runner
    assert runner is not None
    with torch.inference_mode():
        engine.region.fill_(7)
    num_kv, widths = engine.layout.num_kv_heads, set()
    for step in idle_steps(1024, PAGE, 5, device):
        runner.run_idle(step)
        widths.add(step.table_BL.shape[1] * PAGE)
    assert (engine.region == 7).all()
    met = {plan_splits(num_kv, width, 132) for width in widths}
    assert met == {plan_splits(num_kv, pages * PAGE, 132) for pages in range(1, 1024 // PAGE + 1)} == {1, 2, 4}
    engine.close()


def shapes_of(checkpoint: Path, dtype: torch.dtype, head_dim: int | None = None) -> Shapes:
    spec = read_spec(checkpoint)
    spec = dataclasses.replace(spec, head_dim=head_dim or spec.head_dim)
    return Shapes(spec, share_of(spec, 1, 0), 64, torch.empty(0, dtype=dtype), dtype)


def test_what_the_kernels_cannot_take_is_refused_with_the_reason(tiny: dict[str, Path]) -> None:
    with pytest.raises(ConfigError, match=r"--kernels triton: they do not compute in torch.float64"):
        operators.choose("triton", shapes_of(tiny["qwen3"], torch.float64))
    with pytest.raises(ConfigError, match="heads of 320 elements are larger than 256"):
        operators.choose("triton", shapes_of(tiny["qwen3"], torch.float32, head_dim=320))
    shapes = shapes_of(tiny["deepseek_v3"], torch.float32)
    assert shapes.spec.latent is not None and shapes.spec.experts is not None
    wider = dataclasses.replace(shapes.spec, latent=dataclasses.replace(shapes.spec.latent, rank=640))
    with pytest.raises(ConfigError, match="latents of 640 elements are larger than 512"):
        operators.choose("triton", dataclasses.replace(shapes, spec=wider))
    thirds = dataclasses.replace(shapes.spec, experts=dataclasses.replace(shapes.spec.experts, num_groups=3))
    with pytest.raises(ConfigError, match="3 groups of experts are no power of two"):
        operators.choose("triton", dataclasses.replace(shapes, spec=thirds))


def test_auto_on_a_cpu_is_pytorch(tiny: dict[str, Path]) -> None:
    chosen = operators.choose("auto", shapes_of(tiny["qwen3"], torch.float32))
    assert "Triton" not in chosen.note
