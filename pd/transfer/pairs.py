"""Which rank sends what: each layer and head that a destination holds gets exactly one source. Pure.

Rules
1. Source ranks that hold the same part share it, so that none is idle while another has much to send.
2. What is shared is cut by layers: a page keeps a head's layers together, so some of them are one piece still.
3. Two peers compute the same pairs from the same shards, once; order matters, names and clocks do not.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from pd.transfer.layout import Shard
from pd.transfer.transport import LayoutMismatch

_GRAIN = 6
"""A run of layers is cut where that levels at least a sixth of what each of its holders has to send: finer pieces cost
more than they level."""


class Pair(NamedTuple):
    """Rank `src` owes rank `dst` these layers and heads of every page; ranges count in the whole model."""

    src: int
    dst: int
    layers: range
    heads: range


def pair_up(src: Sequence[Shard], dst: Sequence[Shard]) -> tuple[Pair, ...]:
    """Give each destination layer and head exactly one source rank; pairs ordered by (src, dst).

    Where R source ranks hold what W destinations want, the W copies lie end to end and are cut into R stretches, longer
    ones for sources that have less to send so far. With equal sources and W a multiple of R that is the usual formula:
    the i-th goes to holder i·R // W. In the end no source has more to send than another that holds some of the same,
    but for a third of a copy, or two layers. Raises LayoutMismatch naming a part that no source holds.
    """
    runs = _runs(src, dst)
    load = [0] * len(src)  # layers × heads given to each source so far
    for run in sorted(runs, key=lambda run: len(run.held_by)):  # least choice first
        run.deal(load)
    while any(run.level(load) for run in runs):
        pass
    given: dict[tuple[int, int], list[tuple[int, range]]] = {}
    for run in runs:
        for s, d, layers in run.parts:
            given.setdefault((s, d), []).append((run.head, layers))
    return tuple(Pair(s, d, *box) for (s, d), parts in sorted(given.items()) for box in boxes(parts))


class _Part(NamedTuple):
    src: int
    dst: int
    layers: range


@dataclass(slots=True)
class _Run:
    """One head of a run of layers that no shard cuts through, and who sends which of it to whom."""

    layers: range
    head: int
    held_by: list[int]
    wanted_by: list[int]
    parts: list[_Part] = field(default_factory=list)

    @property
    def grain(self) -> int:
        """Layers."""
        num_each = len(self.layers) * len(self.wanted_by) // len(self.held_by)
        return min(num_each, len(self.layers)) // _GRAIN

    def deal(self, load: list[int]) -> None:
        """Fill its holders up to one level, in place."""
        size, begin = len(self.layers), 0
        shares = _levelled([load[s] for s in self.held_by], size * len(self.wanted_by))
        for s, end in zip(self.held_by, itertools.accumulate(shares), strict=True):
            end = self._snapped(end)
            load[s] += end - begin
            while begin < end:
                copy, first = divmod(begin, size)
                stop = min(size, first + end - begin)
                self.parts.append(_Part(s, self.wanted_by[copy], self.layers[first:stop]))
                begin += stop - first

    def level(self, load: list[int]) -> bool:
        """Hand layers of busy sources to holders that have less, in place. Whether any were."""
        has_moved = False
        for i, (busy, dst, layers) in enumerate(self.parts):
            least = min(self.held_by, key=load.__getitem__)
            num = min(len(layers), (load[busy] - load[least]) // 2)
            if num < 1 or num < min(self.grain, len(layers)):  # a whole part is handed over without a cut
                continue
            load[busy] -= num
            load[least] += num
            given, kept = layers[len(layers) - num :], layers[: len(layers) - num]
            if least < busy:  # which stands before it: so what each sends of a page stays in one
                given, kept = layers[:num], layers[num:]
            self.parts[i] = _Part(least, dst, given)
            if kept:
                self.parts.append(_Part(busy, dst, kept))
            has_moved = True
        return has_moved

    def _snapped(self, at: float) -> int:
        """A cut, or the end of the copy that is so near that a cut would not pay."""
        size = len(self.layers)
        edge = round(at / size) * size
        return edge if abs(at - edge) <= self.grain else round(at)


def _runs(src: Sequence[Shard], dst: Sequence[Shard]) -> list[_Run]:
    def having(shards: Sequence[Shard], layer: int, head: int) -> list[int]:
        return [i for i, s in enumerate(shards) if layer in s.layers and head in s.heads]

    runs = []
    cuts = sorted({edge for s in (*src, *dst) for edge in (s.layer_start, s.layer_stop)})
    for (start, stop), head in itertools.product(itertools.pairwise(cuts), sorted({h for d in dst for h in d.heads})):
        run = _Run(range(start, stop), head, having(src, start, head), having(dst, start, head))
        if run.wanted_by and not run.held_by:
            raise LayoutMismatch(
                f"rank {run.wanted_by[0]} needs layers {start}..{stop - 1} of KV head {head}, "
                f"which none of the {len(src)} source ranks holds"
            )
        if run.wanted_by:
            runs.append(run)
    return runs


def _levelled(loads: Sequence[int], amount: int) -> list[float]:
    """How much of `amount` each gets if it is poured over them until they stand at one level."""
    ordered = sorted(loads)
    for num in range(len(ordered), 0, -1):
        level = (amount + sum(ordered[:num])) / num
        if level >= ordered[num - 1]:
            break
    return [max(0.0, level - load) for load in loads]


def boxes(parts: Iterable[tuple[int, range]]) -> Iterator[tuple[range, range]]:
    """Of heads with some layers each, none twice: neighbouring layers of a head are joined, then neighbouring heads
    that are alike in layers. (layers, heads)."""
    joined: list[tuple[int, range]] = []
    for head, layers in sorted(parts, key=lambda part: (part[0], part[1].start)):
        if joined and joined[-1][0] == head and joined[-1][1].stop == layers.start:
            joined[-1] = (head, range(joined[-1][1].start, layers.stop))
        else:
            joined.append((head, layers))
    found: list[tuple[range, range]] = []
    for head, layers in sorted(joined, key=lambda part: (part[1].start, part[1].stop, part[0])):
        if found and found[-1][0] == layers and found[-1][1].stop == head:
            found[-1] = (layers, range(found[-1][1].start, head + 1))
        else:
            found.append((layers, range(head, head + 1)))
    yield from found
