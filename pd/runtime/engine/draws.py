"""What the sampler asks of a device: four operations on logits, here in PyTorch; the kernels' stand in `operators`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from pd.runtime.engine import cpu_ops
from pd.runtime.engine.staging import upload

# B rows of logits, N of them under one treatment, R rows of counts, V vocabulary, K candidates

FIRST_CANDIDATES = 256
"""How many of the best logits top_p looks at before it looks at all: 3 ms a batch of 16 at 49,152, a full
sort 71 ms."""


class Filters(NamedTuple):
    """A row each, on the host."""

    min_p: list[float]  # 0: none
    top_k: list[int]  # the vocabulary's size: none
    top_p: list[float]  # 1: none


class Penalties(NamedTuple):
    """A penalised row each."""

    row_of_N: Tensor
    history_of_N: Tensor
    strengths_3N: Tensor  # repetition, frequency, presence; float32


@dataclass(frozen=True, slots=True)
class Draws:
    """The operations."""

    argmax: Callable[[Tensor], Tensor]
    """The largest of each row, the lowest index on ties. int64."""
    race: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
    """(logits, floors, seeds, positions) -> ids: `noise.race`."""
    floors: Callable[[Tensor, Filters], Tensor]
    """The least logit of each row that lives, float32; -inf where nothing is filtered."""
    penalise: Callable[[Tensor, tuple[Tensor, Tensor], Penalties], None]
    """Change logits_BV in place; counts are answer_RV (int32) and prompt_RV (bool)."""


def torch_draws() -> Draws:
    """In PyTorch, and C++ where it was built."""
    return Draws(cpu_ops.argmax, cpu_ops.race, floors, penalise)


def penalise(logits_BV: Tensor, counts: tuple[Tensor, Tensor], rows: Penalties) -> None:
    """As vLLM's apply_penalties: prompt and answer for repetition, the answer alone for the other two."""
    count_NV = counts[0][rows.history_of_N]
    seen_NV = counts[1][rows.history_of_N].logical_or_(count_NV > 0)
    repetition_N1, frequency_N1, presence_N1 = rows.strengths_3N[:, :, None]
    logits_NV = logits_BV[rows.row_of_N]
    repeated_NV = torch.where(logits_NV > 0, logits_NV / repetition_N1, logits_NV * repetition_N1)
    logits_NV = torch.where(seen_NV, repeated_NV, logits_NV)
    logits_NV -= frequency_N1 * count_NV
    logits_NV -= presence_N1 * (count_NV > 0)
    logits_BV[rows.row_of_N] = logits_NV


def floors(logits_NV: Tensor, filters: Filters) -> Tensor:
    num_vocab = logits_NV.shape[1]
    kept = np.array(filters.top_k, np.int64)
    largest = int(kept[kept < num_vocab].max(initial=0))
    last_N1 = np.minimum(kept, max(largest, 1))[:, None] - 1
    min_p, top_p = np.array(filters.min_p, np.float32), np.array(filters.top_p, np.float32)
    min_p_N, top_p_N, *kth = upload([min_p, top_p, last_N1, kept < num_vocab], logits_NV.device)
    # min_p keeps what is at least min_p times as likely as the best; top_k what is at least the kth best.
    floor_N = logits_NV.amax(dim=-1) + min_p_N.log()
    if largest:
        floor_N = _kth_floor(logits_NV, floor_N, largest, places=kth)
    return _nucleus_floor(logits_NV, floor_N, top_p_N) if (top_p < 1.0).any() else floor_N


def _kth_floor(logits_NV: Tensor, floor_N: Tensor, largest: int, *, places: list[Tensor]) -> Tensor:
    """`places`: of each row's last survivor among the `largest` best, and whether it has one."""
    last_N1, is_limited_N = places
    kth_N = logits_NV.topk(largest, dim=-1).values.gather(1, last_N1).squeeze(1)
    return torch.where(is_limited_N, torch.maximum(floor_N, kth_N), floor_N)


def _nucleus_floor(logits_NV: Tensor, floor_N: Tensor, top_p_N: Tensor) -> Tensor:
    """The larger of floor_N and the logit where, among survivors, the mass strictly before it reaches
    top_p."""
    best_N1 = logits_NV.amax(dim=-1, keepdim=True)
    weight_NV = (logits_NV - best_N1).exp_().masked_fill_(logits_NV < floor_N[:, None], 0.0)
    # In float64, so that no order of summation (threads, batch) can move the border.
    enough_N1 = weight_NV.sum(dim=-1, keepdim=True, dtype=torch.float64) * top_p_N[:, None]
    enough_N1.masked_fill_(top_p_N[:, None] >= 1.0, 0.0)
    num_vocab = logits_NV.shape[1]
    # A GPU sorts all of it sooner than it could tell the host whether a part was enough.
    num_candidates = FIRST_CANDIDATES if logits_NV.device.type == "cpu" else num_vocab
    while True:
        top_NK = logits_NV.topk(min(num_candidates, num_vocab), dim=-1).values
        weight_NK = (top_NK - best_N1).exp_().masked_fill_(top_NK < floor_N[:, None], 0.0)
        mass_NK = weight_NK.cumsum(dim=-1, dtype=torch.float64)
        if num_candidates >= num_vocab or bool((mass_NK[:, -1:] >= enough_N1).all()):
            break
        num_candidates *= 16
    # The last candidate before which the mass falls short of enough; the best always lives.
    last_N1 = (mass_NK < enough_N1).sum(dim=-1, keepdim=True).clamp_(max=top_NK.shape[1] - 1)
    nucleus_N = top_NK.gather(1, last_N1).squeeze(1)
    return torch.where(top_p_N < 1.0, torch.maximum(floor_N, nucleus_N), floor_N)
