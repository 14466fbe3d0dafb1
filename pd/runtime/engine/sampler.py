"""Chooses the next token of each row, as vLLM and OpenAI define it, the same in any batch.

Rules
1. Order of a row's life, vLLM's (v1/sample/sampler.py): raw log-probabilities are read; min_tokens;
   logit_bias; repetition, frequency, presence penalty; greedy rows take the best here; temperature; min_p;
   top_k; top_p; the race.
2. A row's token is a function of its own logits, sampling, tokens and position: never of its slot, its
   batch or what was sampled for others. The dice are `noise.race`.
3. min_p, top_k and top_p each come down to a floor on the logits: tokens at or above it survive. So tokens
   tied with the last survivor survive as well (as in vLLM's top_k; its top_p keeps whichever of them its
   sort put first).
4. A row pays only for what it asks: an all-greedy batch is one argmax.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from pd.runtime.engine.draws import Draws, Filters, Penalties, torch_draws
from pd.runtime.engine.history import History
from pd.runtime.engine.staging import Download, upload
from pd.runtime.wire.plans import SlotInit
from pd.runtime.wire.values import Sampling, Token

# B rows of the step, R rows of them that are drawn at random, N rows under one treatment, V vocabulary, K
# candidates

GREEDY_BELOW = 1e-5
"""A temperature under this is greedy: vLLM's _SAMPLING_EPS."""


@dataclass(frozen=True, slots=True)
class _Slot:
    sampling: Sampling
    num_prompt: int
    seed: int  # the unsigned 64-bit seed's bits, as a signed one
    is_greedy: bool
    is_plain: bool  # nothing changes its logits
    stop_ids: tuple[int, ...]
    bias_ids: tuple[int, ...]
    bias_values: tuple[float, ...]
    history: int | None  # its row in the token counts, where it is penalised


class Sampler:
    """Owns the sampling state of every slot of one rank."""

    def __init__(self, *, vocab_size: int, max_slots: int, device: torch.device, draws: Draws | None = None) -> None:
        """`draws`: None for PyTorch's."""
        self._draws = draws or torch_draws()
        self._vocab_size = vocab_size
        self._device = device
        self._slots: dict[int, _Slot] = {}
        self._history = History(vocab_size=vocab_size, max_rows=max_slots, device=device)

    def admit(self, init: SlotInit) -> None:
        """Take a slot, free until now. Of `init.tokens` those from `num_prompt` on count as its answer so
        far.

        Stop ids and biased ids outside the vocabulary are dropped: no token has them.
        """
        assert init.slot not in self._slots, f"slot {init.slot} is taken"
        sampling = init.sampling
        bias = [(i, value) for i, value in sampling.logit_bias if 0 <= i < self._vocab_size]
        penalised = (
            sampling.repetition_penalty != 1.0 or sampling.frequency_penalty != 0.0 or sampling.presence_penalty != 0.0
        )
        stop_ids = tuple(i for i in sampling.stop_token_ids if 0 <= i < self._vocab_size)
        seed = sampling.seed % 2**64
        self._slots[init.slot] = _Slot(
            sampling=sampling,
            num_prompt=init.num_prompt,
            seed=seed - 2**64 if seed >= 2**63 else seed,
            is_greedy=sampling.temperature < GREEDY_BELOW,
            is_plain=not (bias or penalised or (sampling.min_tokens and stop_ids)),
            stop_ids=stop_ids,
            bias_ids=tuple(i for i, _ in bias),
            bias_values=tuple(value for _, value in bias),
            history=self._history.take(init.tokens, init.num_prompt) if penalised else None,
        )

    def retire(self, slot: int) -> None:
        """Give up a slot. KeyError if it is not taken."""
        history = self._slots.pop(slot).history
        if history is not None:
            self._history.give_back(history)

    def sample(self, logits_BV: Tensor, slots: Sequence[int], positions: Sequence[int]) -> tuple[Tensor, Readout]:
        """Draw one token a row: row i is slot `slots[i]`, its token's position `positions[i]` of prompt +
        answer.

        logits_BV: any float dtype, left unchanged. A slot stands at most once in `slots`.
        Returns ids_B, int64 on the device, and what tells the same on the host, with log-probabilities where
        asked for, once the device is that far. Counts the token in the slot's answer.
        """
        rows = [self._slots[slot] for slot in slots]
        ids_B = self._choose(logits_BV, rows, positions)
        self._count(ids_B, rows)
        return ids_B, self._report(logits_BV, ids_B, rows)

    def warm_up(self, logits_BV: Tensor) -> None:
        """Run every operation once on these rows; keeps nothing of it."""
        num_rows, edited_BV = len(logits_BV), logits_BV.to(torch.float32, copy=True)
        index_B, ones_3B = self._index([0] * num_rows), self._floats([[1.0] * num_rows] * 3)
        row = self._history.take((), 0)
        self._draws.penalise(edited_BV, self._history.counts(), Penalties(index_B, index_B, ones_3B))
        self._history.give_back(row)
        for logits in (logits_BV, edited_BV):
            self._draws.argmax(logits)
        floor_B = self._draws.floors(edited_BV, Filters([0.1] * num_rows, [2] * num_rows, [0.9] * num_rows))
        self._draws.race(edited_BV, floor_B, index_B, index_B)

    def _choose(self, logits_BV: Tensor, rows: list[_Slot], positions: Sequence[int]) -> Tensor:
        drawn = [i for i, row in enumerate(rows) if not row.is_greedy]
        if not drawn and all(row.is_plain for row in rows):
            return self._draws.argmax(logits_BV)
        edited_BV = logits_BV.to(torch.float32, copy=True)
        self._forbid_stops(edited_BV, rows, positions)
        self._add_bias(edited_BV, rows)
        self._penalise(edited_BV, rows)
        if not drawn:
            return self._draws.argmax(edited_BV)
        if len(drawn) == len(rows):
            return self._draw(edited_BV, rows, positions)
        ids_B = self._draws.argmax(edited_BV)
        index_R = self._index(drawn)
        drawn_ids_R = self._draw(edited_BV[index_R], [rows[i] for i in drawn], [positions[i] for i in drawn])
        return ids_B.index_copy_(0, index_R, drawn_ids_R)

    # ---- what changes logits; each changes its argument in place -----------------------------------------

    def _forbid_stops(self, logits_BV: Tensor, rows: list[_Slot], positions: Sequence[int]) -> None:
        pairs = [
            (i, stop_id)
            for i, row in enumerate(rows)
            if row.sampling.min_tokens > positions[i] - row.num_prompt
            for stop_id in row.stop_ids
        ]
        if pairs:
            index_N, ids_N = self._index([i for i, _ in pairs]), self._index([j for _, j in pairs])
            logits_BV[index_N, ids_N] = -torch.inf

    def _add_bias(self, logits_BV: Tensor, rows: list[_Slot]) -> None:
        index = [i for i, row in enumerate(rows) for _ in row.bias_ids]
        if index:
            ids_N = self._index([j for row in rows for j in row.bias_ids])
            values_N = self._floats([value for row in rows for value in row.bias_values])
            logits_BV.index_put_((self._index(index), ids_N), values_N, accumulate=True)

    def _penalise(self, logits_BV: Tensor, rows: list[_Slot]) -> None:
        index = [i for i, row in enumerate(rows) if row.history is not None]
        if not index:
            return
        asked = [rows[i].sampling for i in index]
        strengths = [[getattr(s, f"{name}_penalty") for s in asked] for name in ("repetition", "frequency", "presence")]
        penalised = Penalties(self._index(index), self._index(_histories(rows)), self._floats(strengths))
        self._draws.penalise(logits_BV, self._history.counts(), penalised)

    # ---- the draw ----------------------------------------------------------------------------------------

    def _draw(self, logits_RV: Tensor, rows: list[_Slot], positions: Sequence[int]) -> Tensor:
        asked = [row.sampling for row in rows]
        if any(s.temperature != 1.0 for s in asked):
            logits_RV.div_(self._floats([s.temperature for s in asked])[:, None])
        return self._draws.race(
            logits_RV,
            self._floors(logits_RV, asked),
            self._index([row.seed for row in rows]),
            self._index(list(positions)),
        )

    def _floors(self, logits_RV: Tensor, asked: list[Sampling]) -> Tensor:
        """The least logit of each row that min_p, top_k and top_p let live; -inf where none of them is
        asked for."""
        floor_R = torch.full((len(asked),), -torch.inf, device=self._device)
        filtered = [i for i, s in enumerate(asked) if _is_filtered(s, self._vocab_size)]
        if not filtered:
            return floor_R
        index_N = self._index(filtered)
        asked_N = [asked[i] for i in filtered]
        logits_NV = logits_RV if len(filtered) == len(asked) else logits_RV[index_N]
        filters = Filters(
            [s.min_p for s in asked_N], [_top_k(s, self._vocab_size) for s in asked_N], [s.top_p for s in asked_N]
        )
        return floor_R.index_copy_(0, index_N, self._draws.floors(logits_NV, filters))

    # ---- afterwards --------------------------------------------------------------------------------------

    def _count(self, ids_B: Tensor, rows: list[_Slot]) -> None:
        index = [i for i, row in enumerate(rows) if row.history is not None]
        if index:
            self._history.append(self._index(_histories(rows)), ids_B[self._index(index)])

    def _report(self, logits_BV: Tensor, ids_B: Tensor, rows: list[_Slot]) -> Readout:
        asked = {i: row.sampling.logprobs for i, row in enumerate(rows) if row.sampling.logprobs is not None}
        if not asked:
            return Readout(Download(ids_B), {})
        index_N = self._index(list(asked))
        logprob_NV = logits_BV[index_N].to(torch.float32).log_softmax(dim=-1)
        own_N = logprob_NV.gather(1, ids_B[index_N, None]).flatten()
        best = logprob_NV.topk(min(max(asked.values()), self._vocab_size), dim=-1)
        return Readout(Download(ids_B, own_N, best.indices, best.values), asked)

    def _index(self, values: list[int]) -> Tensor:
        return upload([np.array(values, dtype=np.int64)], self._device)[0]

    def _floats(self, values: list[float] | list[list[float]]) -> Tensor:
        return upload([np.array(values, dtype=np.float32)], self._device)[0]


class Readout:
    """What a step has sampled, on its way to the host."""

    def __init__(self, download: Download, asked: dict[int, int]) -> None:
        """`asked`: rows whose log-probabilities are wanted, and how many of the best beside their own."""
        self._download = download
        self._asked = asked

    def tokens(self) -> tuple[Token, ...]:
        """In the order of rows. Waits for the device, if it is not that far."""
        ids_B, *logprobs = self._download.wait()
        tokens = [Token(i) for i in ids_B.tolist()]
        if self._asked:
            own, top_ids, top_values = (values.tolist() for values in logprobs)
            for n, (i, num_top) in enumerate(self._asked.items()):
                top = tuple(zip(top_ids[n], top_values[n], strict=True))[:num_top]
                tokens[i] = Token(tokens[i].id, own[n], top)
        return tuple(tokens)


def _histories(rows: list[_Slot]) -> list[int]:
    return [row.history for row in rows if row.history is not None]


def _is_filtered(sampling: Sampling, vocab_size: int) -> bool:
    return sampling.top_p < 1.0 or sampling.min_p > 0.0 or _top_k(sampling, vocab_size) < vocab_size


def _top_k(sampling: Sampling, vocab_size: int) -> int:
    return min(sampling.top_k, vocab_size) if sampling.top_k and sampling.top_k > 0 else vocab_size
