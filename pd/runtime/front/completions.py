"""The two routes that generate: body -> wanted -> submits -> answer."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence

from pd.runtime.front.answer import Answer
from pd.runtime.front.asgi import Exchange
from pd.runtime.front.checks import show
from pd.runtime.front.door import Door
from pd.runtime.front.errors import RequestError
from pd.runtime.front.generate import Run, reply_stream, reply_whole
from pd.runtime.front.openai import ChatBody, CompletionBody, parse_chat, parse_completion
from pd.runtime.front.settings import FrontSettings
from pd.runtime.front.shapes import ChatShape, CompletionShape, Head, Shape
from pd.runtime.front.strangers import Strangers
from pd.runtime.front.text import Text
from pd.runtime.front.tokenizing import Tokenizing
from pd.runtime.front.wanted import Conversation, Drawn, Wanted, plan_submits
from pd.runtime.wire.values import ModelCard, Role

_RETRY_S = 2.0  # an instance says Hello within a second of being ready


class Completions:
    def __init__(self, door: Door, text: Text, *, settings: FrontSettings, tokenizing: Tokenizing) -> None:
        self._door = door
        self._text = text
        self._settings = settings
        self._tokenizing = tokenizing
        self._strangers = Strangers()

    async def complete(self, exchange: Exchange) -> None:
        body = await read_body(exchange, self._settings)
        wanted = parse_completion(body)
        self._strangers.look(body, CompletionBody)
        await self._generate(exchange, wanted)

    async def chat(self, exchange: Exchange) -> None:
        body = await read_body(exchange, self._settings)
        wanted = parse_chat(body)
        self._strangers.look(body, ChatBody)
        await self._generate(exchange, wanted)

    async def _generate(self, exchange: Exchange, wanted: Wanted) -> None:
        card = serving(self._door, wanted.model)
        await exchange.unless_gone(self._generate_for(exchange, wanted, card))

    async def _generate_for(self, exchange: Exchange, wanted: Wanted, card: ModelCard) -> None:
        kind = "chatcmpl" if isinstance(wanted.prompt, Conversation) else "cmpl"
        request_id = f"{kind}-{secrets.token_hex(12)}"
        prompts = await self._tokenizing.prompts(wanted, limit=card.max_model_len)
        submits = plan_submits(
            wanted,
            prompts,
            card=card,
            eos_token_ids=self._text.eos_token_ids,
            drawn=Drawn(request_id, secrets.randbits(63)),
            deadline_s=min(self._settings.request_s, wanted.deadline_s or self._settings.request_s),
        )
        shape = self._shape(wanted, prompts, Head(request_id, int(time.time()), card.name))
        headers = ((b"x-request-id", request_id.encode()),)
        with Run(self._door, tells_timings=exchange.header(b"x-pd-timings") == b"1") as run:
            for submit in submits:
                run.submit(submit, self._new_answer(wanted, submit.tokens))
            if wanted.stream:
                counted = wanted.num_choices if wanted.include_usage else None
                await reply_stream(exchange, run, shape, num_choices=counted, headers=headers)
            else:
                await reply_whole(exchange, run, shape, num_choices=wanted.num_choices, headers=headers)

    def _new_answer(self, wanted: Wanted, prompt: tuple[int, ...]) -> Answer:
        return Answer(
            self._text.detokenizer(prompt, skip_special_tokens=wanted.skip_special_tokens),
            stop=wanted.stop,
            include_stop=wanted.include_stop,
            min_tokens=wanted.sampling.min_tokens,
            logprobs=wanted.sampling.logprobs is not None,
            token_ids=wanted.return_token_ids,
        )

    def _shape(self, wanted: Wanted, prompts: list[tuple[int, ...]], head: Head) -> Shape:
        num_choices = wanted.num_choices * len(prompts)
        if isinstance(wanted.prompt, Conversation):
            return ChatShape(head, self._text.spell, num_choices=num_choices, include_usage=wanted.include_usage)
        echoes: list[str] = []
        for prompt in prompts:
            skip = wanted.skip_special_tokens
            echo = self._text.decode(prompt, skip_special_tokens=skip) if wanted.echo else ""
            echoes += [echo] * wanted.num_choices
        return CompletionShape(head, self._text.spell, echoes=echoes, include_usage=wanted.include_usage)


async def read_body(exchange: Exchange, settings: FrontSettings) -> bytes:
    return await exchange.read_body(limit=settings.max_body_bytes, deadline_s=settings.body_s)


def known(door: Door, model: str | None) -> ModelCard:
    """The card of the model of this name; None means whichever is served. Raises RequestError 404 or 503."""
    card = door.card()
    if card is None:
        raise not_ready(door.missing())
    if model is not None and model != card.name:
        raise RequestError(
            f"the model {show(model)} does not exist; {card.name!r} is served",
            status=404,
            code="model_not_found",
            param="model",
        )
    return card


def serving(door: Door, model: str | None) -> ModelCard:
    """As `known`, and there must be instances to serve it."""
    card = known(door, model)
    missing = door.missing()
    if missing:
        raise not_ready(missing)
    return card


def not_ready(missing: Sequence[Role]) -> RequestError:
    roles = " and no living ".join(role.value for role in missing)
    who = f": no living {roles} instance" if roles else ""
    return RequestError(f"this cluster cannot serve now{who}", status=503, code="not_ready", retry_after_s=_RETRY_S)
