"""Paged attention, in C++ and in plain PyTorch, is softmax(q·k)·v over what each token may see."""

from __future__ import annotations

import dataclasses
import random
from pathlib import Path

import pytest
import torch
from torch import Tensor

from pd.runtime.engine.attention import Attention
from pd.runtime.engine.cpu_attention import NativeAttention
from pd.runtime.engine.inputs import Slots, StepInputs
from pd.runtime.engine.kv_pool import make_pool
from pd.runtime.engine.shards import RankShare, share_of
from pd.runtime.engine.spec import ModelSpec, read_spec
from pd.runtime.wire.plans import Chunk, SlotInit
from pd.runtime.wire.values import Sampling
from pd.transfer.float8 import E4M3, cast
from pd.transfer.layout import DEFAULT_ORDER, KVLayout, tp_shards
from pd.transfer.memory import MemoryHub, MemoryTransport
from tests.engine.exact import needs_cpp
from tests.tiny import make_tiny

# T tokens, H query heads, K kv heads, E head size, X context

HEAD_DIM, NUM_PAGES, MAX_LEN = 8, 128, 400
ORDERS = (
    DEFAULT_ORDER,
    ("layer", "kv", "page", "token", "head", "dim"),
    ("layer", "page", "kv", "head", "token", "dim"),
)


both = pytest.mark.parametrize("use_native", [False, pytest.param(True, marks=needs_cpp)])


@pytest.fixture(scope="module")
def spec(tmp_path_factory: pytest.TempPathFactory) -> ModelSpec:
    return read_spec(make_tiny("llama", Path(tmp_path_factory.mktemp("llama"))))


def dense(q_HE: Tensor, keys_XKE: Tensor, values_XKE: Tensor, kv_head_of_query: tuple[int, ...]) -> Tensor:
    """One token's attention to all of the context, in float64."""
    heads = list(kv_head_of_query)
    keys_XHE, values_XHE = keys_XKE.double()[:, heads], values_XKE.double()[:, heads]
    weights_HX = torch.einsum("HE,XHE->HX", q_HE.double() * HEAD_DIM**-0.5, keys_XHE).softmax(-1)
    return torch.einsum("HX,XHE->HE", weights_HX, values_XHE).float()


class Bench:
    """A pool of random KV, requests scattered over it, and the queries of one step."""

    def __init__(self, spec: ModelSpec, share: RankShare, *, seed: int, window: int | None) -> None:
        dice, generator = random.Random(seed), torch.Generator().manual_seed(seed)
        self.share, self.window = share, window
        self.spec = dataclasses.replace(spec, windows=(window,) * spec.num_layers)
        page_size = dice.choice([1, 8, 16])
        layout = KVLayout(2, 3, HEAD_DIM, page_size, "float32", order=dice.choice(ORDERS))
        shard = tp_shards(layout, 9, share.tp, -(-NUM_PAGES * 16 // page_size))[share.rank]
        transport = MemoryTransport(me="a", hub=MemoryHub())
        pool = make_pool(layout, shard, dtype=torch.float32, device=torch.device("cpu"), transport=transport)
        self.pools = pool.layers[1]
        for tensor in self.pools:
            tensor.copy_(torch.randn(tensor.shape, generator=generator))
        self.page_size = page_size
        self.chunks, self.tables = self._requests(dice, shard.num_pages)
        num_rows = sum(c.stop - c.start for c in self.chunks)
        self.q_THE = torch.randn(num_rows, len(share.query_heads), HEAD_DIM, generator=generator)

    def _requests(self, dice: random.Random, num_pages: int) -> tuple[list[Chunk], list[list[int]]]:
        free, chunks, tables = dice.sample(range(num_pages), num_pages), [], []
        for slot in range(5):
            start = dice.choice([0, 1, 15, 16, dice.randrange(100)])
            stop = start + dice.choice([1, 1, 2, 17, 300])
            table = [free.pop() for _ in range(-(-stop // self.page_size))]
            chunks.append(Chunk(slot, start, stop, tuple(table)))
            tables.append(table)
        return chunks, tables

    def inputs(self) -> StepInputs:
        slots = Slots(num_slots=8, max_model_len=MAX_LEN, page_size=self.page_size, device=torch.device("cpu"))
        for chunk in self.chunks:
            slots.admit(SlotInit(chunk.slot, (1,) * chunk.stop, 1, Sampling(max_tokens=1), ()))
        return slots.prepare(self.chunks)

    def expected(self) -> Tensor:
        """In the step's order: chunks of one token first."""
        rows = []
        for chunk in sorted(self.chunks, key=lambda c: c.stop - c.start > 1):
            pages = torch.tensor(self.tables[chunk.slot])
            keys_XKE, values_XKE = (pool[pages].transpose(1, 2).flatten(0, 1) for pool in self.pools)
            for position in range(chunk.start, chunk.stop):
                first = 0 if self.window is None else max(0, position + 1 - self.window)
                seen = slice(first, position + 1)
                q_HE = self.q_THE[len(rows)]
                rows.append(dense(q_HE, keys_XKE[seen], values_XKE[seen], self.share.kv_head_of_query))
        return torch.stack(rows)

    def actual(self, *, use_native: bool) -> Tensor:
        max_context = -(-MAX_LEN // self.page_size) * self.page_size
        if use_native:
            return NativeAttention(self.spec, self.share)(self.q_THE, self.pools, self.inputs(), window=self.window)
        kv_dtype = self.pools[0].dtype
        attention = Attention(self.spec, self.share, max_context=max_context, like=self.q_THE, kv_dtype=kv_dtype)
        return attention(self.q_THE, self.pools, self.inputs(), window=self.window)


@both
@pytest.mark.parametrize("seed", range(12))
def test_ragged_step_equals_dense_attention(seed: int, use_native: bool, spec: ModelSpec) -> None:
    tp = [1, 2, 4, 8][seed % 4]
    window = [None, 1, 7, 40][seed // 3]
    bench = Bench(spec, share_of(spec, tp, seed % tp), seed=seed, window=window)
    torch.testing.assert_close(
        bench.actual(use_native=use_native), bench.expected(), atol=2e-6, rtol=2e-5, msg=lambda m: f"seed {seed}: {m}"
    )


@both
@pytest.mark.parametrize("seed", range(3))
def test_a_float8_pool_is_read_as_its_values(seed: int, use_native: bool, spec: ModelSpec) -> None:
    bench = Bench(spec, share_of(spec, 2, seed % 2), seed=seed, window=[None, 7, 40][seed])
    narrow = tuple(cast(pool, E4M3) for pool in bench.pools)
    bench.pools = tuple(pool.float() for pool in narrow)
    due = bench.actual(use_native=use_native)
    bench.pools = narrow
    assert torch.equal(bench.actual(use_native=use_native), due)
