"""Answers as OpenAI writes them, whole and as server-sent events. Pure.

An ordinary streamed chunk is put together from bytes made once a choice, with only its text encoded: 0.4 µs, against
5.5 in the same run for a dict through the encoder.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import msgspec

from pd.runtime.core.events import Timings
from pd.runtime.front.answer import Delta, TokenProb
from pd.runtime.front.text import TokenText
from pd.runtime.wire.values import Token

DONE = b"data: [DONE]\n\n"

_LEAST_LOGPROB = -9999.0  # JSON has no -inf; vLLM's stand-in

encode = msgspec.json.encode


class Head(NamedTuple):
    """The same in every chunk."""

    request_id: str
    created: int  # seconds since 1970
    model: str

    def object(self, kind: str) -> dict[str, object]:
        return {"id": self.request_id, "object": kind, "created": self.created, "model": self.model}


class Usage(NamedTuple):
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int  # of the prompt, not computed again
    timings: Timings | None = None  # beside OpenAI's fields, for those who ask for it

    def event(self) -> dict[str, object]:
        """What the last event of a stream says."""
        told = {} if self.timings is None else {"timings": self.timings._asdict()}
        return {"choices": [], "usage": self.json(), **told}

    def json(self) -> dict[str, object]:
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }


class Shape(Protocol):
    """One request's. `index` is the choice's."""

    def opening(self, index: int) -> bytes:
        """The event before a choice's first delta; may be empty."""

    def chunk(self, index: int, delta: Delta) -> bytes: ...

    def usage(self, usage: Usage) -> bytes:
        """The event after the last choice ended."""

    def whole(self, choices: Sequence[Delta], usage: Usage) -> bytes:
        """The answer of a request that does not stream; the deltas are whole answers."""


class CompletionShape:
    def __init__(
        self,
        head: Head,
        spell: Callable[[int], TokenText],
        *,
        echoes: Sequence[str],
        include_usage: bool = False,
    ) -> None:
        """`echoes`: what stands before each choice's answer; empty strings for nothing."""
        self._head = head.object("text_completion")
        self._spell = spell
        self._echoes = echoes
        self._include_usage = include_usage
        usage = b',"usage":null' if include_usage else b""
        start = encode(self._head)[:-1]
        self._starts = [b'data: %b,"choices":[{"index":%d,"text":' % (start, index) for index in range(len(echoes))]
        self._end = b',"logprobs":null,"finish_reason":null}]' + usage + b"}\n\n"

    def opening(self, index: int) -> bytes:
        echo = self._echoes[index]
        return self._starts[index] + encode(echo) + self._end if echo else b""

    def chunk(self, index: int, delta: Delta) -> bytes:
        if delta.is_plain():
            return self._starts[index] + encode(delta.text) + self._end
        usage = {"usage": None} if self._include_usage else {}
        return _event(self._head | {"choices": [self._choice(index, delta, "")]} | usage)

    def usage(self, usage: Usage) -> bytes:
        return _event(self._head | usage.event())

    def whole(self, choices: Sequence[Delta], usage: Usage) -> bytes:
        listed = [self._choice(index, delta, self._echoes[index]) for index, delta in enumerate(choices)]
        return encode(self._head | {"choices": listed, "usage": usage.json()})

    def _choice(self, index: int, delta: Delta, echo: str) -> dict[str, object]:
        return {
            "index": index,
            "text": echo + delta.text,
            "logprobs": self._logprobs(delta.logprobs, len(self._echoes[index])),
            "finish_reason": delta.finish,
        } | _ids(delta)

    def _logprobs(self, probs: Sequence[TokenProb], offset: int) -> dict[str, object] | None:
        """`top_logprobs` always holds the sampled token too, as OpenAI says it does."""
        if not probs:
            return None
        names = [self._spell(prob.token.id).text for prob in probs]
        tops: list[dict[str, float]] = []
        for name, prob in zip(names, probs, strict=True):
            top = {self._spell(token_id).text: _logprob(value) for token_id, value in prob.token.top}
            tops.append({name: _logprob(prob.token.logprob)} | top)
        return {
            "tokens": names,
            "token_logprobs": [_logprob(prob.token.logprob) for prob in probs],
            "top_logprobs": tops,
            "text_offset": [offset + prob.offset for prob in probs],
        }


class ChatShape:
    def __init__(
        self,
        head: Head,
        spell: Callable[[int], TokenText],
        *,
        num_choices: int,
        include_usage: bool = False,
    ) -> None:
        self._head = head
        self._chunk_head = head.object("chat.completion.chunk")
        self._spell = spell
        self._include_usage = include_usage
        usage = b',"usage":null' if include_usage else b""
        start = encode(self._chunk_head)[:-1]
        self._starts = [
            b'data: %b,"choices":[{"index":%d,"delta":{"content":' % (start, index) for index in range(num_choices)
        ]
        self._end = b'},"logprobs":null,"finish_reason":null}]' + usage + b"}\n\n"

    def opening(self, index: int) -> bytes:
        return self._event(index, {"role": "assistant", "content": ""}, Delta("", (), None))

    def chunk(self, index: int, delta: Delta) -> bytes:
        if delta.is_plain():
            return self._starts[index] + encode(delta.text) + self._end
        return self._event(index, {"content": delta.text} if delta.text else {}, delta)

    def usage(self, usage: Usage) -> bytes:
        return _event(self._chunk_head | usage.event())

    def whole(self, choices: Sequence[Delta], usage: Usage) -> bytes:
        listed = [
            {
                "index": index,
                "message": {"role": "assistant", "content": delta.text, "refusal": None},
                "logprobs": self._logprobs(delta.logprobs),
                "finish_reason": delta.finish,
            }
            | _ids(delta)
            for index, delta in enumerate(choices)
        ]
        return encode(self._head.object("chat.completion") | {"choices": listed, "usage": usage.json()})

    def _event(self, index: int, content: dict[str, str], delta: Delta) -> bytes:
        choice = {
            "index": index,
            "delta": content,
            "logprobs": self._logprobs(delta.logprobs),
            "finish_reason": delta.finish,
        } | _ids(delta)
        usage = {"usage": None} if self._include_usage else {}
        return _event(self._chunk_head | {"choices": [choice]} | usage)

    def _logprobs(self, probs: Sequence[TokenProb]) -> dict[str, object] | None:
        if not probs:
            return None
        return {"content": [self._entry(prob.token) for prob in probs], "refusal": None}

    def _entry(self, token: Token) -> dict[str, object]:
        top = [self._named(token_id, logprob) for token_id, logprob in token.top]
        return self._named(token.id, token.logprob) | {"top_logprobs": top}

    def _named(self, token_id: int, logprob: float | None) -> dict[str, object]:
        spelled = self._spell(token_id)
        return {"token": spelled.text, "logprob": _logprob(logprob), "bytes": list(spelled.utf8)}


def error_event(error: dict[str, object]) -> bytes:
    """Ends a stream that has begun: OpenAI's client raises APIError on it."""
    return _event({"error": error})


def _ids(delta: Delta) -> dict[str, object]:
    """As vLLM tells them where `return_token_ids` asks for them."""
    return {} if delta.token_ids is None else {"token_ids": delta.token_ids}


def _event(value: dict[str, object]) -> bytes:
    return b"data: " + encode(value) + b"\n\n"


def _logprob(value: float | None) -> float:
    return _LEAST_LOGPROB if value is None else max(value, _LEAST_LOGPROB)
