"""What is asked of a server: prompts, conversations, and their form in OpenAI's API. Pure.

Rules
1. A conversation is what arrives; most have one ask. A further ask waits for the last answer, thinks, and brings all
   that was said before.
2. Made-up prompts are token ids, so their length is exact. Where text is needed, an id becomes a common word, which
   most vocabularies hold as one token; the server's own count is what is reported.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

Message = dict[str, str]
Prompt = tuple[int, ...] | str | tuple[Message, ...]

_TEXT = (
    "time year people way day man thing woman life child world school state family student group country "
    "problem hand part place case week company system program question work number night point home water "
    "room mother area money story fact month lot right study book eye job word business issue side kind head "
    "house service friend father power hour game line end member law car city name president team minute idea "
    "kid body parent face others level office door health person art war history party result change morning "
    "reason research girl guy moment air teacher "
)
_COMMON = tuple(_TEXT.split())


@dataclass(frozen=True, slots=True)
class Ask:
    """One request."""

    prompt: Prompt  # of a further turn: only what is new
    num_answer: int  # tokens
    think_s: float = 0.0  # from the last turn's end; 0 for a first one


@dataclass(frozen=True, slots=True)
class Conversation:
    asks: tuple[Ask, ...]
    at_s: float | None = None  # when a trace has it arrive


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """What every request of a run shares."""

    model: str
    chat: bool
    ignore_eos: bool
    extra: dict[str, object]

    @property
    def path(self) -> str:
        return "/v1/chat/completions" if self.chat else "/v1/completions"

    def body(self, ask: Ask, said: Sequence[tuple[Prompt, str]] = ()) -> bytes:
        """The request's JSON; `said` is what came before in this conversation: prompts and their answers."""
        asked: dict[str, object] = {"messages": self._messages(ask, said)} if self.chat else {}
        if not self.chat:
            asked["prompt"] = ask.prompt if not said and _is_ids(ask.prompt) else self._told(ask, said)
        fixed = {"stream": True, "stream_options": {"include_usage": True}, "temperature": 0.0}
        ending = {"ignore_eos": True} if self.ignore_eos else {}
        return msgspec.json.encode(
            {"model": self.model, **asked, "max_tokens": ask.num_answer, **fixed, **ending, **self.extra}
        )

    def _messages(self, ask: Ask, said: Sequence[tuple[Prompt, str]]) -> list[Message]:
        messages: list[Message] = []
        for prompt, answer in said:
            messages += [*_as_messages(prompt), {"role": "assistant", "content": answer}]
        return messages + _as_messages(ask.prompt)

    def _told(self, ask: Ask, said: Sequence[tuple[Prompt, str]]) -> str:
        return "".join(_as_text(prompt) + answer for prompt, answer in said) + _as_text(ask.prompt)


def spelled(ids: Sequence[int]) -> str:
    """About as many tokens of text as there are ids; equal ids, equal words."""
    return "".join(f" {_COMMON[token % len(_COMMON)]}" for token in ids)


def _is_ids(prompt: Prompt) -> bool:
    return isinstance(prompt, tuple) and bool(prompt) and isinstance(prompt[0], int)


def _as_text(prompt: Prompt) -> str:
    if isinstance(prompt, str):
        return prompt
    return "".join(
        message["content"] if isinstance(message, dict) else f" {_COMMON[message % len(_COMMON)]}" for message in prompt
    )


def _as_messages(prompt: Prompt) -> list[Message]:
    if isinstance(prompt, tuple) and prompt and isinstance(prompt[0], dict):
        return [message for message in prompt if isinstance(message, dict)]
    return [{"role": "user", "content": _as_text(prompt).strip()}]
