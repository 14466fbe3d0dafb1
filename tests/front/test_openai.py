"""Requests: every fault is a RequestError that names it, and nothing else ever comes out of the parser."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pd.runtime.front.errors import RequestError
from pd.runtime.front.openai import ChatBody, CompletionBody, parse_chat, parse_completion
from pd.runtime.front.wanted import Conversation, Drawn, Wanted, plan_submits
from pd.runtime.wire.values import ModelCard

CARD = ModelCard("tiny", "f", vocab_size=300, max_model_len=64)
HELLO = [{"role": "user", "content": "hi"}]


def completion(**fields: object) -> Wanted:
    return parse_completion(json.dumps({"prompt": "x"} | fields).encode())


def chat(**fields: object) -> Wanted:
    return parse_chat(json.dumps({"messages": HELLO} | fields).encode())


def fault(parse: Callable[[], object]) -> RequestError:
    with pytest.raises(RequestError) as caught:
        parse()
    return caught.value


def plan(wanted: Wanted, *prompts: list[int]) -> tuple:
    return plan_submits(wanted, prompts, card=CARD, eos_token_ids=(2,), drawn=Drawn("cmpl-1", 1000), deadline_s=60.0)


@pytest.mark.parametrize(
    ("prompt", "parsed"),
    [
        ("a", ("a",)),
        (["a", "b"], ("a", "b")),
        ([1, 2], ((1, 2),)),
        ([[1], [2, 3]], ((1,), (2, 3))),
    ],
)
def test_prompt_takes_its_four_shapes(prompt: object, parsed: object) -> None:
    assert completion(prompt=prompt).prompt == parsed


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"prompt": 3}, "prompt", "prompt: expected str, got int"),
        ({"prompt": None}, "prompt", "missing"),
        ({"prompt": ""}, "prompt", "prompt is empty"),
        ({"prompt": []}, "prompt", "prompt is empty"),
        ({"prompt": ["a", ""]}, "prompt", "prompt[1] is empty"),
        ({"prompt": ["a", 1]}, "prompt[1]", "prompt[1]: expected str, got int"),
        ({"prompt": [[1], ["a"]]}, "prompt[1][0]", "expected int, got str"),
        ({"prompt": [1, 2.5]}, "prompt[1]", "expected int, got float"),
        ({"max_tokens": "5"}, "max_tokens", "max_tokens: expected int or null, got str"),
        ({"max_tokens": 0}, "max_tokens", "at least 1, got 0"),
        ({"max_tokens": -3}, "max_tokens", "at least 1, got -3"),
        ({"temperature": -0.1}, "temperature", "between 0.0 and 2.0, got -0.1"),
        ({"temperature": 2.1}, "temperature", "between 0.0 and 2.0, got 2.1"),
        ({"temperature": "hot"}, "temperature", "expected float or null, got str"),
        ({"top_p": 0}, "top_p", "above 0 and at most 1"),
        ({"top_p": 1.1}, "top_p", "between 0.0 and 1.0, got 1.1"),
        ({"top_k": -2}, "top_k", "got -2"),
        ({"min_p": 2}, "min_p", "got 2"),
        ({"n": 0}, "n", "between 1 and 128, got 0"),
        ({"n": 10**30}, "n", "more than 20 digits"),
        ({"seed": 2**63}, "seed", "seed must be between"),
        ({"min_tokens": -1}, "min_tokens", "got -1"),
        ({"presence_penalty": 3}, "presence_penalty", "between -2.0 and 2.0"),
        ({"frequency_penalty": -3}, "frequency_penalty", "between -2.0 and 2.0"),
        ({"repetition_penalty": 0}, "repetition_penalty", "above 0"),
        ({"logit_bias": {"x": 1}}, "logit_bias", "a key of logit_bias: expected int, got str"),
        ({"logit_bias": {"1": 101}}, "logit_bias", "between -100.0 and 100.0, got 101"),
        ({"stop": ["a"] * 17}, "stop", "at most 16"),
        ({"stop": ""}, "stop", "1 to 1024 characters, got 0"),
        ({"stop": [1]}, "stop[0]", "expected str, got int"),
        ({"logprobs": 21}, "logprobs", "between 0 and 20, got 21"),
        ({"logprobs": 1, "echo": True}, "echo", "logprobs"),
        ({"suffix": "end"}, "suffix", "not supported"),
        ({"best_of": 3}, "best_of", "equal to n, 1, got 3"),
        ({"response_format": {"type": "json_object"}}, "response_format", "'json_object'"),
        ({"guided_regex": "a+"}, "guided_regex", "not supported"),
        ({"prompt_logprobs": 1}, "prompt_logprobs", "not supported"),
        ({"stream_options": {"include_usage": True}}, "stream_options", "needs stream"),
        ({"stream": "yes"}, "stream", "expected bool or null, got str"),
    ],
)
def test_completion_fault_names_field_expected_and_given(fields: dict[str, object], param: str, words: str) -> None:
    error = fault(lambda: completion(**fields))
    assert (error.status, error.param) == (400, param)
    assert words in error.message


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"messages": []}, "messages", "messages is empty"),
        ({"messages": "hi"}, "messages", "expected array, got str"),
        ({"messages": [{"content": "x"}]}, "messages[0]", "missing required field role"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role", "got 'robot'"),
        ({"messages": [{"role": "user"}]}, "messages[0].content", "missing"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
            "messages[0].content[0].type",
            "only 'text'",
        ),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text", "miss"),
        ({"messages": [*HELLO, {"role": "assistant", "tool_calls": [{}]}]}, "messages[1]", "tool calls"),
        ({"tools": [{"type": "function"}]}, "tools", "not supported"),
        ({"tools": [{}], "tool_choice": "required"}, "tools", "not supported"),
        ({"tool_choice": "required"}, "tool_choice", "not supported"),
        ({"functions": [{}]}, "functions", "not supported"),
        ({"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format", "'json_schema'"),
        ({"modalities": ["text", "audio"]}, "modalities", "only ['text']"),
        ({"top_logprobs": 3}, "top_logprobs", "needs logprobs"),
        ({"logprobs": True, "top_logprobs": 30}, "top_logprobs", "between 0 and 20, got 30"),
        ({"logprobs": 3}, "logprobs", "expected bool or null, got int"),
        ({"max_tokens": 3, "max_completion_tokens": 4}, "max_completion_tokens", "give one"),
        ({"max_completion_tokens": 0}, "max_completion_tokens", "at least 1"),
    ],
)
def test_chat_fault_names_field_expected_and_given(fields: dict[str, object], param: str, words: str) -> None:
    error = fault(lambda: chat(**fields))
    assert (error.status, error.param) == (400, param)
    assert words in error.message


@pytest.mark.parametrize(
    ("body", "code", "words"),
    [
        (b"", "invalid_json", "not JSON: it is empty"),
        (b'{"prompt": "x",}', "invalid_json", "byte 15"),
        (b'{"prompt": "x"', "invalid_json", "not JSON: it ends too early, after 14 bytes"),
        (b"[1]", "invalid_type", "the body: expected object, got array"),
        (b'{"prompt": "\xff"}', "invalid_utf8", "byte 0xff at offset 12"),
        (b'{"unknown": "\xff"}', "invalid_utf8", "byte 0xff at offset 13"),
        (b'{"prompt": "\\ud800"}', "invalid_json", "\\ud800 is half of a surrogate pair (byte 12)"),
        (b'{"prompt": "\\udc00 "}', "invalid_json", "not JSON"),
        (b'{"prompt": "x", "temperature": NaN}', "invalid_json", "byte 31"),
        (b'{"prompt": "x", "temperature": 1e999}', "invalid_type", "temperature: number out of range"),
        (b'{"zz": ' + b"[" * 100_000, "invalid_json", "nested too deeply"),
        (b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "invalid_json", "nested too deeply"),
    ],
)
def test_malformed_body_is_told_where(body: bytes, code: str, words: str) -> None:
    error = fault(lambda: parse_completion(body))
    assert (error.status, error.code) == (400, code)
    assert words in error.message


@pytest.mark.parametrize("digits", [30, 5000])
def test_integer_of_any_size_is_a_request_error(digits: int) -> None:
    body = b'{"prompt": [' + b"9" * digits + b'], "max_tokens": ' + b"9" * digits + b"}"
    fault(lambda: plan(parse_completion(body), [1]))


def test_unknown_fields_and_empty_wishes_are_ignored() -> None:
    wanted = completion(
        user="me", metadata={"a": [1]}, suffix=None, best_of=1, guided_json=None, response_format={"type": "text"}
    )
    assert wanted == completion()
    assert chat(tools=[{"type": "function"}], tool_choice="none", functions=[], audio=None) == chat()


def test_content_parts_are_joined_by_line_ends() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    wanted = chat(messages=[{"role": "user", "content": parts, "name": None}])
    assert isinstance(wanted.prompt, Conversation)
    assert wanted.prompt.messages == ({"role": "user", "content": "a\nb"},)


def test_every_sampling_field_arrives() -> None:
    sampling = completion(
        temperature=0.5,
        top_p=0.9,
        top_k=5,
        min_p=0.1,
        min_tokens=2,
        stop_token_ids=[7],
        presence_penalty=1,
        frequency_penalty=-1,
        repetition_penalty=1.5,
        logit_bias={"9": -100, "3": 1.5},
        logprobs=4,
    ).sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0.5, 0.9, 5, 0.1)
    assert (sampling.min_tokens, sampling.stop_token_ids, sampling.logprobs) == (2, (7,), 4)
    assert (sampling.presence_penalty, sampling.frequency_penalty) == (1.0, -1.0)
    assert sampling.repetition_penalty == 1.5
    assert sampling.logit_bias == ((3, 1.5), (9, -100.0))


def test_top_k_that_limits_nothing_is_none() -> None:
    assert completion(top_k=-1).sampling.top_k is None
    assert completion(top_k=0).sampling.top_k is None


def test_chat_logprobs_count_alternatives() -> None:
    assert chat().sampling.logprobs is None
    assert chat(logprobs=True).sampling.logprobs == 0
    assert chat(logprobs=True, top_logprobs=3).sampling.logprobs == 3


def test_choices_are_named_in_order_and_seeded_within_their_prompt() -> None:
    submits = plan(completion(n=2, seed=5), [10, 11], [12])
    assert [(s.request_id, s.tokens, s.sampling.seed) for s in submits] == [
        ("cmpl-1-0", (10, 11), 5),
        ("cmpl-1-1", (10, 11), 6),
        ("cmpl-1-2", (12,), 5),
        ("cmpl-1-3", (12,), 6),
    ]
    assert [s.sampling.seed for s in plan(completion(n=2), [1])] == [1000, 1001]
    assert 0 <= plan(completion(seed=-1), [1])[0].sampling.seed < 2**63


def test_default_answer_is_16_tokens_of_a_completion_and_all_room_of_a_chat() -> None:
    assert plan(completion(), [1] * 10)[0].sampling.max_tokens == 16
    assert plan(completion(), [1] * 60)[0].sampling.max_tokens == 4
    assert plan(chat(), [1] * 10)[0].sampling.max_tokens == 54


def test_end_of_text_stops_unless_ignored() -> None:
    assert plan(completion(stop_token_ids=[7, 2]), [1])[0].sampling.stop_token_ids == (7, 2)
    assert plan(completion(stop_token_ids=[7]), [1])[0].sampling.stop_token_ids == (7, 2)
    assert plan(completion(ignore_eos=True), [1])[0].sampling.stop_token_ids == ()


@pytest.mark.parametrize(
    ("wanted", "prompt", "code", "words"),
    [
        (completion(), [1] * 64, "context_length_exceeded", ("64 tokens", "has 64")),
        (completion(), [1] * 65, "context_length_exceeded", ("64 tokens", "has 65")),
        (completion(max_tokens=55), [1] * 10, "context_length_exceeded", ("64 tokens", "10", "asks for 55")),
        (chat(max_completion_tokens=10**40), [1], "context_length_exceeded", ("more than 20 digits",)),
        (completion(min_tokens=17), [1], "out_of_range", ("at most max_tokens, 16, got 17",)),
        (completion(), [300], "out_of_range", ("token id 300", "0 to 299")),
        (completion(), [-1], "out_of_range", ("token id -1",)),
        (completion(stop_token_ids=[999]), [1], "out_of_range", ("stop_token_ids: token id 999",)),
        (completion(logit_bias={"999": 1}), [1], "out_of_range", ("logit_bias: token id 999",)),
        (completion(), [], None, ("no tokens",)),
    ],
)
def test_limits_of_the_model_are_told(
    wanted: Wanted, prompt: list[int], code: str | None, words: tuple[str, ...]
) -> None:
    error = fault(lambda: plan(wanted, prompt))
    assert (error.status, error.code) == (400, code)
    for word in words:
        assert word in error.message


def test_longest_that_fits_is_taken() -> None:
    assert plan(completion(max_tokens=1), [1] * 63)[0].sampling.max_tokens == 1
    assert plan(completion(max_tokens=54), [1] * 10)[0].sampling.max_tokens == 54


def test_choices_of_one_request_are_bounded() -> None:
    assert "more than 128" in fault(lambda: plan(completion(n=65), [1], [2])).message


FIELDS = st.sampled_from(
    sorted({*CompletionBody.__struct_fields__, *ChatBody.__struct_fields__, "role", "content", "type", "text", "other"})
)
JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=5)
    | FIELDS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(FIELDS | st.text(max_size=3), inner, max_size=4),
    max_leaves=12,
)


@settings(max_examples=200, deadline=None)
@given(body=st.dictionaries(FIELDS, JSON, max_size=8), chatting=st.booleans())
def test_any_json_is_a_wanted_or_a_request_error(body: dict[str, object], chatting: bool) -> None:
    parse = parse_chat if chatting else parse_completion
    try:
        wanted = parse(json.dumps(body, allow_nan=False).encode())
        assert isinstance(wanted, Wanted)
        assert plan(wanted, [1, 2, 3])
    except RequestError as error:
        assert error.status == 400
        assert error.message
        assert json.loads(error.body())["error"]["message"] == error.message


@settings(max_examples=150, deadline=None)
@given(body=st.binary(max_size=60))
def test_any_bytes_are_a_wanted_or_a_request_error(body: bytes) -> None:
    for parse in (parse_chat, parse_completion):
        for text in (body, b'{"prompt": "' + body + b'"}', b'{"prompt": [' + body + b"]}"):
            try:
                assert isinstance(parse(text), Wanted)
            except RequestError as error:
                assert error.status == 400
