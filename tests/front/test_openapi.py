"""Requests made from our own OpenAPI document, right and wrong: never a 500 nor a status it does not name; no leak."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import MutableMapping
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from pd.runtime.front.http import App, make_app
from pd.runtime.front.openapi import document
from pd.runtime.front.settings import FrontSettings
from pd.runtime.wire.values import Finish
from tests.front.fakes import VOCAB_SIZE, FakeDoor, emits, tiny_text, tokens

DOCUMENT = document("1")
POSTS = [path for path, methods in DOCUMENT["paths"].items() if "post" in methods]
ODD = (
    None,
    True,
    -1,
    0,
    2**31,
    2**64,
    10**30,
    1e308,
    -0.0,
    "",
    "\x00",
    "é" * 9,
    [],
    [[]],
    {},
    {"a": 1},
    [None],
    "null",
)


def value(schema: dict[str, Any], dice: random.Random, depth: int = 0) -> Any:
    """Something of this schema; now and then not quite."""
    if dice.random() < 0.02 or depth > 6:
        return dice.choice(ODD)
    if "$ref" in schema:
        return value(DOCUMENT["components"]["schemas"][schema["$ref"].rsplit("/", 1)[1]], dice, depth)
    if "anyOf" in schema:
        return value(dice.choice(schema["anyOf"]), dice, depth)
    if "enum" in schema:
        return dice.choice(schema["enum"])
    match schema.get("type"):
        case "object":
            required = schema.get("required", [])
            known = {
                name: value(sub, dice, depth + 1)
                for name, sub in schema.get("properties", {}).items()
                if name in required or dice.random() < 0.06
            }
            extra = schema.get("additionalProperties")
            if isinstance(extra, dict) and dice.random() < 0.5:
                known[str(dice.randint(-2, VOCAB_SIZE + 1))] = value(extra, dice, depth + 1)
            return known
        case "array":
            count = dice.randint(schema.get("minItems", 0), 3)
            return [value(schema.get("items", {}), dice, depth + 1) for _ in range(count)]
        case "string":
            return dice.choice(["a", "user", "hello there", "text", "tiny", "\ud7ff", "x" * 50])
        case "integer":
            return within(schema, [0, 1, 2, 5, 20, 300, VOCAB_SIZE - 1, VOCAB_SIZE, -3, 2**40], dice)
        case "number":
            return within(schema, [0, 0.5, 1, 1.0, 2.5, -0.5, 1e-9, 200], dice)
        case "boolean":
            return dice.random() < 0.5
        case "null":
            return None
    return dice.choice(ODD)


def within(schema: dict[str, Any], values: list[float], dice: random.Random) -> float:
    """Mostly one that the schema allows."""
    least, most = schema.get("minimum", float("-inf")), schema.get("maximum", float("inf"))
    return dice.choice([each for each in values if least <= each <= most] if dice.random() < 0.9 else values)


async def call(app: App, method: str, path: str, body: bytes) -> tuple[int, bytes]:
    """One exchange without a server."""
    asked = [{"type": "http.request", "body": body, "more_body": False}]
    told: list[MutableMapping[str, Any]] = []

    async def receive() -> MutableMapping[str, Any]:
        if asked:
            return asked.pop()
        await asyncio.sleep(3600)
        raise AssertionError

    async def send(message: MutableMapping[str, Any]) -> None:
        told.append(message)

    scope = {"type": "http", "method": method, "path": path, "headers": [(b"content-type", b"application/json")]}
    await asyncio.wait_for(app(scope, receive, send), 20)
    assert not told[-1].get("more_body", False), "the answer never ended"
    return told[0]["status"], b"".join(part.get("body", b"") for part in told)


def fresh(folder: Path) -> tuple[App, FakeDoor]:
    door = FakeDoor(lambda submit: emits(tokens("ab"), Finish.LENGTH, logprobs=submit.sampling.logprobs is not None))
    registry = CollectorRegistry()
    settings = FrontSettings(max_body_bytes=1 << 20)
    app = make_app(door, tiny_text(folder), settings=settings, metrics_text=lambda: b"", registry=registry)
    return app, door


@pytest.mark.parametrize("path", POSTS)
async def test_bodies_of_the_documents_shape_never_make_a_500_and_leave_nothing_open(path: str, tmp_path: Path) -> None:
    seed = 3
    app, door = fresh(tmp_path)
    operation = DOCUMENT["paths"][path]["post"]
    schema = operation["requestBody"]["content"]["application/json"]["schema"]
    seen: dict[int, int] = {}
    for number in range(400):
        dice = random.Random(f"{seed} {path} {number}")
        body = json.dumps(value(schema, dice)).encode()
        if dice.random() < 0.1:
            body = body[: dice.randint(0, len(body))] + dice.randbytes(dice.randint(0, 3))
        status, answer = await call(app, "POST", path, body)
        told = f"seed {seed}, number {number}: {body!r} -> {status} {answer[:300]!r}"
        assert str(status) in operation["responses"] and status < 500, told
        if status != 200:
            error = json.loads(answer)["error"]
            assert error.keys() == {"message", "type", "param", "code"} and error["message"], told
        seen[status] = seen.get(status, 0) + 1
    assert seen.get(200, 0) > 5 and seen.get(400, 0) > 5, seen
    assert all(stream.num_waiting == 0 or name in door.abandons for name, stream in door.streams.items())
    assert len(asyncio.all_tasks()) == 1, "a task was left"


async def test_every_documented_path_is_served_and_every_served_one_documented(tmp_path: Path) -> None:
    app, door = fresh(tmp_path)
    status, told = await call(app, "GET", "/openapi.json", b"")
    assert status == 200
    assert json.loads(told)["paths"].keys() == DOCUMENT["paths"].keys()
    for path, methods in DOCUMENT["paths"].items():
        for method in methods:
            status, _ = await call(app, method.upper(), path.replace("{id}", door.card().name), b"{}")
            assert status not in (404, 405), path
    references = [word for word in json.dumps(DOCUMENT).split('"') if word.startswith("#/components/schemas/")]
    assert {word.rsplit("/", 1)[1] for word in references} <= DOCUMENT["components"]["schemas"].keys()
