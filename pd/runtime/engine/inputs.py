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

from pd.runtime.engine.staging import upload
from pd.runtime.wire.plans import Chunk, SlotInit

# T tokens of the step, B chunks of one token, N sampled chunks, L pages of the longest table


@dataclass(frozen=True, slots=True)
class Extend:
    """A chunk of several tokens: positions [start, stop) at rows [row, row + stop - start) of the step."""

    row: int
    start: int
    stop: int
    pages: Tensor  # of [0, stop), int64


@dataclass(frozen=True, slots=True)
class Ragged:
    """All chunks of several tokens, as one launch takes them: rows count from the first of them. int32."""

    first_row_B1: Tensor
    lengths_B: Tensor  # context, the chunk included
    table_BL: Tensor


@dataclass(frozen=True, slots=True)
class Sampled:
    """Chunks that sample, in the plan's order."""

    slots: list[int]
    positions: list[int]  # of the token to sample
    rows_N: Tensor  # each chunk's last row
    places_N: tuple[Tensor, Tensor]  # slots and positions again, on the device


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
    lengths: Sequence[int]  # the same on the host, for whoever walks requests: asking the device would wait for it
    extends: tuple[Extend, ...]
    ragged: Ragged | None  # the same chunks; None where there are none
    sampled: Sampled


class Slots:
    """A rank's requests: token history on the device, page tables on the host."""

    def __init__(self, *, num_slots: int, max_model_len: int, page_size: int, device: torch.device) -> None:
        self.num_slots = num_slots
        self._page_size = page_size
        self._device = device
        # Zeroed by calloc: memory is taken as slots are used. One more than the longest request, for the token
        # sampled at its last position.
        self._history = torch.zeros(num_slots, max_model_len + 1, dtype=torch.int32, device=device)
        max_pages = -(-max_model_len // page_size)
        self._tables = np.zeros((num_slots, max_pages), dtype=np.int32)
        self._num_pages = np.zeros(num_slots, dtype=np.int64)

    def admit(self, init: SlotInit) -> None:
        (tokens,) = upload([np.array(init.tokens, dtype=np.int32)], self._device)
        self._history[init.slot, : len(init.tokens)] = tokens
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
        single = int((length == 1).sum())
        sampling = [i for i, chunk in enumerate(chunks) if chunk.sample]
        rows = np.empty(len(chunks), dtype=np.int64)
        rows[order] = last_row
        own = {
            "slots_T": slots_T,
            "positions_T": positions_T,
            "pages_T": self._tables[slots_T, positions_T // self._page_size].astype(np.int64),
            "offsets_T": positions_T % self._page_size,
            "table_BL": self._table(slot[:single], stop[:single]),
            "lengths_B": stop[:single].astype(np.int32),
            "rows_N": rows[sampling],
            "slots_N": np.array([chunks[i].slot for i in sampling], dtype=np.int64),
            "positions_N": np.array([chunks[i].stop for i in sampling], dtype=np.int64),
            "first_row_B1": np.concatenate([[0], np.cumsum(length[single:])]).astype(np.int32),
            "ragged_lengths_B": stop[single:].astype(np.int32),
            "ragged_table_BL": self._table(slot[single:], stop[single:]),
        }
        pages = [self._pages_of(chunk) for chunk in inner[single:]]
        sent = upload([*own.values(), *pages], self._device)
        at = dict(zip(own, sent, strict=False))
        extends = tuple(
            Extend(int(last + 1 - num), chunk.start, chunk.stop, pages)
            for last, num, chunk, pages in zip(
                last_row[single:], length[single:], inner[single:], sent[len(own) :], strict=True
            )
        )
        return StepInputs(
            tokens_T=self._history[at["slots_T"], at["positions_T"]].to(torch.int64),
            positions_T=at["positions_T"],
            pages_T=at["pages_T"],
            offsets_T=at["offsets_T"],
            num_single=single,
            table_BL=at["table_BL"],
            lengths_B=at["lengths_B"],
            lengths=stop[:single].tolist(),
            extends=extends,
            ragged=Ragged(at["first_row_B1"], at["ragged_lengths_B"], at["ragged_table_BL"]) if extends else None,
            sampled=Sampled(
                slots=[chunks[i].slot for i in sampling],
                positions=[chunks[i].stop for i in sampling],
                rows_N=at["rows_N"],
                places_N=(at["slots_N"], at["positions_N"]),
            ),
        )

    def append(self, sampled: Sampled, ids_N: Tensor) -> None:
        """Write sampled tokens to their places in the history, on the device."""
        self._history[sampled.places_N] = ids_N.to(torch.int32)

    def _add_pages(self, slot: int, pages: tuple[int, ...]) -> None:
        held = int(self._num_pages[slot])
        self._tables[slot, held : held + len(pages)] = pages
        self._num_pages[slot] = held + len(pages)

    def _table(self, slot: NDArray[np.int64], stop: NDArray[np.int64]) -> NDArray[np.int32]:
        longest = int(stop.max(initial=0))
        return self._tables[slot, : -(-longest // self._page_size)]

    def _pages_of(self, chunk: Chunk) -> NDArray[np.int64]:
        num_pages = -(-chunk.stop // self._page_size)
        return self._tables[chunk.slot, :num_pages].astype(np.int64)
