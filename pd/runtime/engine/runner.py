"""One rank's step: a plan in, sampled tokens out."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

import torch
from torch import Tensor

from pd.runtime.engine.graphs import PROGRESS_S, DecodeGraphs, capture_on_device
from pd.runtime.engine.inputs import Sampled, Slots, StepInputs
from pd.runtime.engine.kv_pool import KVPool
from pd.runtime.engine.mesh import Mesh
from pd.runtime.engine.models.llama import Llama
from pd.runtime.engine.operators import Operators
from pd.runtime.engine.sampler import Readout, Sampler
from pd.runtime.engine.staging import Download
from pd.runtime.engine.warm_up import idle_steps
from pd.runtime.wire.plans import StepPlan
from pd.runtime.wire.values import Token

log = logging.getLogger("pd.runner")

# T tokens of the step, N sampled chunks, I hidden, V vocabulary


class Launched:
    """A step whose work is queued on the device."""

    def __init__(self, readout: Readout | None, end: Download | None) -> None:
        """`end`: of the whole step."""
        self._readout = readout
        self._end = end

    def is_done(self) -> bool:
        """Whether `finish` would not wait. On a CPU always."""
        return self._end is None or self._end.is_done()

    def finish(self) -> tuple[Token, ...]:
        """Wait until its KV is in the pool. On rank 0 what was sampled, in the order of sampling chunks; else ()."""
        if self._end is not None:
            self._end.wait()
        return self._readout.tokens() if self._readout is not None else ()


class Runner:
    """Runs plans in the order given. Rank 0 samples; the others hear the tokens of it."""

    def __init__(
        self, model: Llama, pool: KVPool, mesh: Mesh, *, ops: Operators, slots: Slots, sampler: Sampler
    ) -> None:
        self._model = model
        self._pool = pool
        self._mesh = mesh
        self.ops = ops
        self._slots = slots
        self._sampler = sampler
        self._graphs: DecodeGraphs | None = None

    def take_graphs(self, max_pages: int) -> None:
        """Capture decode steps, on a GPU whose operators honour padding. All ranks together, before the first plan."""
        device = self._pool.layers[0][0].device
        if device.type == "cuda" and self.ops.pads:
            with torch.inference_mode():
                self._graphs = capture_on_device(
                    self._forward, max_batch=self._slots.num_slots, max_pages=max_pages, device=device
                )

    def warm_up(self, *, max_context: int, page_size: int, max_tokens: int) -> None:
        """On a GPU whose operators honour padding, before the first plan, all ranks together: see `warm_up`."""
        device = self._pool.layers[0][0].device
        if device.type != "cuda" or not self.ops.pads:
            return
        start = said = time.perf_counter()
        steps = idle_steps(max_context, page_size, max_tokens, device)
        for i, step in enumerate(steps, 1):
            self.run_idle(step)
            if time.perf_counter() - said > PROGRESS_S:
                said = time.perf_counter()
                log.info("compiling kernels: %d of %d kinds of steps; the next start finds them cached", i, len(steps))
        torch.cuda.synchronize(device)
        log.info("kernels are ready after %.1f s", time.perf_counter() - start)

    @torch.inference_mode()
    def run_idle(self, step: StepInputs) -> None:
        """Compute and sample a step of padding; nothing is written, nothing is kept."""
        logits_NV = self._model.logits(self._forward(step)[:1])
        if logits_NV is not None:
            self._sampler.warm_up(logits_NV)

    @torch.inference_mode()
    def launch(self, plan: StepPlan, on_kv: Callable[[int], None] | None = None) -> Launched:
        """Retire, admit, compute the chunks' KV into the pool, sample. On a GPU: queue that, and wait for nothing.

        `on_kv` hears of layers as in `Llama.forward`, but not in a captured step.
        """
        is_first = self._mesh.rank == 0
        if is_first:
            for slot in plan.retire:
                self._sampler.retire(slot)
        for init in plan.admits:
            self._slots.admit(init)
            if is_first:
                self._sampler.admit(init)
        if not plan.chunks:
            return Launched(None, None)
        inputs = self._slots.prepare(plan.chunks)
        hidden_TI = self._graphs.run(inputs) if self._graphs is not None else None
        if hidden_TI is None:
            hidden_TI = self._forward(inputs, on_kv)
        readout = None
        if inputs.sampled.slots:
            ids_N, readout = self._sample(hidden_TI[inputs.sampled.rows_N], inputs.sampled)
            self._slots.append(inputs.sampled, self._mesh.broadcast(ids_N))
        return Launched(readout, Download(hidden_TI[:0]))

    def _forward(self, inputs: StepInputs, on_kv: Callable[[int], None] | None = None) -> Tensor:
        return self._model.forward(inputs, self._pool.layers, self.ops, on_kv)

    def _sample(self, hidden_NI: Tensor, sampled: Sampled) -> tuple[Tensor, Readout | None]:
        logits_NV = self._model.logits(hidden_NI)
        if logits_NV is None:
            return torch.empty(len(sampled.slots), dtype=torch.int64, device=hidden_NI.device), None
        return self._sampler.sample(logits_NV, sampled.slots, sampled.positions)
