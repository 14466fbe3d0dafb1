"""What is still on its way to peers that were let go: nobody waits for it, but until it has ended the library must know
the peer, and its memory must stay.

NIXL frees a peer's keys when it is told to forget the peer, and UCX reads them with every further piece of a write
that is on its way: told too early, the process crashes, once in some dozens of times.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from pd.transfer.library import Library
from pd.transfer.transport import TransferError

_GRACE_S = 0.1
"""UCX tells that a batch failed before the last of its pieces has let go of the peer's keys."""


@dataclass(slots=True, eq=False)
class Leftover:
    """Of one peer."""

    library: Library
    contact: object  # None: it was never met
    batches: list[object]
    since: float
    has_failed: bool = False  # a batch that is none of `batches`, perhaps halfway
    _until: float = field(init=False)

    def __post_init__(self) -> None:
        self._until = self.since + (_GRACE_S if self.batches or self.has_failed else 0.0)

    def has_ended(self, now: float) -> bool:
        """Whether all of it has. The library then knows the peer no longer, and this is not asked again."""
        self.batches = [batch for batch in self.batches if not self._let_go(batch)]
        if self.batches or now < self._until:
            return False
        if self.contact is not None:
            self.library.part(self.contact)
        return True

    def _let_go(self, batch: object) -> bool:
        """Whether it has ended, well or not."""
        try:
            if not self.library.is_done(batch):
                return False
        except TransferError:
            pass
        self.library.release(batch)
        return True


@dataclass(slots=True)
class Leftovers:
    """Of all, each with the line of the slate that a last look at its door may still write, and its contact's bytes."""

    _all: list[tuple[Leftover, int | None, bytes]] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self._all)

    def add(self, left: Leftover, *, line: int | None, contact: bytes) -> None:
        self._all.append((left, line, contact))

    def has(self, contact: bytes) -> bool:
        return any(contact == known for _, _, known in self._all)

    def clear(self, now: float) -> list[int]:
        """Let go of what has ended. Returns the lines that are free again."""
        ended = [each for each in self._all if each[0].has_ended(now)]
        self._all = [each for each in self._all if each not in ended]
        return [line for _, line, _ in ended if line is not None]
