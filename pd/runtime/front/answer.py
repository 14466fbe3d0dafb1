"""One answer on its way out: tokens in, text, logprobs and an ending out. Pure.

Rules
1. An answer ends at a stop token (which is counted, and its text left out), at a stop string (tokens up to the
   one that completed it are counted, the text is cut before it), or at its length.
2. Logprobs go out with the text they belong to or later, token ids at once, each once: as many as tokens are counted.
3. The deltas, joined, do not depend on how the tokens were grouped.
"""

from __future__ import annotations

from typing import NamedTuple

from pd.runtime.core.events import Emit
from pd.runtime.front.detokenize import Detokenizer
from pd.runtime.front.stops import StopFinder
from pd.runtime.wire.values import Finish, Token


class TokenProb(NamedTuple):
    token: Token
    offset: int  # characters of the answer before this token


class Delta(NamedTuple):
    text: str
    logprobs: tuple[TokenProb, ...]
    finish: str | None  # OpenAI's finish_reason: "stop" | "length"
    token_ids: tuple[int, ...] | None = None  # None: not asked for

    def __bool__(self) -> bool:
        """Whether there is anything to tell."""
        return bool(self.text or self.finish or self.logprobs or self.token_ids)

    def is_plain(self) -> bool:
        """Whether it is text and nothing else."""
        return self.finish is None and not self.logprobs and self.token_ids is None


class Answer:
    """Owned by one choice. After a delta with a finish it is spent."""

    def __init__(
        self,
        detokenizer: Detokenizer,
        *,
        stop: tuple[str, ...] = (),
        include_stop: bool = False,
        min_tokens: int = 0,
        logprobs: bool = False,
        token_ids: bool = False,
    ) -> None:
        """`include_stop`: what ended the answer belongs to its text. Stop strings within `min_tokens` do not end it."""
        self.num_tokens = 0
        self._detokenizer = detokenizer
        self._stops = StopFinder(stop, include=include_stop) if stop else None
        self._include_stop = include_stop
        self._min_tokens = min_tokens
        self._keeps_logprobs = logprobs
        self._keeps_ids = token_ids
        self._ids: list[int] = []
        self._probs: list[TokenProb] = []
        self._num_chars = 0
        self._is_text_only = not (stop or logprobs or token_ids)

    def take(self, emit: Emit) -> Delta:
        """What these tokens add. With a stop string found, the tokens after it are dropped and not counted."""
        if self._is_text_only and emit.finish is None:
            self.num_tokens += len(emit.tokens)
            feed = self._detokenizer.feed
            return Delta("".join([feed(token.id) for token in emit.tokens]), (), None)
        text = ""
        ends_with_stop_token = emit.finish is Finish.STOP and not self._include_stop
        num_spoken = len(emit.tokens) - ends_with_stop_token
        for index, token in enumerate(emit.tokens):
            self.num_tokens += 1
            if self._keeps_ids:
                self._ids.append(token.id)
            if self._keeps_logprobs:
                self._probs.append(TokenProb(token, self._num_chars))
            if index < num_spoken:
                out, is_stopped = self._say(self._detokenizer.feed(token.id))
                text += out
                if is_stopped:
                    return self._delta(text, "stop")
        if emit.finish is None:
            return self._delta(text, None)
        out, is_stopped = self._say(self._detokenizer.flush())
        text += out
        if self._stops is not None and not is_stopped:
            text += self._stops.flush()
        return self._delta(text, "stop" if is_stopped else emit.finish.value)

    def _say(self, text: str) -> tuple[str, bool]:
        """What may go out of new text, and whether a stop string ended it."""
        self._num_chars += len(text)
        if self._stops is None or self.num_tokens <= self._min_tokens:
            return text, False
        return self._stops.feed(text)

    def _delta(self, text: str, finish: str | None) -> Delta:
        probs: tuple[TokenProb, ...] = ()
        if self._probs and (text or finish):
            probs = tuple(self._probs)
            self._probs = []
        ids = tuple(self._ids) if self._keeps_ids else None
        self._ids.clear()
        return Delta(text, probs, finish, ids)
