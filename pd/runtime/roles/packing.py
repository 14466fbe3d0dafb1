"""A rank's staging: parts of jobs that are packed before they are written, or unpacked after they are read.

Owned by the Mover. Which part has which slot, and when, is decided in `Staging`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from pd.transfer.packed import PackedWay
from pd.transfer.reshard import Reshard, reshard, views
from pd.transfer.staging import NUM_SLOTS, SLOT_NBYTES, Staging
from pd.transfer.transport import TransferError, Transport


class Part(NamedTuple):
    number: int  # the transport's job
    name: str  # the peer rank's
    life: tuple[str, str]  # the peer's name and epoch
    way: PackedWay
    tokens: range  # from the job's first
    ours: tuple[int, ...]  # pages of the whole job
    theirs: tuple[int, ...]


@dataclass(slots=True)
class Packer:
    """`region`: all bytes that the transport knows: our pool, and from `base` on the slots."""

    transport: Transport
    region: Tensor
    base: int
    reshard: Reshard = reshard
    num_slots: int = NUM_SLOTS
    slot_nbytes: int = SLOT_NBYTES
    staging: Staging = field(init=False)
    _parts: dict[int, Part] = field(default_factory=dict)  # by the transport's job: waiting, or under way
    _bases: dict[int, int] = field(default_factory=dict)  # where the image of one stands that is under way
    _stream: torch.cuda.Stream | None = None

    def __post_init__(self) -> None:
        self.staging = Staging(self.num_slots)
        if self.region.is_cuda:
            self._stream = torch.cuda.Stream(self.region.device)  # type: ignore[no-untyped-call]

    def give(self, part: Part) -> None:
        """Have it moved when there is room. Call `begin` after."""
        self._parts[part.number] = part
        self.staging.give(part.number, part.life)

    def begin(self) -> list[tuple[int, str]]:
        """Start what has room. Returns the jobs that could not begin, with the reason."""
        failed: list[tuple[int, str]] = []
        while (begun := self.staging.begin()) is not None:
            part = self._parts[begun.part]
            self._bases[part.number] = self.base + begun.slot * self.slot_nbytes
            try:
                self._start(part, self._bases[part.number])
            except (TransferError, ValueError) as error:
                self._let_go(part.number)
                failed.append((part.number, str(error)))
        return failed

    def end(self, number: int, *, is_done: bool, may_land: bool = False) -> None:
        """The transport has ended this job, if it was one of ours. What was read is unpacked.

        `may_land`: a read into its slot may go on all the same. What is written only comes from there.
        """
        if number not in self._parts:
            return
        way = self._parts[number].way
        if is_done and way.is_read:
            self._copy(self._parts[number], self._bases[number])
        self._let_go(number, in_doubt=may_land and way.is_read)

    def settle(self, life: tuple[str, str]) -> None:
        """Nothing of it can write here any more. Call `begin` after."""
        self.staging.settle(life)

    def _start(self, part: Part, base: int) -> None:
        way = part.way
        spans = way.spans(part.theirs, part.tokens, base=base)
        if way.is_read:
            self.transport.read(part.name, spans, job=part.number)
            return
        self._copy(part, base)
        self.transport.write(part.name, spans, job=part.number)

    def _copy(self, part: Part, base: int) -> None:
        """From our pool into the image, or back."""
        way = part.way
        ours = views(self.region, *way.ours, way.pair)
        images = views(self.region, *way.image, way.pair, base=base)
        places = way.places(part.ours, part.tokens)
        if way.is_read:
            places = [(page, token, own, inside) for own, inside, page, token in places]
        with self._apart():
            for own, image in zip(ours, images, strict=True):
                src, dst = (image, own) if way.is_read else (own, image)
                self.reshard(src, dst, places, unit=way.unit)

    @contextmanager
    def _apart(self) -> Iterator[None]:
        """On a GPU, beside the steps that are queued: what is moved is done, or not begun. Waits for the copy, as the
        transport knows no streams."""
        if self._stream is None:
            yield
            return
        with torch.cuda.stream(self._stream):
            yield
        self._stream.synchronize()

    def _let_go(self, number: int, *, in_doubt: bool = False) -> None:
        del self._parts[number], self._bases[number]
        self.staging.end(number, in_doubt=in_doubt)
