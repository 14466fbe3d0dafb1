"""No step of PyTorch's operators asks the device for a number, or gives it one from memory that is not pinned.

Either makes a GPU's queue run empty. Shown without one: a meta tensor has no numbers, so whoever asks for one raises;
and what comes from the host is seen on its way. On a GPU tests/kernels/test_gpu.py says the same of the kernels.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

from pd.runtime.engine.inputs import Slots
from pd.runtime.engine.kv_pool import make_pool
from pd.runtime.engine.mesh import Alone
from pd.runtime.engine.models.llama import Llama
from pd.runtime.engine.operators import Shapes, choose
from pd.runtime.engine.runner import Runner
from pd.runtime.engine.sampler import Sampler
from pd.runtime.engine.shards import layout_of, parts, share_of
from pd.runtime.engine.spec import read_spec
from pd.runtime.engine.weights import Reader, open_checkpoint
from pd.runtime.wire.plans import Chunk, SlotInit, StepKind, StepPlan
from pd.runtime.wire.values import Sampling
from pd.transfer.layout import tp_shards
from pd.transfer.memory import MemoryHub, MemoryTransport
from pd.transfer.reshard import DTYPES
from tests.tiny import VOCAB_SIZE, make_tiny

META = torch.device("meta")
PAGE, NUM_PAGES, MAX_LEN = 4, 32, 64
PLAIN = Sampling(max_tokens=9, temperature=0.0)
ALL = Sampling(
    max_tokens=9, temperature=0.7, top_k=5, top_p=0.9, min_p=0.1, min_tokens=3, stop_token_ids=(7,), seed=3,
    repetition_penalty=1.1, frequency_penalty=0.2, presence_penalty=0.3, logit_bias=((4, 1.0),), logprobs=2,
)  # fmt: skip


class FromTheHost(TorchFunctionMode):
    """Keeps who makes a device's tensor of the host's numbers, unless it is `upload`, whose memory is pinned."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_function__(
        self,
        function: Callable[..., Any],
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        made = function(*args, **(kwargs or {}))
        is_given = function in (torch.tensor, torch.as_tensor, torch.from_numpy)
        is_moved = isinstance(args[0] if args else None, torch.Tensor) and args[0].is_cpu
        if (is_given or is_moved) and isinstance(made, torch.Tensor) and made.is_meta:
            names = callers()
            if "upload" not in names:
                self.found.append(f"{function} in {names}")
        return made


def callers() -> list[str]:
    frame, names = sys._getframe(2), []
    while frame is not None and len(names) < 8:
        names.append(frame.f_code.co_name)
        frame = frame.f_back
    return names


class Nowhere(MemoryTransport):
    """Is told of memory that is none."""

    def register(self, address: int, nbytes: int, device: int | None = None) -> None:
        pass


@pytest.fixture(scope="module", params=["mistral", "qwen3_moe", "deepseek_v3"])
def tiny(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    own = {"sliding_window": 6} if request.param == "mistral" else {}
    return make_tiny(request.param, tmp_path_factory.mktemp("tiny"), num_hidden_layers=2, **own)


def runner_of(checkpoint: Path, kv_dtype: str) -> Runner:
    spec = read_spec(checkpoint)
    share = share_of(spec, 1, 0)
    reader = Reader(
        open_checkpoint(checkpoint),
        parts(spec, share),
        dtype=torch.float32,
        device=META,
        report=lambda done, total: None,
    )
    with reader:
        model = Llama(spec, share, Alone(), reader=reader, max_model_len=MAX_LEN)
    layout = layout_of(spec, page_size=PAGE, dtype=kv_dtype)
    (shard,) = tp_shards(layout, spec.num_query_heads, 1, NUM_PAGES)
    pool = make_pool(layout, shard, dtype=DTYPES[kv_dtype], device=META, transport=Nowhere(me="test", hub=MemoryHub()))
    ops = choose("torch", Shapes(spec, share, MAX_LEN, torch.empty(0, device=META), DTYPES[kv_dtype]))
    slots = Slots(num_slots=4, max_model_len=MAX_LEN, page_size=PAGE, device=META)
    sampler = Sampler(vocab_size=VOCAB_SIZE, max_slots=4, device=META, draws=ops.draws)
    return Runner(model, pool, Alone(), ops=ops, slots=slots, sampler=sampler)


@pytest.mark.parametrize("kv_dtype", ["float32", "float8_e4m3fn"])
def test_no_step_waits_for_the_device(tiny: Path, kv_dtype: str) -> None:
    runner = runner_of(tiny, kv_dtype)
    prompt = tuple(range(10))
    plans = [
        StepPlan(
            0, StepKind.PREFILL,
            admits=(SlotInit(0, prompt, 10, ALL, (1, 2, 3)), SlotInit(1, prompt, 10, PLAIN, (4, 5, 6))),
            chunks=(Chunk(0, 0, 10), Chunk(1, 0, 7, (), False)),
        ),
        StepPlan(1, StepKind.MIXED, chunks=(Chunk(0, 10, 11), Chunk(1, 7, 10))),
        StepPlan(2, StepKind.DECODE, chunks=(Chunk(0, 11, 12), Chunk(1, 10, 11))),
        StepPlan(3, StepKind.DECODE, chunks=(Chunk(1, 11, 12),), retire=(0,)),
    ]  # fmt: skip
    with FromTheHost() as mode:
        for plan in plans:
            runner.launch(plan)
    assert mode.found == []


def test_the_watch_sees_what_it_is_for() -> None:
    with FromTheHost() as mode:
        torch.tensor([1.0], device=META)
        torch.zeros(2).to(META)
    assert len(mode.found) == 2
    with pytest.raises(RuntimeError, match="meta"):
        torch.zeros(2, device=META).tolist()
    with pytest.raises((RuntimeError, NotImplementedError)):
        torch.zeros(2, device=META)[torch.zeros(2, device=META) > 0]
