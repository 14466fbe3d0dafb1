"""One attempt at one request, as long as an instance computes it. Pure.

    positions   0 ........ num_computed ...... num_tokens ........ limit
                KV launched│ known, not launched│ not yet sampled │ never sampled

With steps in flight num_computed may be ahead of num_tokens: positions are known before tokens are.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto

from pd.runtime.core.pages import PageTable
from pd.runtime.wire.values import Finish, Handle, Sampling


class Phase(Enum):
    WAITING = auto()  # for a slot and pages to be prefilled
    COMPUTING = auto()  # its prompt; has a slot
    READY = auto()  # landed, and waits for a slot
    RUNNING = auto()  # decodes; has a slot
    ENDED = auto()  # steps in flight may still name it; their tokens are ignored


PHASES: dict[Phase, tuple[Phase, ...]] = {
    Phase.WAITING: (Phase.COMPUTING, Phase.ENDED),
    Phase.COMPUTING: (Phase.RUNNING, Phase.ENDED),
    Phase.READY: (Phase.RUNNING, Phase.ENDED),
    Phase.RUNNING: (Phase.ENDED,),
    Phase.ENDED: (),
}


@dataclass(slots=True, eq=False)
class Request:
    """Owned by the part of the brain whose queue holds it; the steps in flight refer to it."""

    handle: Handle
    tokens: tuple[int, ...]  # known at entry
    num_prompt: int
    sampling: Sampling
    limit: int  # tokens of prompt + answer it may have
    phase: Phase
    deadline: float = 0.0  # for the first token
    table: PageTable = field(default_factory=PageTable)
    num_cached: int = 0  # tokens found in the prefix cache
    begun_at: float = 0.0  # when its first chunk was planned
    slot: int | None = None
    num_computed: int = 0  # positions that launched steps compute, or that were cached or landed
    num_tokens: int = 0  # known; the next one reported gets this position
    capacity: int = 0  # tokens that the table's pages hold
    last_step: int = 0  # the last one that names its slot; steps begin at 1
    generated: list[int] = field(default_factory=list)
    stop_ids: frozenset[int] = frozenset()

    def __post_init__(self) -> None:
        self.num_tokens = len(self.tokens)
        self.stop_ids = frozenset(self.sampling.stop_token_ids)

    def move(self, phase: Phase) -> None:
        assert phase in PHASES[self.phase], f"{self.handle} cannot go from {self.phase} to {phase}"
        self.phase = phase

    def take(self, token: int) -> Finish | None:
        """Append a sampled token. Whether it is the last."""
        self.num_tokens += 1
        self.generated.append(token)
        if token in self.stop_ids:
            return Finish.STOP
        return Finish.LENGTH if self.num_tokens >= self.limit else None


def limit_of(num_prompt: int, sampling: Sampling, max_model_len: int) -> int:
    """Tokens of prompt + answer that a request may have."""
    return min(num_prompt + sampling.max_tokens, max_model_len)
