"""Every bad request gets the right status and words in OpenAI's form, and harms no other."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest

from pd.runtime.core.events import End
from pd.runtime.front.settings import FrontSettings
from pd.runtime.front.text import load_text
from pd.runtime.wire.values import Finish, Role
from tests.front.fakes import VOCAB_SIZE, WAIT_S, FakeDoor, byte_level, emits, serving, tiny_text, tokens, write_model


def answering(words: str = "ok") -> FakeDoor:
    return FakeDoor(lambda submit: emits(tokens(words), Finish.LENGTH))


HELLO = [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize(
    ("path", "body", "status", "code", "param", "words"),
    [
        ("/v1/completions", b"", 400, "invalid_json", None, ("not JSON",)),
        ("/v1/completions", b'{"prompt": "x",}', 400, "invalid_json", None, ("byte 15",)),
        ("/v1/completions", b'{"prompt": "\xff"}', 400, "invalid_utf8", None, ("0xff", "offset 12")),
        ("/v1/completions", {"prompt": 3}, 400, "invalid_type", "prompt", ("expected str", "got int")),
        ("/v1/completions", {"prompt": ""}, 400, None, "prompt", ("prompt is empty",)),
        ("/v1/completions", {"prompt": "x", "temperature": -1}, 400, "out_of_range", "temperature", ("0.0 and 2.0",)),
        ("/v1/completions", {"prompt": "x", "model": "y"}, 404, "model_not_found", "model", ("'y'", "'tiny'")),
        (
            "/v1/completions",
            {"prompt": [1] * 512},
            400,
            "context_length_exceeded",
            "prompt",
            ("at most 512 tokens", "has 512"),
        ),
        (
            "/v1/completions",
            {"prompt": [1] * 10, "max_tokens": 503},
            400,
            "context_length_exceeded",
            "max_tokens",
            ("at most 512 tokens", "has 10", "asks for 503"),
        ),
        (
            "/v1/completions",
            {"prompt": ["x", "x" * 7000]},
            400,
            "context_length_exceeded",
            "prompt",
            ("at most 512 tokens", "7000 characters", "more than 12"),
        ),
        ("/v1/completions", {"prompt": [VOCAB_SIZE]}, 400, "out_of_range", "prompt", (f"token id {VOCAB_SIZE}",)),
        ("/v1/chat/completions", {"messages": []}, 400, None, "messages", ("messages is empty",)),
        ("/v1/chat/completions", {}, 400, "invalid_type", None, ("missing required field messages",)),
        (
            "/v1/chat/completions",
            {"messages": HELLO, "response_format": {"type": "json_schema"}},
            400,
            "unsupported",
            "response_format",
            ("'json_schema'",),
        ),
        ("/tokenize", {}, 400, None, "prompt", ("either prompt or messages",)),
        ("/detokenize", {"tokens": [-1]}, 400, None, "tokens", ("negative",)),
        ("/v1/nothing", {}, 404, "not_found", None, ("/v1/nothing",)),
    ],
)
async def test_bad_request_has_status_code_and_words(
    tmp_path: Path,
    path: str,
    body: object,
    status: int,
    code: str | None,
    param: str | None,
    words: tuple[str, ...],
) -> None:
    door = answering()
    async with serving(door, tiny_text(tmp_path)) as url, aiohttp.ClientSession(url) as client:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        async with client.post(path, data=data, headers={"content-type": "application/json"}) as reply:
            assert reply.status == status
            error = (await reply.json())["error"]
        assert (error["type"], error["code"], error["param"]) == ("invalid_request_error", code, param)
        for word in words:
            assert word in error["message"]
        assert door.submits == []
        async with client.post("/v1/completions", json={"prompt": "x"}) as reply:
            assert (await reply.json())["choices"][0]["text"] == "ok"


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/models", "/health"])
async def test_wrong_method_is_told_the_right_one(tmp_path: Path, path: str) -> None:
    async with serving(answering(), tiny_text(tmp_path)) as url, aiohttp.ClientSession(url) as client:
        right = "POST" if path == "/v1/completions" else "GET"
        async with client.request("DELETE", path) as reply:
            assert (reply.status, reply.headers["allow"]) == (405, right)
            assert right in (await reply.json())["error"]["message"]


async def test_chat_without_template_is_refused(tmp_path: Path) -> None:
    text = load_text(write_model(tmp_path, byte_level()))
    async with (
        serving(answering(), text) as url,
        aiohttp.ClientSession(url) as client,
        client.post("/v1/chat/completions", json={"messages": HELLO}) as reply,
    ):
        assert reply.status == 400
        assert "no chat template" in (await reply.json())["error"]["message"]


async def post(client: aiohttp.ClientSession, data: object, **headers: str) -> tuple[int, str]:
    headers = {"content-type": "application/json"} | headers
    async with client.post("/v1/completions", data=data, headers=headers) as reply:
        return reply.status, (await reply.json()).get("error", {}).get("message", "")


async def test_body_limit_holds_with_and_without_content_length(tmp_path: Path) -> None:
    async def chunks(nbytes: int) -> AsyncIterator[bytes]:
        for _ in range(nbytes // 1000):
            yield b" " * 1000

    settings = FrontSettings(max_body_bytes=10_000)
    async with serving(answering(), tiny_text(tmp_path), settings) as url, aiohttp.ClientSession(url) as client:
        fits = json.dumps({"prompt": "x"}).encode()
        assert (await post(client, fits + b" " * (10_000 - len(fits))))[0] == 200
        status, message = await post(client, fits + b" " * (10_001 - len(fits)))
        assert (status, message) == (413, "the body is larger than 10000 bytes")
        assert (await post(client, chunks(500_000)))[0] == 413
        assert (await post(client, b" " * 5_000_000))[0] == 413
        assert (await post(client, fits))[0] == 200


async def test_body_that_does_not_arrive_is_given_up(tmp_path: Path) -> None:
    settings = FrontSettings(body_s=0.05)
    async with serving(answering(), tiny_text(tmp_path), settings) as url:
        reader, writer = await asyncio.open_connection(*url.removeprefix("http://").split(":"))
        writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n{")
        head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), WAIT_S)
        assert head.startswith(b"HTTP/1.1 408")
        writer.close()


async def test_only_json_bodies_are_read(tmp_path: Path) -> None:
    body = json.dumps({"prompt": "x"}).encode()
    async with serving(answering(), tiny_text(tmp_path)) as url, aiohttp.ClientSession(url) as client:
        status, message = await post(client, body, **{"content-type": "multipart/form-data"})
        assert (status, message) == (415, "the body's content-type must be application/json, got multipart/form-data")
        status, message = await post(client, body, **{"content-encoding": "gzip"})
        assert status == 415
        assert "gzip" in message
        for kind in ("application/json; charset=utf-8", "application/x-www-form-urlencoded", "text/plain"):
            assert (await post(client, body, **{"content-type": kind}))[0] == 200


async def test_missing_roles_are_named_with_retry_after(tmp_path: Path) -> None:
    door = answering()
    async with serving(door, tiny_text(tmp_path)) as url, aiohttp.ClientSession(url) as client:
        door.absent = (Role.PREFILL, Role.DECODE)
        async with client.post("/v1/completions", json={"prompt": "x"}) as reply:
            assert (reply.status, reply.headers["retry-after"]) == (503, "2")
            error = (await reply.json())["error"]
            assert error["type"] == "server_error"
            assert "no living prefill and no living decode instance" in error["message"]
        async with client.get("/ready") as reply:
            assert (reply.status, reply.headers["retry-after"]) == (503, "2")
            assert await reply.json() == {"ready": False, "missing": ["prefill", "decode"]}
        async with client.get("/health") as reply:
            assert reply.status == 200
        door.absent, door.model = (Role.DECODE,), None
        async with client.get("/v1/models") as reply:
            assert await reply.json() == {"object": "list", "data": []}
        async with client.get("/v1/models/tiny") as reply:
            assert reply.status == 503
        assert door.submits == []


async def test_not_ready_where_those_that_live_cannot_serve_together(tmp_path: Path) -> None:
    door = answering()
    door.apart = "p0 and d0 cannot serve together: 64 heads there, 8 here"
    async with (
        serving(door, tiny_text(tmp_path)) as url,
        aiohttp.ClientSession(url) as client,
        client.get("/ready") as reply,
    ):
        assert (reply.status, reply.headers["retry-after"]) == (503, "2")
        assert await reply.json() == {"ready": False, "missing": [], "reason": door.apart}


async def test_ready_when_all_roles_live(tmp_path: Path) -> None:
    async with serving(answering(), tiny_text(tmp_path)) as url, aiohttp.ClientSession(url) as client:
        async with client.get("/ready") as reply:
            assert (reply.status, await reply.json()) == (200, {"ready": True, "missing": []})
        async with client.head("/ready") as reply:
            assert (reply.status, await reply.read()) == (200, b"")
        async with client.get("/state") as reply:
            assert await reply.json() == {"instances": ["one"], "requests": {}}
        async with client.get("/v1/models/tiny") as reply:
            assert (await reply.json())["max_model_len"] == 512
        async with client.get("/v1/models/other/name") as reply:
            assert reply.status == 404


@pytest.mark.parametrize(
    ("end", "kind", "retry_after"),
    [
        (End("", 400, "never fits"), "invalid_request_error", None),
        (End("", 429, "queue full", 0.2), "rate_limit_error", "1"),
        (End("", 503, "overloaded", 2.5), "server_error", "3"),
        (End("", 504, "too late"), "server_error", None),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_refusal_of_the_router_has_its_own_status(
    tmp_path: Path, end: End, kind: str, retry_after: str | None, stream: bool
) -> None:
    door = FakeDoor(lambda submit: [end])
    async with (
        serving(door, tiny_text(tmp_path)) as url,
        aiohttp.ClientSession(url) as client,
        client.post("/v1/completions", json={"prompt": "x", "stream": stream}) as reply,
    ):
        assert (reply.status, reply.headers.get("retry-after")) == (end.status, retry_after)
        error = (await reply.json())["error"]
        assert (error["message"], error["type"]) == (end.reason, kind)


async def test_tokenize_and_detokenize_are_inverse(tmp_path: Path) -> None:
    async with serving(answering(), tiny_text(tmp_path)) as url, aiohttp.ClientSession(url) as client:
        async with client.post("/tokenize", json={"messages": HELLO}) as reply:
            answer = await reply.json()
        assert (answer["count"], answer["max_model_len"]) == (len(answer["tokens"]), 512)
        async with client.post("/detokenize", json={"tokens": answer["tokens"]}) as reply:
            expected = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
            assert (await reply.json())["prompt"] == expected


async def test_requests_are_counted_by_route_and_status(tmp_path: Path) -> None:
    async with serving(answering(), tiny_text(tmp_path)) as url, aiohttp.ClientSession(url) as client:
        for path in ("/health", "/health", "/a", "/b", "/v1/models/x"):
            async with client.get(path):
                pass
        async with client.get("/metrics") as reply:
            assert reply.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
            lines = (await reply.text()).splitlines()
    assert 'pd_http_requests_total{route="/health",status="200"} 2.0' in lines
    assert 'pd_http_requests_total{route="other",status="404"} 2.0' in lines
    assert 'pd_http_requests_total{route="/v1/models/{id}",status="404"} 1.0' in lines
    assert "pd_http_requests_running 1.0" in lines


async def test_one_connection_takes_many_requests(tmp_path: Path) -> None:
    door = answering()
    connects: list[str] = []

    async def count(*_: object) -> None:
        connects.append("made")

    trace = aiohttp.TraceConfig()
    trace.on_connection_create_end.append(count)
    async with (
        serving(door, tiny_text(tmp_path)) as url,
        aiohttp.ClientSession(url, connector=aiohttp.TCPConnector(limit=1), trace_configs=[trace]) as client,
    ):
        for index in range(100):
            body = {"prompt": "x" if index % 5 else "", "stream": index % 3 == 0}
            async with client.post("/v1/completions", json=body) as reply:
                assert reply.status == (200 if index % 5 else 400)
                await reply.read()
    assert len(door.submits) == 80
    assert connects == ["made"]


async def test_long_prompts_beyond_the_bound_are_told_to_come_back(tmp_path: Path) -> None:
    settings = FrontSettings(tokenize_at_once=1, tokenize_waiting=1)
    async with serving(answering(), tiny_text(tmp_path), settings) as url, aiohttp.ClientSession(url) as client:

        async def ask() -> int:
            async with client.post("/tokenize", json={"prompt": "ab " * 100_000}) as reply:
                return reply.status

        statuses = await asyncio.gather(*(ask() for _ in range(6)))
        assert set(statuses) == {200, 429}
        assert await ask() == 200


@pytest.mark.parametrize(("asked", "given"), [(None, 600.0), (2.5, 2.5), (1000, 600.0)])
async def test_a_client_may_want_its_answer_sooner_but_not_later(
    tmp_path: Path, asked: float | None, given: float
) -> None:
    door = answering()
    async with (
        serving(door, tiny_text(tmp_path)) as url,
        aiohttp.ClientSession() as session,
        session.post(f"{url}/v1/completions", json={"prompt": "x", "deadline_s": asked}) as answer,
    ):
        assert answer.status == 200
    assert [submit.deadline_s for submit in door.submits] == [given]


KEYS = ("the-first-key-of-two", "the-second-key-of-two")


@pytest.mark.parametrize(
    ("authorization", "status"),
    [
        (None, 401),
        ("Bearer", 401),
        ("Bearer the-first-key-of-tw", 401),
        ("Basic the-first-key-of-two", 401),
        ("the-first-key-of-two", 401),
        ("Bearer the-first-key-of-two", 200),
        ("bearer the-second-key-of-two", 200),
    ],
)
async def test_with_api_keys_only_their_holders_are_served(
    tmp_path: Path, authorization: str | None, status: int
) -> None:
    door = answering()
    headers = {} if authorization is None else {"authorization": authorization}
    async with (
        serving(door, tiny_text(tmp_path), FrontSettings(api_keys=KEYS)) as url,
        aiohttp.ClientSession(headers=headers) as session,
    ):
        async with session.post(f"{url}/v1/completions", json={"prompt": "x"}) as answer:
            assert answer.status == status
            if status == 401:
                error = (await answer.json())["error"]
                assert (error["code"], error["type"]) == ("invalid_api_key", "invalid_request_error")
                assert answer.headers["www-authenticate"] == "Bearer"
                assert "the-first" not in error["message"]
        async with session.get(f"{url}/state") as answer:
            assert answer.status == status
        for path in ("/health", "/ready", "/metrics"):
            async with session.get(url + path) as answer:
                assert answer.status == 200
    assert len(door.submits) == (status == 200)
