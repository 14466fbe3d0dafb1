"""What came of one request: when its chunks came, what the server counted, how it failed. Pure.

All times are seconds of the run's clock, which begins with the run.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise

INTERRUPTED = "interrupted"
"""The kind of a request that the run's own end cut off: no error of the server."""


@dataclass(slots=True)
class Outcome:
    """Owned by the client until the request has ended. `due_s` is when it should have gone out: all latencies count
    from there, so that a late client cannot hide a slow server."""

    index: int
    due_s: float
    conversation: int = 0
    turn: int = 0
    sent_s: float | None = None
    chunks_s: list[float] = field(default_factory=list)  # of those that brought tokens
    num_asked: int = 0
    num_prompt: int | None = None  # as the server counted
    num_answer: int | None = None
    num_text: int | None = None  # tokens of the answer's text, by a tokenizer of our own
    num_chars: int = 0
    finish: str | None = None
    error: str | None = None  # its kind, in few words
    detail: str = ""
    timings: dict[str, float] | None = None  # where the server says them

    @property
    def ttft_s(self) -> float | None:
        return self.chunks_s[0] - self.due_s if self.chunks_s else None

    @property
    def e2e_s(self) -> float | None:
        """To the last chunk with tokens; the usage and [DONE] after it bring none."""
        return self.chunks_s[-1] - self.due_s if self.chunks_s else None

    @property
    def gaps_s(self) -> list[float]:
        """Between chunks, each: a chunk of several tokens ends one gap."""
        return [after - before for before, after in pairwise(self.chunks_s)]

    @property
    def num_tokens(self) -> int:
        """Of the answer: the server's count, else our tokenizer's, else one a chunk."""
        if self.num_answer is not None:
            return self.num_answer
        return len(self.chunks_s) if self.num_text is None else self.num_text

    @property
    def tpot_s(self) -> float | None:
        """Seconds a token after the first; None for an answer of one."""
        if not self.chunks_s or self.num_tokens < 2:
            return None
        return (self.chunks_s[-1] - self.chunks_s[0]) / (self.num_tokens - 1)

    @property
    def late_s(self) -> float | None:
        """The client's own lateness."""
        return None if self.sent_s is None else self.sent_s - self.due_s

    def doubts(self) -> str | None:
        """What is strange about the server's token count; None where nothing is."""
        if self.error is not None:
            return None
        if self.num_answer is None:
            return "no usage"
        if self.num_answer < 1 or self.num_answer > self.num_asked:
            return "usage outside 1 to max_tokens"
        if self.num_text is not None and abs(self.num_text - self.num_answer) > max(2, self.num_answer // 10):
            return "usage differs from the text"
        return None
