"""One rank's step: a plan in, sampled tokens out."""

from __future__ import annotations

import torch
from torch import Tensor

from pd.runtime.engine.attention import Attention
from pd.runtime.engine.inputs import Sampled, Slots
from pd.runtime.engine.kv_pool import KVPool
from pd.runtime.engine.mesh import Mesh
from pd.runtime.engine.models.llama import Llama
from pd.runtime.engine.sampler import Sampler
from pd.runtime.wire.messages import StepPlan, Token

# T tokens of the step, N sampled chunks, I hidden, V vocabulary


class Runner:
    """Runs plans in the order given. Rank 0 samples; the others hear the tokens of it."""

    def __init__(
        self, model: Llama, pool: KVPool, mesh: Mesh, *, attention: Attention, slots: Slots, sampler: Sampler
    ) -> None:
        self._model = model
        self._pool = pool
        self._mesh = mesh
        self._attention = attention
        self._slots = slots
        self._sampler = sampler

    @torch.inference_mode()
    def step(self, plan: StepPlan) -> tuple[Token, ...]:
        """Retire, admit, compute the chunks' KV into the pool, sample. Tokens on rank 0, () elsewhere."""
        is_first = self._mesh.rank == 0
        if is_first:
            for slot in plan.retire:
                self._sampler.retire(slot)
        for init in plan.admits:
            self._slots.admit(init)
            if is_first:
                self._sampler.admit(init)
        if not plan.chunks:
            return ()
        inputs = self._slots.prepare(plan.chunks)
        hidden_TI = self._model.forward(inputs, self._pool.layers, self._attention)
        if not inputs.sampled.slots:
            return ()
        ids_N, tokens = self._sample(hidden_TI[inputs.sampled.rows_N], inputs.sampled)
        self._slots.append(inputs.sampled, self._mesh.broadcast(ids_N))
        return tokens

    def _sample(self, hidden_NI: Tensor, sampled: Sampled) -> tuple[Tensor, tuple[Token, ...]]:
        logits_NV = self._model.logits(hidden_NI)
        if logits_NV is None:
            return torch.empty(len(sampled.slots), dtype=torch.int64, device=hidden_NI.device), ()
        return self._sampler.sample(logits_NV, sampled.slots, sampled.positions)
