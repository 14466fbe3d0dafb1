"""What the ranks of an instance say, merged: an answer counts when all have given it. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeVar

from pd.runtime.wire.plans import Severed, StepDone, WriteDone

DIGESTS = 1 << 64
"""Digests of parts are added up modulo this to that of all."""
Answer = TypeVar("Answer", StepDone, WriteDone, Severed)


@dataclass(slots=True)
class Tally:
    """Collects answers. The caller passes only answers to what was asked; a repeated one counts once."""

    num_ranks: int
    _answers: dict[object, dict[int, object]] = field(default_factory=dict)

    def step_done(self, rank: int, answer: StepDone) -> StepDone | None:
        """The step with rank 0's tokens and the slowest rank's seconds, once all ranks are done."""
        answers = self._collect(("step", answer.step), rank, answer)
        if answers is None:
            return None
        return StepDone(answer.step, answers[0].tokens, max(each.seconds for each in answers))

    def write_done(self, rank: int, answer: WriteDone) -> WriteDone | None:
        """The job with the first error, all bytes, the slowest rank's seconds and the digest of all, once all have
        ended it."""
        answers = self._collect(("write", answer.job), rank, answer)
        if answers is None:
            return None
        error = next((each.error for each in answers if each.error is not None), None)
        nbytes, seconds = sum(each.nbytes for each in answers), max(each.seconds for each in answers)
        digests = [each.digest for each in answers if each.digest is not None]
        digest = sum(digests) % DIGESTS if digests else None
        return WriteDone(answer.job, error, nbytes, seconds, any(each.may_land for each in answers), digest)

    def severed(self, rank: int, answer: Severed) -> Severed | None:
        """Clean if it is on every rank, once all have answered."""
        answers = self._collect(("sever", answer.peer, answer.epoch), rank, answer)
        if answers is None:
            return None
        return Severed(answer.peer, answer.epoch, all(each.clean for each in answers))

    def _collect(self, key: object, rank: int, answer: Answer) -> list[Answer] | None:
        """All ranks' answers, rank 0's first, when this one completes them."""
        answers: dict[int, Answer] = self._answers.setdefault(key, {})  # type: ignore[assignment]
        answers.setdefault(rank, answer)
        if len(answers) < self.num_ranks:
            return None
        del self._answers[key]
        return [answers[each] for each in range(self.num_ranks)]
