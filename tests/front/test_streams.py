"""Answers over a real server, through OpenAI's own client: whole and streamed are one, and who leaves is let go."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import aiohttp
import openai
import pytest

from pd.runtime.core.events import Emit, End, Submit, Timings
from pd.runtime.front.text import load_text
from pd.runtime.wire.values import Finish, ModelCard
from tests.front.fakes import (
    IM_END,
    WAIT_S,
    FakeDoor,
    byte_fallback,
    emits,
    serving,
    tiny_text,
    tokens,
    write_model,
)

WORDS = "Grüße, 世界! 👩‍👩‍👧 done"
HELLO = [{"role": "user", "content": "hi"}]


def says(*answers: str, finish: Finish = Finish.LENGTH, group: int = 1, logprobs: bool = False) -> FakeDoor:
    """The request with index i gets answer i."""

    def script(submit: Submit) -> list[Emit]:
        index = int(submit.request_id.rsplit("-", 1)[1])
        return emits(tokens(answers[index % len(answers)]), finish, group=group, logprobs=logprobs)

    return FakeDoor(script)


@asynccontextmanager
async def talking(door: FakeDoor, directory: Path) -> AsyncIterator[openai.AsyncOpenAI]:
    async with (
        serving(door, tiny_text(directory)) as url,
        openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="any", max_retries=0, timeout=WAIT_S) as client,
    ):
        yield client


@pytest.mark.parametrize("group", [1, 3, 100])
async def test_streamed_chat_equals_the_whole_one_and_cuts_no_character(tmp_path: Path, group: int) -> None:
    async with talking(says(WORDS, group=group), tmp_path) as client:
        whole = await client.chat.completions.create(model="tiny", messages=HELLO)
        stream = await client.chat.completions.create(
            model="tiny", messages=HELLO, stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
    choice = whole.choices[0]
    assert (choice.message.role, choice.message.content, choice.finish_reason) == ("assistant", WORDS, "length")
    assert whole.id.startswith("chatcmpl-")
    assert (whole.object, whole.model, choice.logprobs) == ("chat.completion", "tiny", None)
    deltas = [chunk.choices[0] for chunk in chunks[:-1]]
    texts = [delta.delta.content or "" for delta in deltas]
    assert "".join(texts) == WORDS
    assert not any("\ufffd" in text for text in texts)
    assert [delta.delta.role for delta in deltas] == ["assistant"] + [None] * (len(deltas) - 1)
    assert [delta.finish_reason for delta in deltas] == [None] * (len(deltas) - 1) + ["length"]
    assert {chunk.id for chunk in chunks} == {chunks[0].id}
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert chunks[-1].choices == []
    assert chunks[-1].usage == whole.usage


async def test_where_the_time_went_is_told_to_those_who_ask(tmp_path: Path) -> None:
    def script(submit: Submit) -> list[Emit]:
        *others, last = emits(tokens("four"))
        return [*others, replace(last, timings=Timings(0.5, 0.25, 0.125))]

    asked = {"model": "tiny", "prompt": "hi", "stream": True, "stream_options": {"include_usage": True}}
    said = []
    async with serving(FakeDoor(script), tiny_text(tmp_path)) as url, aiohttp.ClientSession() as client:
        for headers in ({"x-pd-timings": "1"}, {}):
            async with client.post(f"{url}/v1/completions", json=asked, headers=headers) as reply:
                events = [line[6:] for line in (await reply.text()).splitlines() if line.startswith("data: {")]
            said.append(json.loads(events[-1]).get("timings"))
    assert said == [{"queued_s": 0.5, "prefill_s": 0.25, "handoff_s": 0.125}, None]


async def test_usage_counts_prompt_answer_and_cache(tmp_path: Path) -> None:
    door = says("four", finish=Finish.STOP)
    async with talking(door, tmp_path) as client:
        whole = await client.chat.completions.create(model="tiny", messages=HELLO)
    assert whole.usage is not None
    num_prompt = len(door.submits[0].tokens)
    assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (num_prompt, 4)
    assert whole.usage.total_tokens == num_prompt + 4
    assert whole.usage.prompt_tokens_details.cached_tokens == 2
    assert (whole.choices[0].message.content, whole.choices[0].finish_reason) == ("fou", "stop")


async def test_n_and_prompt_lists_are_separate_requests_in_order(tmp_path: Path) -> None:
    door = says("zero", "one", "two", "three")
    async with talking(door, tmp_path) as client:
        whole = await client.completions.create(model="tiny", prompt=["first", "second"], n=2, seed=7)
        door.submits.clear()
        stream = await client.completions.create(
            model="tiny", prompt=[[1, 2], [3]], n=2, seed=7, stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
    assert [choice.text for choice in whole.choices] == ["zero", "one", "two", "three"]
    assert [choice.index for choice in whole.choices] == [0, 1, 2, 3]
    request_id = chunks[0].id
    assert [submit.request_id for submit in door.submits] == [f"{request_id}-{index}" for index in range(4)]
    assert [submit.tokens for submit in door.submits] == [(1, 2), (1, 2), (3,), (3,)]
    assert [submit.sampling.seed for submit in door.submits] == [7, 8, 7, 8]
    texts = ["", "", "", ""]
    for chunk in chunks[:-1]:
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == ["zero", "one", "two", "three"]
    usage = chunks[-1].usage
    assert usage is not None
    assert (usage.prompt_tokens, usage.completion_tokens) == (3, len("zeroonetwothree"))
    assert usage.prompt_tokens_details.cached_tokens == 4  # two prompts, two tokens of each


async def test_choices_stream_as_they_come(tmp_path: Path) -> None:
    door = FakeDoor()
    async with talking(door, tmp_path) as client:
        asked = asyncio.create_task(client.completions.create(model="tiny", prompt="x", n=2, stream=True))
        first, second = (await door.arrived()).request_id, (await door.arrived()).request_id
        door.streams[second].put(*emits(tokens("b"), None))
        stream = await asyncio.wait_for(asked, WAIT_S)
        chunk = await anext(stream)
        assert (chunk.choices[0].index, chunk.choices[0].text) == (1, "b")
        door.streams[first].put(*emits(tokens("a")))
        chunk = await anext(stream)
        assert (chunk.choices[0].index, chunk.choices[0].text) == (0, "a")
        door.streams[second].put(*emits(tokens("c")))
        assert [(c.choices[0].index, c.choices[0].text) async for c in stream] == [(1, "c")]
    assert door.abandons == {}


async def test_first_token_goes_out_at_once(tmp_path: Path) -> None:
    door = FakeDoor()
    async with talking(door, tmp_path) as client:
        asked = asyncio.create_task(client.chat.completions.create(model="tiny", messages=HELLO, stream=True))
        submit = await door.arrived()
        for letter in "abc":
            door.streams[submit.request_id].put(*emits(tokens(letter), None))
            stream = await asyncio.wait_for(asked, WAIT_S)
            texts = ""
            while not texts:
                texts += (await asyncio.wait_for(anext(stream), WAIT_S)).choices[0].delta.content or ""
            assert texts == letter
        await stream.close()
        assert await door.left() == submit.request_id


@pytest.mark.parametrize("stream", [False, True])
async def test_stop_string_over_borders_frees_the_request_and_leaks_nothing(tmp_path: Path, stream: bool) -> None:
    door = FakeDoor()
    async with serving(door, tiny_text(tmp_path)) as url, aiohttp.ClientSession(url) as client:
        body = {
            "prompt": "x",
            "stop": ["STOP"],
            "stream": stream,
            "stream_options": {"include_usage": True} if stream else None,
        }
        async with asyncio.TaskGroup() as group:
            asked = group.create_task(client.post("/v1/completions", json=body))
            submit = await door.arrived()
            door.streams[submit.request_id].put(*emits(tokens("ab STOP cd"), None))
            reply = await asked
        answer = await reply.text()
        assert await door.left() == submit.request_id
    assert door.abandons == {submit.request_id: "a stop string was found"}
    assert door.endings == {submit.request_id: "stop"}, "nobody left"
    assert "S" not in answer.replace("DONE", "")
    events = [json.loads(line[6:]) for line in answer.splitlines() if line.startswith("data: {")] or [
        json.loads(answer)
    ]
    choices = [choice for event in events for choice in event["choices"]]
    assert "".join(choice["text"] for choice in choices) == "ab "
    assert choices[-1]["finish_reason"] == "stop"
    assert events[-1]["usage"]["completion_tokens"] == 7


@pytest.mark.parametrize("stream", [False, True])
async def test_chat_logprobs_come_once_each_in_order(tmp_path: Path, stream: bool) -> None:
    ids = tokens("a世b")
    async with talking(says("a世b", logprobs=True), tmp_path) as client:
        answer = await client.chat.completions.create(
            model="tiny", messages=HELLO, logprobs=True, top_logprobs=2, stream=stream
        )
        if stream:
            parts = [chunk.choices[0].logprobs async for chunk in answer]
            content = [entry for part in parts if part for entry in part.content]
        else:
            content = answer.choices[0].logprobs.content
    assert [entry.logprob for entry in content] == [-token_id / 100 for token_id in ids]
    assert [bytes(entry.bytes) for entry in content] == [b"a", *(bytes([byte]) for byte in "世".encode()), b"b"]
    assert [entry.token for entry in content] == ["a", "\ufffd", "\ufffd", "\ufffd", "b"]
    assert [top.logprob for top in content[0].top_logprobs] == [-ids[0] / 100, -9.0]


@pytest.mark.parametrize("stream", [False, True])
async def test_completion_logprobs_have_offsets(tmp_path: Path, stream: bool) -> None:
    async with talking(says("ab", logprobs=True), tmp_path) as client:
        answer = await client.completions.create(model="tiny", prompt="x", logprobs=2, stream=stream)
        parts = [chunk.choices[0].logprobs async for chunk in answer] if stream else [answer.choices[0].logprobs]
    assert [token for part in parts for token in part.tokens] == ["a", "b"]
    assert [offset for part in parts for offset in part.text_offset] == [0, 1]
    first, second = (token_id for token_id in tokens("ab"))
    assert [value for part in parts for value in part.token_logprobs] == [-first / 100, -second / 100]
    assert parts[0].top_logprobs[0] == {"a": -first / 100, "b": -9.0}


@pytest.mark.parametrize("prompt", ["Say 世", tokens("Say 世")])
async def test_echo_puts_the_prompt_first(tmp_path: Path, prompt: object) -> None:
    async with talking(says(" it"), tmp_path) as client:
        whole = await client.completions.create(model="tiny", prompt=prompt, echo=True)
        stream = await client.completions.create(model="tiny", prompt=prompt, echo=True, stream=True)
        texts = [chunk.choices[0].text async for chunk in stream]
    assert whole.choices[0].text == "Say 世 it"
    assert (texts[0], "".join(texts)) == ("Say 世", "Say 世 it")


async def test_sentencepiece_answer_keeps_its_space(tmp_path: Path) -> None:
    text = load_text(write_model(tmp_path, byte_fallback(), eos_token="</s>"))
    ids = text.encode(["a hello"], add_special_tokens=False)[0]
    door = FakeDoor(lambda submit: emits(ids[1:]))
    door.model = ModelCard("tiny", "f", 300, 512)
    async with (
        serving(door, text) as url,
        aiohttp.ClientSession(url) as client,
        client.post("/v1/completions", json={"prompt": ids[:1], "echo": True}) as reply,
    ):
        assert (await reply.json())["choices"][0]["text"] == "a hello"


async def test_error_in_mid_stream_is_its_last_event(tmp_path: Path) -> None:
    door = FakeDoor(lambda submit: [*emits(tokens("ab"), None), End("", 500, "decode died thrice")])
    async with talking(door, tmp_path) as client:
        stream = await client.completions.create(model="tiny", prompt="x", stream=True)
        texts = []
        with pytest.raises(openai.APIError, match="decode died thrice"):
            async for chunk in stream:
                texts.append(chunk.choices[0].text)
    assert texts == ["a", "b"]


@pytest.mark.parametrize("stream", [False, True])
async def test_failure_of_one_choice_ends_all(tmp_path: Path, stream: bool) -> None:
    door = FakeDoor()
    async with talking(door, tmp_path) as client:
        asked = asyncio.create_task(client.completions.create(model="tiny", prompt="x", n=3, stream=stream))
        names = [(await door.arrived()).request_id for _ in range(3)]
        door.streams[names[1]].put(End("", 503, "gone", 1.0))
        with pytest.raises(openai.APIStatusError) as caught:
            await asyncio.wait_for(asked, WAIT_S)
        assert caught.value.status_code == 503
        assert {await door.left(), await door.left()} == {names[0], names[2]}
    assert set(door.abandons.values()) == {"another choice failed"}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("num_tokens", [0, 3])
async def test_client_that_leaves_is_abandoned_at_once(tmp_path: Path, stream: bool, num_tokens: int) -> None:
    door = FakeDoor()
    async with serving(door, tiny_text(tmp_path)) as url, aiohttp.ClientSession(url) as client:
        body = {"prompt": ["a", "b"], "stream": stream}
        asked = asyncio.create_task(client.post("/v1/completions", json=body))
        names = {(await door.arrived()).request_id, (await door.arrived()).request_id}
        for name in names:
            door.streams[name].put(*emits(tokens("abc")[:num_tokens], None))
        if stream and num_tokens:
            reply = await asyncio.wait_for(asked, WAIT_S)
            await asyncio.wait_for(reply.content.readline(), WAIT_S)
            reply.close()
        else:
            asked.cancel()
        assert {await door.left(), await door.left()} == names
        assert set(door.abandons.values()) == {"the client left"}
        assert set(door.endings.values()) == {"abandoned"}
        async with client.get("/metrics") as metrics:
            lines = (await metrics.text()).splitlines()
        status = "200" if stream and num_tokens else "499"
        assert f'pd_http_requests_total{{route="/v1/completions",status="{status}"}} 1.0' in lines


async def test_finished_requests_are_not_abandoned(tmp_path: Path) -> None:
    door = says("ok")
    async with talking(door, tmp_path) as client:
        for stream in (False, True):
            answer = await client.completions.create(model="tiny", prompt="x", n=2, stream=stream)
            if stream:
                assert [chunk async for chunk in answer]
    assert door.abandons == {}


async def test_two_hundred_streams_at_once(tmp_path: Path) -> None:
    door = FakeDoor()
    async with serving(door, tiny_text(tmp_path)) as url:
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(url, connector=connector) as client:

            async def ask(index: int) -> str:
                body = {"messages": [{"role": "user", "content": str(index)}], "stream": True}
                async with client.post("/v1/chat/completions", json=body) as reply:
                    lines = [line async for line in reply.content if line.startswith(b"data: {")]
                events = [json.loads(line[6:])["choices"][0]["delta"] for line in lines]
                return "".join(event.get("content") or "" for event in events)

            asked = [asyncio.create_task(ask(index)) for index in range(200)]
            submits = [await door.arrived() for _ in asked]
            answers = {submit.request_id: f"{WORDS}{submit.request_id}" for submit in submits}
            rows = {name: emits(tokens(answer), group=2) for name, answer in answers.items()}
            for step in range(max(map(len, rows.values()))):
                for name, row in rows.items():
                    door.streams[name].put(*row[step : step + 1])
            texts = await asyncio.wait_for(asyncio.gather(*asked), WAIT_S * 3)
    assert sorted(texts) == sorted(answers.values())
    assert door.abandons == {}


async def test_special_tokens_show_only_if_asked_for(tmp_path: Path) -> None:
    door = FakeDoor(lambda submit: emits([*tokens("a"), IM_END, *tokens("b")]))
    async with talking(door, tmp_path) as client:
        plain = await client.completions.create(model="tiny", prompt="x")
        shown = await client.completions.create(model="tiny", prompt="x", extra_body={"skip_special_tokens": False})
    assert (plain.choices[0].text, shown.choices[0].text) == ("ab", "a<|im_end|>b")


async def test_models_are_listed(tmp_path: Path) -> None:
    async with talking(says("x"), tmp_path) as client:
        listed = await client.models.list()
        assert [model.id for model in listed.data] == ["tiny"]
        assert (await client.models.retrieve("tiny")).object == "model"
        with pytest.raises(openai.NotFoundError, match="does not exist"):
            await client.models.retrieve("other")
