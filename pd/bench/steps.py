"""Drives one engine by plans, as a leader drives a rank, and times each step."""

from __future__ import annotations

import time
from pathlib import Path

from pd.runtime.config import DeviceConfig, InstanceConfig, KVConfig, ModelConfig, RankConfig, StepConfig
from pd.runtime.engine.build import Engine, build
from pd.runtime.wire.plans import Chunk, SlotInit, StepKind, StepPlan
from pd.runtime.wire.values import Role, Sampling
from pd.transfer.memory import MemoryHub, MemoryTransport

_PAGE = 16
_ENDLESS = Sampling(max_tokens=1 << 30, temperature=0.0)


class Unmoved(MemoryTransport):
    """For an engine alone: its pool may lie on a GPU, since nothing of it is moved."""

    def register(self, address: int, nbytes: int, device: int | None = None) -> None:
        if device is None:
            super().register(address, nbytes)


class Steps:
    """An engine of one rank with room for `batch` requests of `length` tokens. Close it."""

    def __init__(
        self,
        checkpoint: Path,
        *,
        dtype: str,
        batch: int,
        length: int,
        device: str | DeviceConfig = "cpu",
        threads: int | None = None,
    ) -> None:
        """`device`: a name, with `threads`, or all there is to say of it."""
        self._pages = -(-length // _PAGE)
        instance = InstanceConfig(
            role=Role.COLOCATED,
            name="bench",
            model=ModelConfig(model=str(checkpoint), dtype=dtype),
            kv=KVConfig(page_size=_PAGE, num_pages=batch * self._pages),
            step=StepConfig(max_running=batch),
            device=DeviceConfig(device=device, threads=threads) if isinstance(device, str) else device,
        )
        config = RankConfig(
            rank=0, instance=instance, epoch="bench", leader="", rendezvous="", checkpoint=str(checkpoint), parent=0
        )
        self.engine: Engine = build(config, Unmoved(me="bench", hub=MemoryHub()), lambda done, whole: None)
        self._step = 0

    def prefill(self, batch: int, num_tokens: int) -> list[float]:
        """Seconds of each of `batch` prompts, a step each. Their slots stay filled until `retire`."""
        admits = tuple(
            SlotInit(
                slot,
                tuple((7 * slot + 13 * i) % 200 + 20 for i in range(num_tokens)),
                num_tokens,
                _ENDLESS,
                tuple(range(slot * self._pages, (slot + 1) * self._pages)),
            )
            for slot in range(batch)
        )
        self._run(StepPlan(self._next(), StepKind.IDLE, admits=admits))
        return [
            self._run(StepPlan(self._next(), StepKind.PREFILL, chunks=(Chunk(slot, 0, num_tokens),)))
            for slot in range(batch)
        ]

    def decode(self, batch: int, start: int, num_steps: int) -> list[float]:
        """Seconds of each step; the requests in slots 0 to batch - 1 know `start` tokens' KV."""
        return [
            self._run(
                StepPlan(
                    self._next(),
                    StepKind.DECODE,
                    chunks=tuple(Chunk(slot, start + i, start + i + 1) for slot in range(batch)),
                )
            )
            for i in range(num_steps)
        ]

    def retire(self, batch: int) -> None:
        self._run(StepPlan(self._next(), StepKind.IDLE, retire=tuple(range(batch))))

    def close(self) -> None:
        self.engine.close()

    def _next(self) -> int:
        self._step += 1
        return self._step

    def _run(self, plan: StepPlan) -> float:
        start = time.perf_counter()
        self.engine.step(plan)  # ends with the sampled tokens on the host, so the device is done
        return time.perf_counter() - start
