"""A streamed answer's bytes -> when its chunks came, and what the server said of it. Pure.

Rules
1. Every chunk with a choice counts, whether or not it holds text (a piece of a character has none yet); but a chat's
   opening one, which brings a role and no token, does not.
2. Comments (`:` lines, which some servers send to keep a stream alive) and usage count for nothing.
"""

from __future__ import annotations

import msgspec

_DATA = b"data:"
_DONE = b"[DONE]"


class _Delta(msgspec.Struct):
    role: str | None = None
    content: str | None = None
    reasoning_content: str | None = None
    tool_calls: object = None

    def is_opening(self) -> bool:
        return self.role is not None and not (self.content or self.reasoning_content or self.tool_calls)


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None
    finish_reason: str | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None


class _Event(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: object = None
    timings: dict[str, float] | None = None


_decode = msgspec.json.Decoder(_Event).decode


class Reading:
    """One answer's stream. `fault` is set where it is nonsense or the server says it failed; read no further then."""

    __slots__ = ("_rest", "chunks", "fault", "finish", "has_end", "num_answer", "num_prompt", "texts", "timings")

    def __init__(self) -> None:
        self.chunks: list[float] = []
        self.texts: list[str] = []
        self.finish: str | None = None
        self.num_prompt: int | None = None
        self.num_answer: int | None = None
        self.timings: dict[str, float] | None = None
        self.has_end = False  # [DONE] came
        self.fault: tuple[str, str] | None = None  # kind and detail
        self._rest = b""

    def feed(self, data: bytes, now: float) -> None:
        """Bytes that came at `now`, in whatever pieces."""
        text = self._rest + data if self._rest else data
        if b"\r" in text:
            text = text.replace(b"\r\n", b"\n")
        *events, self._rest = text.split(b"\n\n")
        for event in events:
            self._take(event, now)

    def _take(self, event: bytes, now: float) -> None:
        if b"\n" in event or not event.startswith(_DATA):
            lines = [line[5:].strip() for line in event.split(b"\n") if line.startswith(_DATA)]
            payload = b"\n".join(lines)
        else:
            payload = event[5:].strip()
        if not payload or self.fault is not None:
            return
        if payload == _DONE:
            self.has_end = True
            return
        try:
            said = _decode(payload)
        except (msgspec.DecodeError, msgspec.ValidationError) as error:
            self.fault = "malformed stream", f"{error}: {payload[:80]!r}"
            return
        if said.error is not None:
            self.fault = "error in stream", str(said.error)[:200]
            return
        self._note(said, now)

    def _note(self, said: _Event, now: float) -> None:
        if said.usage is not None:
            self.num_prompt, self.num_answer = said.usage.prompt_tokens, said.usage.completion_tokens
        if said.timings is not None:
            self.timings = said.timings
        if not said.choices:
            return
        choice = said.choices[0]
        if choice.finish_reason is not None:
            self.finish = choice.finish_reason
        delta = choice.delta
        if delta is not None and not self.chunks and choice.finish_reason is None and delta.is_opening():
            return
        self.chunks.append(now)
        text = choice.text if delta is None else delta.content or delta.reasoning_content
        if text:
            self.texts.append(text)
