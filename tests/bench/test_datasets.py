"""Datasets give the same conversations each time, as long as they should be; a wrong line is named by its number."""

from __future__ import annotations

import json
from itertools import islice

import pytest

from pd.bench import specs
from pd.bench.load import datasets
from pd.bench.load.asks import Ask, Conversation, Form, spelled
from tests.shape.source import ROOT

MOONCAKE = (
    '{"timestamp": 1000, "input_length": 600, "output_length": 52, "hash_ids": [46, 47]}\n'
    '{"timestamp": 4000, "input_length": 1100, "output_length": 26, "hash_ids": [46, 47, 2353]}\n'
)
AZURE = (
    "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.9799600,4808,10\n2023-11-16 18:17:04.0319600,3180,8\n"
)
SHARED = [
    {"conversations": [{"from": "human", "value": "w" * 40}, {"from": "gpt", "value": "a" * 80}]},
    {"conversations": [{"from": "human", "value": "alone"}]},
    {"conversations": [{"from": "human", "value": "w" * 4000}, {"from": "gpt", "value": "a" * 8000}]},
]


def made(text: str, num: int, seed: int = 0) -> list[Conversation]:
    return list(islice(datasets.made_up(specs.spec("--dataset", text, datasets.KINDS), seed), num))


def read(kind: str, text: str) -> list[Conversation]:
    spec = specs.spec("--dataset", kind, datasets.KINDS)
    return datasets.from_file(spec, text, count=datasets.about, seed=0)


def ids(conversation: Conversation, turn: int = 0) -> tuple[int, ...]:
    prompt = conversation.asks[turn].prompt
    assert isinstance(prompt, tuple) and all(isinstance(one, int) for one in prompt)
    return prompt  # type: ignore[return-value]


def test_the_same_seed_makes_the_same_and_another_one_others() -> None:
    text = "random,input=20,output=9,spread=0.5"
    assert made(text, 5, seed=3) == made(text, 5, seed=3)
    assert made(text, 5, seed=3) != made(text, 5, seed=4)


def test_lengths_spread_around_their_mean_and_ids_stay_in_the_vocabulary() -> None:
    found = made("random,input=100,output=40,spread=0.25,vocab=200", 300)
    lengths = [len(ids(one)) for one in found]
    answers = [one.asks[0].num_answer for one in found]
    assert (min(lengths), max(lengths)) == (75, 125)
    assert (min(answers), max(answers)) == (30, 50)
    assert {token for one in found for token in ids(one)} == set(range(100, 200))


def test_shared_prefixes_are_shared_by_all_and_nothing_else_is() -> None:
    found = made("shared-prefix,prefixes=3,prefix=50,input=10", 60)
    assert len({ids(one)[:50] for one in found}) == 3
    assert len({ids(one)[50:] for one in found}) == 60


def test_a_conversation_has_its_turns_and_thinks_before_all_but_the_first() -> None:
    (talk,) = made("multi-turn,turns=3,input=5,think=2,prefix=7", 1)
    assert [ask.think_s for ask in talk.asks] == [0.0, 2.0, 2.0]
    assert [len(ids(talk, turn)) for turn in range(3)] == [12, 5, 5]


def test_mooncakes_equal_hashes_become_equal_tokens() -> None:
    first, second = read("mooncake", MOONCAKE)
    assert (first.at_s, second.at_s) == (0.0, 3.0)
    assert (len(ids(first)), first.asks[0].num_answer) == (600, 52)
    assert (len(ids(second)), second.asks[0].num_answer) == (1100, 26)
    assert ids(first) == ids(second)[:600]
    assert ids(first)[:512] != ids(second)[512:1024]


def test_a_traces_requests_can_be_cut() -> None:
    first, second = read("mooncake,max-input=100,max-output=30", MOONCAKE)
    assert [len(ids(first)), first.asks[0].num_answer] == [100, 30]
    assert second.asks[0].num_answer == 26


def test_azures_trace_has_times_and_lengths_and_no_prompt_twice() -> None:
    first, second = read("azure", AZURE)
    assert second.at_s == pytest.approx(0.052)
    assert (len(ids(first)), first.asks[0].num_answer) == (4808, 10)
    assert ids(first)[:100] != ids(second)[:100]


@pytest.mark.parametrize("text", [json.dumps(SHARED), "\n".join(map(json.dumps, SHARED))], ids=["list", "lines"])
def test_sharegpt_asks_first_questions_for_answers_as_long_as_the_real_ones(text: str) -> None:
    assert read("sharegpt,max-input=500", text) == [Conversation((Ask("w" * 40, 20),))]


def test_own_lines_are_text_ids_or_messages() -> None:
    lines = [
        {"prompt": "hi", "max_tokens": 3, "at_s": 0.5},
        {"prompt": [5, 6], "output_tokens": 4},
        {"messages": [{"role": "user", "content": "hi"}]},
    ]
    assert read("jsonl,output=9", "\n".join(map(json.dumps, lines)) + "\n\n") == [
        Conversation((Ask("hi", 3),), at_s=0.5),
        Conversation((Ask((5, 6), 4),)),
        Conversation((Ask(({"role": "user", "content": "hi"},), 9),)),
    ]


@pytest.mark.parametrize(
    ("kind", "text", "says"),
    [
        ("mooncake", MOONCAKE + "{nonsense\n", "line 3: "),
        ("mooncake", MOONCAKE + '{"timestamp": 1, "input_length": 0, "output_length": 2}', "line 3: 0 tokens in"),
        ("mooncake", '\n{"timestamp": 1}', "line 2: Object missing required field `input_length`"),
        ("azure", AZURE + "2023-11-16 18:17:05,12", "line 4: '2023-11-16 18:17:05,12' is not TIMESTAMP,"),
        ("azure", AZURE + "yesterday,1,2", "line 4: 'yesterday,1,2' is not TIMESTAMP,"),
        ("jsonl", '{"prompt": "a"}\n{"prompt": 3}', "line 2: Expected `str | array | null`"),
        ("jsonl", '{"prompt": "a"}\n\n{}', "line 3: needs a prompt or messages, and not both"),
        ("jsonl", '{"prompt": ""}', "line 1: prompt is empty"),
        ("jsonl", '{"messages": []}', "line 1: messages is empty"),
        ("jsonl", '{"messages": [{"role": "user"}]}', "line 1: a message needs role and content"),
        ("sharegpt", '[{"conversations": []},\n {"id": 7}]', "entry 2, line 2: Object missing required field"),
        ("sharegpt", "[1,\n 2", "line 2: no JSON list: "),
        ("sharegpt", '[{"conversations": []},\n {"id" 7}]', "line 2: no JSON list: "),
    ],
)
def test_a_line_that_cannot_be_read_is_named(kind: str, text: str, says: str) -> None:
    with pytest.raises(ValueError) as caught:
        read(kind, text)
    assert str(caught.value).startswith(says)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("random,input=0", "random: input=0, must be a whole number of at least 1"),
        ("random,spread=2", "random: spread=2, must be 0 to 1.0"),
        ("random,vocab=90", "random: vocab=90, must be a whole number of at least 102"),
        ("multi-turn,think=x", "multi-turn: think=x is no number"),
    ],
)
def test_settings_without_sense_are_refused(text: str, says: str) -> None:
    with pytest.raises(ValueError) as caught:
        made(text, 1)
    assert str(caught.value) == says


SAMPLES = ROOT / "benchmarks" / "data"


@pytest.mark.parametrize(
    ("kind", "file", "num"),
    [
        ("mooncake", "mooncake.sample.jsonl", 24),
        ("azure", "azure.sample.csv", 30),
        ("sharegpt", "sharegpt.sample.json", 3),
    ],
)
def test_the_samples_are_read_whole(kind: str, file: str, num: int) -> None:
    found = read(f"{kind}:{file}", (SAMPLES / file).read_text())
    assert len(found) == num
    if kind != "sharegpt":
        times = [one.at_s or 0.0 for one in found]
        assert times[0] == 0.0 and times == sorted(times)


# ---- as a request ------------------------------------------------------------------------------------------


def test_ids_are_sent_as_they_are_and_spelled_where_text_is_needed() -> None:
    completion = Form(model="m", chat=False, ignore_eos=True, extra={"temperature": 0.5})
    body = json.loads(completion.body(Ask((1, 2), 8)))
    assert (body["prompt"], body["max_tokens"], body["ignore_eos"], body["temperature"]) == ([1, 2], 8, True, 0.5)
    assert body["stream"] and body["stream_options"] == {"include_usage": True}
    chat = Form(model="m", chat=True, ignore_eos=False, extra={})
    body = json.loads(chat.body(Ask((1, 2), 8)))
    assert body["messages"] == [{"role": "user", "content": spelled((1, 2)).strip()}]
    assert "ignore_eos" not in body and "prompt" not in body


def test_a_completion_goes_on_from_the_text_so_far() -> None:
    form = Form(model="m", chat=False, ignore_eos=True, extra={})
    body = json.loads(form.body(Ask((3,), 8), [((1, 2), " yes")]))
    assert body["prompt"] == spelled((1, 2)) + " yes" + spelled((3,))
