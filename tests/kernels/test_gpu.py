"""What only a GPU can show: captured decode steps answer as launched ones, and no step waits for the device.

That PyTorch's operators wait for none either is shown without one in tests/engine/test_no_waiting.py, and here.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from pd.runtime.config import DeviceConfig, KVConfig
from pd.runtime.engine.build import Engine
from pd.runtime.wire.plans import Chunk, SlotInit, StepKind, StepPlan
from pd.runtime.wire.values import Sampling
from tests.engine.driving import NUM_PAGES, PAGE, Driver, build_engine, ids_of, prompt_of, rank_config
from tests.tiny import VOCAB_SIZE, make_tiny

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA or ROCm device, and torch built for it"),
]
SAMPLED = Sampling(max_tokens=99, temperature=0.9, top_k=50, top_p=0.9, repetition_penalty=1.1, seed=3)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny("llama", tmp_path_factory.mktemp("tiny"))


@pytest.fixture(params=["graphs", "kernels", "torch"])
def engine(request: pytest.FixtureRequest, tiny: Path) -> Iterator[Engine]:
    kernels = "torch" if request.param == "torch" else "triton"
    engine = engine_of(tiny, kernels=kernels, graphs=request.param == "graphs")
    yield engine
    engine.close()


def engine_of(checkpoint: Path, *, graphs: bool, kernels: str = "triton", kv_dtype: str = "auto") -> Engine:
    device = DeviceConfig(device="cuda", kernels=kernels, graphs=graphs)
    kv = KVConfig(page_size=PAGE, num_pages=NUM_PAGES, dtype=kv_dtype)
    return build_engine(rank_config(checkpoint, device=device, kv=kv))


@pytest.mark.parametrize("kv_dtype", ["auto", "fp8_e4m3"])
def test_captured_steps_answer_as_launched_ones(tiny: Path, kv_dtype: str) -> None:
    """Batches of 1 to 5, so that buckets are full and padded. In float32, greedy: a padded batch's products may round
    otherwise, which only a near tie would show."""
    told = []
    for graphs in (True, False):
        engine = engine_of(tiny, graphs=graphs, kv_dtype=kv_dtype)
        driver, ids = Driver(engine), []
        for slot in range(5):
            driver.admit(slot, prompt_of(9, seed=slot, vocab_size=VOCAB_SIZE))
            ids += ids_of(driver.run((slot, 0, 9, True)))
        for batch in (5, 4, 3, 2, 1):
            for i in range(3):
                at = 9 + i + 3 * (5 - batch)
                ids += ids_of(driver.run(*((slot, at, at + 1, True) for slot in range(batch))))
        told.append(ids)
        engine.close()
    assert told[0] == told[1]


def test_launching_a_step_never_waits_for_the_device(engine: Engine) -> None:
    """Torch raises where an operation would; admission, prefill, decode and sampling all stand under that."""
    prompt = tuple(prompt_of(9, seed=1, vocab_size=VOCAB_SIZE))
    plans = [
        StepPlan(0, StepKind.PREFILL, admits=(SlotInit(0, prompt, 9, SAMPLED, (3, 5)),), chunks=(Chunk(0, 0, 9),)),
        *(StepPlan(i, StepKind.DECODE, chunks=(Chunk(0, 8 + i, 9 + i),)) for i in range(1, 5)),
    ]
    engine.step(plans[0])  # compiles
    engine.step(StepPlan(9, StepKind.IDLE, retire=(0,)))
    torch.cuda.set_sync_debug_mode("error")
    try:
        launched = [engine.launch(plan) for plan in plans]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert [len(step.finish()) for step in launched] == [1] * 5
