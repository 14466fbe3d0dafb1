"""From a plan's numbers to one step's tensors, and what a rank remembers of its slots in between.

Rules
1. Tokens live on the device: a chunk's inputs are read from the history there, and what it samples is written
   there, so a plan for step n + 1 needs nothing from step n on the host. Page tables live on the host, where plans
   bring them.
2. Whatever the batch, a step builds its index tensors once, from numpy; nothing here is a torch call a request but
   the page lists of prefill chunks.
3. Inside a step, chunks of one token come first, whatever their order in the plan; `StepInputs.sampled` restores it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pd.runtime.wire.messages import Chunk, SlotInit

# T tokens of the step, B chunks of one token, N sampled chunks, L pages of the longest table


@dataclass(frozen=True, slots=True)
class Extend:
    """A chunk of several tokens: positions [start, stop) at rows [row, row + stop - start) of the step."""

    row: int
    start: int
    stop: int
    pages: Tensor  # of [0, stop), int64


@dataclass(frozen=True, slots=True)
class Sampled:
    """Chunks that sample, in the plan's order."""

    slots: list[int]
    positions: list[int]  # of the token to sample
    rows_N: Tensor  # each chunk's last row


@dataclass(frozen=True, slots=True)
class StepInputs:
    """Tensors of one step, dead after it."""

    tokens_T: Tensor  # int64, as all but where said
    positions_T: Tensor
    pages_T: Tensor
    offsets_T: Tensor  # token's place in its page
    num_single: int  # B: the first B rows are chunks of one token
    table_BL: Tensor  # int32
    lengths_B: Tensor  # int32: context, the row's own token included
    extends: tuple[Extend, ...]
    sampled: Sampled


class Slots:
    """A rank's requests: token history on the device, page tables on the host."""

    def __init__(self, *, num_slots: int, max_model_len: int, page_size: int, device: torch.device) -> None:
        self._page_size = page_size
        self._device = device
        # Zeroed by calloc: memory is taken as slots are used. One more than the longest request, for the token
        # sampled at its last position.
        self._history = torch.zeros(num_slots, max_model_len + 1, dtype=torch.int32, device=device)
        max_pages = -(-max_model_len // page_size)
        self._tables = np.zeros((num_slots, max_pages), dtype=np.int32)
        self._num_pages = np.zeros(num_slots, dtype=np.int64)

    def admit(self, init: SlotInit) -> None:
        tokens = torch.tensor(init.tokens, dtype=torch.int32)
        self._history[init.slot, : len(init.tokens)] = tokens.to(self._device)
        self._num_pages[init.slot] = 0
        self._add_pages(init.slot, init.pages)

    def prepare(self, chunks: Sequence[Chunk]) -> StepInputs:
        """Append the chunks' new pages to their tables and build the step's tensors. At least one chunk."""
        for chunk in chunks:
            if chunk.pages:
                self._add_pages(chunk.slot, chunk.pages)
        order = sorted(range(len(chunks)), key=lambda i: chunks[i].stop - chunks[i].start > 1)
        inner = [chunks[i] for i in order]
        slot, start, stop = np.array([(c.slot, c.start, c.stop) for c in inner], dtype=np.int64).T
        length = stop - start
        last_row = np.cumsum(length) - 1
        slots_T = np.repeat(slot, length)
        positions_T = np.arange(last_row[-1] + 1) + np.repeat(stop - 1 - last_row, length)
        pages_T = self._tables[slots_T, positions_T // self._page_size].astype(np.int64)
        num_single = int((length == 1).sum())
        positions = self._to_device(positions_T)
        return StepInputs(
            tokens_T=self._history[self._to_device(slots_T), positions].to(torch.int64),
            positions_T=positions,
            pages_T=self._to_device(pages_T),
            offsets_T=self._to_device(positions_T % self._page_size),
            num_single=num_single,
            table_BL=self._to_device(self._table(slot[:num_single], stop[:num_single])),
            lengths_B=self._to_device(stop[:num_single].astype(np.int32)),
            extends=tuple(
                Extend(int(last_row[i] + 1 - length[i]), c.start, c.stop, self._pages_of(c))
                for i, c in enumerate(inner)
                if i >= num_single
            ),
            sampled=self._sampled(chunks, order, last_row),
        )

    def append(self, sampled: Sampled, ids_N: Tensor) -> None:
        """Write sampled tokens to their places in the history, on the device."""
        slots_N, positions_N = (
            self._to_device(np.array(values, dtype=np.int64)) for values in (sampled.slots, sampled.positions)
        )
        self._history[slots_N, positions_N] = ids_N.to(torch.int32)

    def _sampled(self, chunks: Sequence[Chunk], order: list[int], last_row: NDArray[np.int64]) -> Sampled:
        rows = np.empty(len(chunks), dtype=np.int64)
        rows[order] = last_row
        sampling = [i for i, chunk in enumerate(chunks) if chunk.sample]
        return Sampled(
            slots=[chunks[i].slot for i in sampling],
            positions=[chunks[i].stop for i in sampling],
            rows_N=self._to_device(rows[sampling]),
        )

    def _add_pages(self, slot: int, pages: tuple[int, ...]) -> None:
        held = int(self._num_pages[slot])
        self._tables[slot, held : held + len(pages)] = pages
        self._num_pages[slot] = held + len(pages)

    def _table(self, slot: NDArray[np.int64], stop: NDArray[np.int64]) -> NDArray[np.int32]:
        longest = int(stop.max(initial=0))
        return self._tables[slot, : -(-longest // self._page_size)]

    def _pages_of(self, chunk: Chunk) -> Tensor:
        num_pages = -(-chunk.stop // self._page_size)
        return self._to_device(self._tables[chunk.slot, :num_pages].astype(np.int64))

    def _to_device(self, array: NDArray[np.int64] | NDArray[np.int32]) -> Tensor:
        tensor = torch.from_numpy(array)
        return tensor if self._device.type == "cpu" else tensor.to(self._device, non_blocking=True)
