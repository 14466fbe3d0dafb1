"""Staging of a simulated rank: the product's `Staging` says which part has which slot; here slots hold values.

What is written comes out of a slot as it stands when it lands, and what is read is in a slot until its read has ended:
a slot that is another's too early changes the answer.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field

from pd.transfer.staging import Staging
from tests.cluster.trace import Violation
from tests.cluster.writes import Write


@dataclass(eq=False)
class Packing:
    """Of one rank. `start`: have a part moved that has a slot now; it answers by `end`, maybe at once.
    `fail`: all slots are in doubt, and the instance is to be started again.
    """

    num_slots: int
    slot_tokens: int
    num_heads: int  # the rank's
    start: Callable[[Write], None]
    fail: Callable[[], None]
    staging: Staging = field(init=False)
    _images: list[list[list[int]]] = field(init=False)  # by slot, head and token
    _parts: dict[int, Write] = field(default_factory=dict)  # given, and not ended
    _numbers: itertools.count[int] = field(default_factory=itertools.count)

    def __post_init__(self) -> None:
        self.staging = Staging(self.num_slots)
        self._images = [[[0] * self.slot_tokens for _ in range(self.num_heads)] for _ in range(self.num_slots)]

    @property
    def num_held(self) -> int:
        return self.staging.num_taken + self.staging.num_waiting

    def cut(self, tokens: range) -> list[range]:
        """What fits a slot each."""
        starts = range(0, len(tokens), self.slot_tokens) or (0,)
        return [tokens[start : start + self.slot_tokens] for start in starts]

    def give(self, part: Write) -> None:
        """Have it moved when there is room; a job of nobody who is attached needs none."""
        peer = part.mover.peer_of(part.rank, part.job.peer)
        if peer is None or part.is_over:
            return self.start(part)
        part.number = next(self._numbers)
        self._parts[part.number] = part
        self.staging.give(part.number, peer.life)
        self.begin()

    def begin(self) -> None:
        while (begun := self.staging.begin()) is not None:
            part = self._parts[begun.part]
            part.image = self._images[begun.slot]
            if not part.is_read:
                self._copy(part)
            self.start(part)
        try:
            self.staging.check()
        except AssertionError as error:
            raise Violation(str(error)) from error
        if self.staging.is_stuck:
            self.fail()

    def end(self, part: Write, *, is_done: bool, may_land: bool) -> None:
        """It has ended. What was read is unpacked."""
        if part.number is None:
            return
        if is_done and part.is_read:
            self._copy(part)
        del self._parts[part.number]
        self.staging.end(part.number, in_doubt=may_land and part.is_read)
        self.begin()

    def _copy(self, part: Write) -> None:
        """From our pool into the image, or back."""
        ours, image = part.mover, part.image
        assert image is not None, "only what has begun is copied"
        for token in part.tokens:
            if part.has(token):
                page = part.page_of(token, ours)
                if part.is_read:
                    part.check_claim(page)
                for index, head in enumerate(part.heads):
                    here, there = image[index], ours.pool[head][page]
                    at, place = token - part.tokens.start, token % ours.page_size
                    if part.is_read:
                        there[place] = here[at]
                    else:
                        here[at] = there[place]
