"""A checked request, and the submits it comes to once its prompts are tokens and the model is known. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import msgspec

from pd.runtime.core.events import Submit
from pd.runtime.front.checks import out_of_range, show
from pd.runtime.front.errors import RequestError
from pd.runtime.front.template import Message
from pd.runtime.wire.values import ModelCard, Sampling

MAX_CHOICES = 128
"""Answers of one HTTP request, over all its prompts; each is a request of its own to the instances."""

_DEFAULT_COMPLETION = 16  # tokens; OpenAI's. A chat's default is all the room there is.
_SEED_MASK = (1 << 63) - 1

Prompts = tuple[str, ...] | tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class Conversation:
    messages: tuple[Message, ...]
    add_generation_prompt: bool
    variables: dict[str, object]  # the client's, for the chat template


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """A request of either endpoint, right in itself. Whether the model can take it, `plan_submits` checks."""

    model: str | None
    prompt: Prompts | Conversation
    num_choices: int  # of each prompt
    max_tokens: int | None
    sampling: Sampling  # its max_tokens, seed and end-of-text ids are still to come
    seed: int | None
    stop: tuple[str, ...] = ()
    include_stop: bool = False
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    add_special_tokens: bool = True
    return_token_ids: bool = False
    deadline_s: float | None = None
    """For the whole answer, where the client wants it sooner than the router's own."""
    stream: bool = False
    include_usage: bool = False
    echo: bool = False

    @property
    def prompt_field(self) -> str:
        return "messages" if isinstance(self.prompt, Conversation) else "prompt"


class Drawn(NamedTuple):
    """What the shell rolled for this request."""

    request_id: str
    seed: int  # used where the client gave none


def plan_submits(
    wanted: Wanted,
    prompts: Sequence[Sequence[int]],
    *,
    card: ModelCard,
    eos_token_ids: tuple[int, ...],
    drawn: Drawn,
    deadline_s: float,
) -> tuple[Submit, ...]:
    """One for each choice of each prompt, prompts outermost, named "<request_id>-<index>".

    Choice i of every prompt samples with seed + i, so a prompt's answers are the same alone and in a list.
    Raises RequestError where the model's limits are passed.
    """
    if len(prompts) * wanted.num_choices > MAX_CHOICES:
        raise RequestError(
            f"{len(prompts)} prompts with n = {wanted.num_choices} are more than {MAX_CHOICES} answers",
            param="n",
        )
    check_ids("stop_token_ids", wanted.sampling.stop_token_ids, card.vocab_size)
    check_ids("logit_bias", (token_id for token_id, _ in wanted.sampling.logit_bias), card.vocab_size)
    stop_ids = wanted.sampling.stop_token_ids + (() if wanted.ignore_eos else eos_token_ids)
    seed = drawn.seed if wanted.seed is None else wanted.seed
    submits: list[Submit] = []
    for prompt in prompts:
        check_ids(wanted.prompt_field, prompt, card.vocab_size)
        max_tokens = _max_tokens(wanted, num_prompt=len(prompt), limit=card.max_model_len)
        for choice in range(wanted.num_choices):
            sampling = msgspec.structs.replace(
                wanted.sampling,
                max_tokens=max_tokens,
                seed=(seed + choice) & _SEED_MASK,
                stop_token_ids=tuple(dict.fromkeys(stop_ids)),
            )
            name = f"{drawn.request_id}-{len(submits)}"
            submits.append(Submit(name, tuple(prompt), sampling, deadline_s))
    return tuple(submits)


def _max_tokens(wanted: Wanted, *, num_prompt: int, limit: int) -> int:
    if num_prompt == 0:
        raise RequestError(f"{wanted.prompt_field} has no tokens", param=wanted.prompt_field)
    room = limit - num_prompt
    asked = wanted.max_tokens
    if room < 1 or (asked is not None and asked > room):
        answer = "" if asked is None else f" and max_tokens asks for {show(asked)}"
        raise RequestError(
            f"this model takes at most {limit} tokens, prompt and answer together; the prompt has {num_prompt}{answer}",
            code="context_length_exceeded",
            param=wanted.prompt_field if room < 1 else "max_tokens",
        )
    if asked is None:
        asked = room if isinstance(wanted.prompt, Conversation) else min(_DEFAULT_COMPLETION, room)
    if wanted.sampling.min_tokens > asked:
        raise out_of_range("min_tokens", wanted.sampling.min_tokens, f"at most max_tokens, {asked}")
    return asked


def check_ids(field: str, token_ids: Iterable[int], vocab_size: int) -> None:
    ids = tuple(token_ids)
    if not ids:
        return
    for token_id in (min(ids), max(ids)):
        if not 0 <= token_id < vocab_size:
            raise RequestError(
                f"{field}: token id {show(token_id)} is outside the vocabulary, 0 to {vocab_size - 1}",
                code="out_of_range",
                param=field,
            )
