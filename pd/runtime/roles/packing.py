"""A rank's staging: parts of jobs that are packed before they are written, or unpacked after they are read.

Owned by the Mover. A part waits for a slot, has it while it is under way, and gives it back when its job has ended.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from pd.transfer.packed import PackedWay
from pd.transfer.reshard import Reshard, reshard, views
from pd.transfer.staging import NUM_SLOTS, SLOT_NBYTES, Slots
from pd.transfer.transport import TransferError, Transport


class Part(NamedTuple):
    number: int  # the transport's job
    name: str  # the peer rank's
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
    _slots: Slots = field(init=False)
    _waiting: deque[Part] = field(default_factory=deque)
    _open: dict[int, tuple[Part, int]] = field(default_factory=dict)  # by the transport's job: and its slot
    _stream: torch.cuda.Stream | None = None

    def __post_init__(self) -> None:
        self._slots = Slots(self.num_slots)
        if self.region.is_cuda:
            self._stream = torch.cuda.Stream(self.region.device)  # type: ignore[no-untyped-call]

    @property
    def num_taken(self) -> int:
        """Slots."""
        return self._slots.num_taken

    def give(self, part: Part) -> None:
        """Have it moved when there is room. Call `begin` after."""
        self._waiting.append(part)

    def begin(self) -> list[tuple[int, str]]:
        """Start what has room. Returns the jobs that could not begin, with the reason."""
        failed: list[tuple[int, str]] = []
        blocked: set[str] = set()
        kept: deque[Part] = deque()
        while self._waiting:
            part = self._waiting.popleft()
            slot = self._slots.take(part.name) if part.name not in blocked else None
            if slot is None:
                blocked.add(part.name)  # its parts keep their order
                kept.append(part)
                continue
            self._open[part.number] = (part, slot)
            try:
                self._start(part, self.base + slot * self.slot_nbytes)
            except (TransferError, ValueError) as error:
                self._give_back(part.number)
                failed.append((part.number, str(error)))
        self._waiting = kept
        return failed

    def end(self, number: int, *, is_done: bool) -> None:
        """The transport has ended this job, if it was one of ours. What was read is unpacked."""
        if number not in self._open:
            return
        part, slot = self._open[number]
        if is_done and part.way.is_read:
            self._copy(part, self.base + slot * self.slot_nbytes)
        self._give_back(number)

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

    def _give_back(self, number: int) -> None:
        _, slot = self._open.pop(number)
        self._slots.give_back(slot)
