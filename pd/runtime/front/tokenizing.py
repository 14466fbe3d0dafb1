"""Prompts to tokens and back, without holding up the loop."""

from __future__ import annotations

import asyncio

import msgspec

from pd.runtime.front.chat import ChatMessage, to_template
from pd.runtime.front.checks import decode
from pd.runtime.front.errors import RequestError
from pd.runtime.front.text import Text
from pd.runtime.front.wanted import Conversation, Wanted
from pd.runtime.wire.values import Sampling

_SHORT = 512
"""Characters tokenized where they are: 0.35 ms of the loop's time, no more than a thread's hop costs under load."""


class Tokenizing:
    """Owned by the front; used from its loop."""

    def __init__(self, text: Text, *, at_once: int, max_waiting: int) -> None:
        self._text = text
        self._turns = asyncio.Semaphore(at_once)
        self._max_waiting = max_waiting
        self._num_waiting = 0

    async def prompts(self, wanted: Wanted, *, limit: int | None = None) -> list[tuple[int, ...]]:
        """Token ids of each prompt. Raises RequestError: what a chat template says, 429 if too many wait, or of a
        prompt that must have more than `limit` tokens, which is not tokenized to learn how many."""
        if limit is not None:
            self._check_lengths(wanted, limit)
        if sum(_chars(wanted)) <= _SHORT:
            return self._tokens(wanted)
        if self._num_waiting >= self._max_waiting:
            raise RequestError(
                f"{self._num_waiting} long prompts wait to be tokenized",
                status=429,
                code="overloaded",
                retry_after_s=1.0,
            )
        self._num_waiting += 1
        try:
            async with self._turns:
                return await asyncio.to_thread(self._tokens, wanted)
        finally:
            self._num_waiting -= 1

    def _check_lengths(self, wanted: Wanted, limit: int) -> None:
        longest = self._text.longest_token
        for num_chars in _chars(wanted):
            if num_chars > limit * longest:
                raise RequestError(
                    f"this model takes at most {limit} tokens, prompt and answer together; the prompt has {num_chars} "
                    f"characters, and none of its tokens has more than {longest}",
                    code="context_length_exceeded",
                    param=wanted.prompt_field,
                )

    def _tokens(self, wanted: Wanted) -> list[tuple[int, ...]]:
        """A rendered chat spells its special tokens out already, so none is added."""
        prompt = wanted.prompt
        if isinstance(prompt, Conversation):
            rendered = self._text.render(
                prompt.messages,
                add_generation_prompt=prompt.add_generation_prompt,
                variables=prompt.variables,
            )
            return self._encode([rendered], add_special_tokens=False)
        texts = [each for each in prompt if isinstance(each, str)]
        if texts:
            return self._encode(texts, add_special_tokens=wanted.add_special_tokens)
        return [each for each in prompt if not isinstance(each, str)]

    def _encode(self, texts: list[str], *, add_special_tokens: bool) -> list[tuple[int, ...]]:
        return [tuple(ids) for ids in self._text.encode(texts, add_special_tokens=add_special_tokens)]


def _chars(wanted: Wanted) -> list[int]:
    """Of each prompt that is text."""
    prompt = wanted.prompt
    if isinstance(prompt, Conversation):
        return [sum(len(str(message["content"])) for message in prompt.messages)]
    return [len(each) for each in prompt if isinstance(each, str)]


class TokenizeBody(msgspec.Struct):
    model: str | None = None
    prompt: str | None = None
    messages: list[ChatMessage] | None = None
    add_special_tokens: bool = True
    add_generation_prompt: bool = True


class DetokenizeBody(msgspec.Struct):
    tokens: list[int]
    model: str | None = None


def parse_tokenize(body: bytes) -> Wanted:
    """A body of POST /tokenize: a text or a chat, as vLLM's. Raises RequestError."""
    asked = decode(body, TokenizeBody)
    if (asked.prompt is None) == (asked.messages is None):
        raise RequestError("give either prompt or messages", param="prompt")
    prompt: tuple[str, ...] | Conversation
    if asked.messages is not None:
        prompt = Conversation(to_template(asked.messages), asked.add_generation_prompt, {})
    else:
        prompt = (asked.prompt or "",)
    return Wanted(
        model=asked.model,
        prompt=prompt,
        num_choices=1,
        max_tokens=None,
        sampling=Sampling(max_tokens=0),
        seed=None,
        add_special_tokens=asked.add_special_tokens,
    )


def parse_detokenize(body: bytes) -> tuple[str | None, list[int]]:
    """A body of POST /detokenize: the model's name and the tokens. Raises RequestError."""
    asked = decode(body, DetokenizeBody)
    for token_id in asked.tokens:
        if not 0 <= token_id < 1 << 31:
            raise RequestError("tokens: a token id is negative or larger than any vocabulary", param="tokens")
    return asked.model, asked.tokens
