"""OpenAI's requests: bytes -> a checked `Wanted`. Pure.

Rules
1. A fault raises RequestError naming the field, what was expected and what was given.
2. A field unknown to us is ignored, as every compatible server does, and said once (strangers.py). One we know but
   cannot honour, where ignoring it would change the answer, is refused unless its value asks for nothing.
3. null is the same as leaving a field out.
"""

from __future__ import annotations

import msgspec

from pd.runtime.front.chat import NOTHING, ChatMessage, to_template
from pd.runtime.front.checks import (
    Number,
    asks_nothing,
    decode,
    out_of_range,
    show,
    unsupported,
    within,
    wrong_type,
)
from pd.runtime.front.errors import RequestError
from pd.runtime.front.wanted import MAX_CHOICES, Conversation, Prompts, Wanted
from pd.runtime.wire.values import Sampling

MAX_STOPS = 16
MAX_STOP_LENGTH = 1024
"""Characters. Stops are searched at every token: both bounds keep that small. OpenAI takes 4 stops."""
MAX_LOGPROBS = 20

_MAX_DEADLINE_S = 1e6

_INT32 = (1 << 31) - 1
_INT64 = (1 << 63) - 1


class _StreamOptions(msgspec.Struct):
    include_usage: bool | None = None


class _Format(msgspec.Struct):
    type: str


class _Common(msgspec.Struct, kw_only=True):
    model: str | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    n: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[int, float] | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    add_special_tokens: bool | None = None
    return_token_ids: bool | None = None
    deadline_s: float | None = None
    stream: bool | None = None
    stream_options: _StreamOptions | None = None
    response_format: _Format | None = None
    # Known and refused:
    use_beam_search: msgspec.Raw = NOTHING
    prompt_logprobs: msgspec.Raw = NOTHING
    truncate_prompt_tokens: msgspec.Raw = NOTHING
    allowed_token_ids: msgspec.Raw = NOTHING
    bad_words: msgspec.Raw = NOTHING
    logits_processors: msgspec.Raw = NOTHING
    structured_outputs: msgspec.Raw = NOTHING
    guided_json: msgspec.Raw = NOTHING
    guided_regex: msgspec.Raw = NOTHING
    guided_choice: msgspec.Raw = NOTHING
    guided_grammar: msgspec.Raw = NOTHING


class CompletionBody(_Common, kw_only=True):
    prompt: msgspec.Raw = NOTHING
    echo: bool | None = None
    best_of: int | None = None
    logprobs: int | None = None
    # Known and refused:
    suffix: msgspec.Raw = NOTHING
    prompt_embeds: msgspec.Raw = NOTHING


class ChatBody(_Common, kw_only=True):
    messages: list[ChatMessage]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, object] | None = None
    modalities: list[str] | None = None
    tool_choice: msgspec.Raw = NOTHING
    function_call: msgspec.Raw = NOTHING
    # Known and refused:
    tools: msgspec.Raw = NOTHING
    functions: msgspec.Raw = NOTHING
    chat_template: msgspec.Raw = NOTHING
    continue_final_message: msgspec.Raw = NOTHING
    documents: msgspec.Raw = NOTHING
    audio: msgspec.Raw = NOTHING


_JUDGED_APART = {"prompt", "tools", "tool_choice", "functions", "function_call"}
"""Raw fields that are not simply refused; every other Raw one is."""


def parse_completion(body: bytes) -> Wanted:
    """A body of POST /v1/completions. Raises RequestError."""
    asked = decode(body, CompletionBody)
    _refuse(asked)
    if asked.best_of is not None and asked.best_of != (asked.n or 1):
        raise unsupported("best_of", f"must be equal to n, {show(asked.n or 1)}, got {show(asked.best_of)}")
    logprobs = within("logprobs", asked.logprobs, 0, MAX_LOGPROBS)
    if asked.echo and logprobs is not None:
        raise unsupported("echo", "not together with logprobs: a prompt's logprobs are not computed")
    return _wanted(
        asked,
        prompt=parse_prompts(asked.prompt),
        max_tokens=_at_least_one("max_tokens", asked.max_tokens),
        logprobs=logprobs,
        echo=asked.echo is True,
    )


def parse_chat(body: bytes) -> Wanted:
    """A body of POST /v1/chat/completions. Raises RequestError."""
    asked = decode(body, ChatBody)
    _refuse(asked)
    _refuse_tools(asked)
    if asked.modalities is not None and asked.modalities != ["text"]:
        raise unsupported("modalities", "only ['text'] is supported")
    if asked.top_logprobs is not None and not asked.logprobs:
        raise RequestError("top_logprobs needs logprobs to be true", param="top_logprobs")
    top = _or(within("top_logprobs", asked.top_logprobs, 0, MAX_LOGPROBS), 0)
    return _wanted(
        asked,
        prompt=Conversation(
            to_template(asked.messages),
            asked.add_generation_prompt is not False,
            asked.chat_template_kwargs or {},
        ),
        max_tokens=_chat_max_tokens(asked),
        logprobs=top if asked.logprobs else None,
        echo=False,
    )


def parse_prompts(raw: msgspec.Raw) -> Prompts:
    """A string, a list of strings, a list of token ids, or a list of such lists. Raises RequestError."""
    text = bytes(raw).strip()
    if text == b"null":
        raise RequestError("prompt is missing", param="prompt")
    prompts: Prompts
    try:
        match text[:1], text[1:].lstrip()[:1]:
            case b"[", b'"':
                prompts = msgspec.json.decode(text, type=tuple[str, ...])
            case b"[", b"[":
                prompts = msgspec.json.decode(text, type=tuple[tuple[int, ...], ...])
            case b"[", _:
                prompts = (msgspec.json.decode(text, type=tuple[int, ...]),)
            case _:
                prompts = (msgspec.json.decode(text, type=str),)
    except msgspec.ValidationError as error:
        raise wrong_type(str(error), "prompt") from error
    for index, prompt in enumerate(prompts):
        if len(prompt) == 0:
            where = "prompt" if len(prompts) == 1 else f"prompt[{index}]"
            raise RequestError(f"{where} is empty", param="prompt")
    return prompts


def _refuse(asked: _Common) -> None:
    for name in asked.__struct_fields__:
        value = getattr(asked, name)
        if isinstance(value, msgspec.Raw) and name not in _JUDGED_APART and not asks_nothing(value):
            raise unsupported(name, "is not supported")
    if asked.response_format is not None and asked.response_format.type != "text":
        given = show(asked.response_format.type)
        raise unsupported("response_format", f"only type 'text' is supported, got {given}")


def _refuse_tools(asked: ChatBody) -> None:
    """Tools that the client says must not be called change nothing."""
    for tools, choice in (("tools", "tool_choice"), ("functions", "function_call")):
        chosen = bytes(getattr(asked, choice)).strip()
        if chosen == b'"none"':
            continue
        if not asks_nothing(getattr(asked, tools)):
            raise unsupported(tools, f"is not supported; {choice} 'none' makes it be ignored")
        if chosen not in (b"null", b'"auto"'):
            raise unsupported(choice, "is not supported, but 'none' or 'auto'")


def _wanted(
    asked: _Common,
    *,
    prompt: Prompts | Conversation,
    max_tokens: int | None,
    logprobs: int | None,
    echo: bool,
) -> Wanted:
    options = asked.stream_options
    if options is not None and not asked.stream:
        raise RequestError("stream_options needs stream to be true", param="stream_options")
    return Wanted(
        model=asked.model,
        prompt=prompt,
        num_choices=_or(within("n", asked.n, 1, MAX_CHOICES), 1),
        max_tokens=max_tokens,
        sampling=_sampling(asked, logprobs),
        seed=within("seed", asked.seed, -_INT64 - 1, _INT64),
        stop=_stops(asked.stop),
        include_stop=asked.include_stop_str_in_output is True,
        ignore_eos=asked.ignore_eos is True,
        skip_special_tokens=asked.skip_special_tokens is not False,
        add_special_tokens=asked.add_special_tokens is not False,
        return_token_ids=asked.return_token_ids is True,
        deadline_s=within("deadline_s", asked.deadline_s, 0.001, _MAX_DEADLINE_S),
        stream=asked.stream is True,
        include_usage=options is not None and options.include_usage is True,
        echo=echo,
    )


def _sampling(asked: _Common, logprobs: int | None) -> Sampling:
    top_p = _or(within("top_p", asked.top_p, 0.0, 1.0), 1.0)
    if top_p == 0.0:
        raise out_of_range("top_p", top_p, "above 0 and at most 1")
    repetition = _or(within("repetition_penalty", asked.repetition_penalty, 0.0, 10.0), 1.0)
    if repetition == 0.0:
        raise out_of_range("repetition_penalty", repetition, "above 0 and at most 10")
    top_k = within("top_k", asked.top_k, -1, _INT32)
    return Sampling(
        max_tokens=0,
        temperature=_or(within("temperature", asked.temperature, 0.0, 2.0), 1.0),
        top_p=top_p,
        top_k=top_k if top_k is not None and top_k > 0 else None,  # -1 and 0: all, as vLLM
        min_p=_or(within("min_p", asked.min_p, 0.0, 1.0), 0.0),
        min_tokens=_or(within("min_tokens", asked.min_tokens, 0, _INT32), 0),
        stop_token_ids=tuple(asked.stop_token_ids or ()),
        presence_penalty=_or(within("presence_penalty", asked.presence_penalty, -2.0, 2.0), 0.0),
        frequency_penalty=_or(within("frequency_penalty", asked.frequency_penalty, -2.0, 2.0), 0.0),
        repetition_penalty=repetition,
        logit_bias=_logit_bias(asked.logit_bias or {}),
        logprobs=logprobs,
    )


def _logit_bias(biases: dict[int, float]) -> tuple[tuple[int, float], ...]:
    for bias in biases.values():
        within("logit_bias", bias, -100.0, 100.0)
    return tuple(sorted(biases.items()))


def _chat_max_tokens(asked: ChatBody) -> int | None:
    """max_tokens is the old name."""
    old = _at_least_one("max_tokens", asked.max_tokens)
    new = _at_least_one("max_completion_tokens", asked.max_completion_tokens)
    if old is not None and new is not None and old != new:
        raise RequestError(
            f"max_tokens is {show(old)} and max_completion_tokens {show(new)}: give one of them",
            param="max_completion_tokens",
        )
    return old if new is None else new


def _at_least_one(field: str, value: int | None) -> int | None:
    if value is not None and value < 1:
        raise out_of_range(field, value, "at least 1")
    return value


def _stops(stop: str | list[str] | None) -> tuple[str, ...]:
    stops = (stop,) if isinstance(stop, str) else tuple(stop or ())
    if len(stops) > MAX_STOPS:
        raise RequestError(f"stop takes at most {MAX_STOPS} strings, got {len(stops)}", param="stop")
    for text in stops:
        if not 1 <= len(text) <= MAX_STOP_LENGTH:
            raise RequestError(
                f"a stop string must have 1 to {MAX_STOP_LENGTH} characters, got {len(text)}", param="stop"
            )
    return stops


def _or(value: Number | None, default: Number) -> Number:
    return default if value is None else value
