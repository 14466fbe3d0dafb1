"""Drives an engine as a leader would, with plain page bookkeeping."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from pd.bench.steps import Unmoved
from pd.runtime.config import DeviceConfig, InstanceConfig, KVConfig, ModelConfig, RankConfig, StepConfig
from pd.runtime.engine.build import Engine, build
from pd.runtime.wire.plans import Chunk, SlotInit, StepKind, StepPlan
from pd.runtime.wire.values import Role, Sampling, Token
from pd.transfer.memory import MemoryHub

PAGE = 8
NUM_PAGES = 96


def rank_config(checkpoint: Path, *, rank: int = 0, tp: int = 1, rendezvous: str = "", **model: object) -> RankConfig:
    """A small CPU rank. `model`: fields of ModelConfig, or `kv` and `device` whole."""
    kv = model.pop("kv", KVConfig(page_size=PAGE, num_pages=NUM_PAGES))
    device = model.pop("device", DeviceConfig(device="cpu", tp=tp))
    instance = InstanceConfig(
        role=Role.COLOCATED,
        name="test",
        model=ModelConfig(model=str(checkpoint), **model),
        kv=kv,
        step=StepConfig(max_running=8),
        device=device,
    )
    return RankConfig(
        rank=rank, instance=instance, epoch="e", parent=0, leader="", rendezvous=rendezvous, checkpoint=str(checkpoint)
    )


def build_engine(config: RankConfig) -> Engine:
    transport = Unmoved(me=f"test/{config.rank}", hub=MemoryHub())
    return build(config, transport, lambda done, total: None)


class Driver:
    """Gives pages out, scattered, and runs chunks; one a slot and call."""

    greedy = Sampling(max_tokens=1000, temperature=0.0)

    def __init__(self, engine: Engine, *, seed: int = 0) -> None:
        self._engine = engine
        order = torch.randperm(engine.shard.num_pages, generator=torch.Generator().manual_seed(seed))
        self._free = order.tolist()
        self._held: dict[int, list[int]] = {}
        self._admits: list[SlotInit] = []
        self._retire: list[int] = []
        self._step = 0

    def admit(self, slot: int, prompt: Sequence[int], sampling: Sampling | None = None) -> None:
        """Joins with the next step."""
        self._held[slot] = []
        self._admits.append(SlotInit(slot, tuple(prompt), len(prompt), sampling or self.greedy, ()))

    def adopt(self, init: SlotInit) -> None:
        """Joins with the next step, with pages that another slot holds and keeps."""
        self._held[init.slot] = list(init.pages)
        self._admits.append(init)

    def pages_of(self, slot: int) -> list[int]:
        return self._held[slot]

    def retire(self, slot: int) -> None:
        """Leaves with the next step; its pages are for the taking at once."""
        self._free = self._held.pop(slot) + self._free
        self._retire.append(slot)

    def run(self, *chunks: tuple[int, int, int, bool]) -> tuple[Token, ...]:
        """One step of (slot, start, stop, sample); what was sampled, in order."""
        plan = StepPlan(
            self._step,
            StepKind.MIXED,
            admits=tuple(self._admits),
            chunks=tuple(Chunk(s, a, b, self._pages(s, b), sample) for s, a, b, sample in chunks),
            retire=tuple(self._retire),
        )
        self._step += 1
        self._admits, self._retire = [], []
        return self._engine.step(plan)

    def _pages(self, slot: int, stop: int) -> tuple[int, ...]:
        missing = -(-stop // self._engine.layout.page_size) - len(self._held[slot])
        new = [self._free.pop() for _ in range(missing)]
        self._held[slot] += new
        return tuple(new)


def generate(
    engine: Engine, prompt: Sequence[int], num_tokens: int, *, pieces: Sequence[int] = (), logprobs: int | None = None
) -> list[Token]:
    """Greedy answer to one request, alone. `pieces`: lengths of the prompt's chunks; the rest of it comes last."""
    driver = Driver(engine)
    driver.admit(0, prompt, Sampling(max_tokens=num_tokens, temperature=0.0, logprobs=logprobs))
    start = 0
    for length in pieces:
        driver.run((0, start, start + length, False))
        start += length
    tokens = list(driver.run((0, start, len(prompt), True)))
    for position in range(len(prompt), len(prompt) + num_tokens - 1):
        tokens += driver.run((0, position, position + 1, True))
    driver.retire(0)
    driver.run()
    return tokens


def ids_of(tokens: Sequence[Token]) -> list[int]:
    return [token.id for token in tokens]


def logprobs_of(token: Token) -> Tensor:
    """By token id, of a token sampled with logprobs=vocabulary."""
    ids, values = zip(*token.top, strict=True)
    return torch.tensor(values)[torch.tensor(ids).argsort()]


def prompt_of(length: int, *, seed: int, vocab_size: int) -> list[int]:
    return torch.randint(vocab_size, (length,), generator=torch.Generator().manual_seed(seed)).tolist()
