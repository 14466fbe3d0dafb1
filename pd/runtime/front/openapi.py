"""The HTTP API as an OpenAPI document, made from the very structs that requests are read with. Pure."""

from __future__ import annotations

from typing import Any, get_type_hints

import msgspec

from pd.runtime.front.chat import ROLES, ChatMessage
from pd.runtime.front.openai import ChatBody, CompletionBody
from pd.runtime.front.tokenizing import DetokenizeBody, TokenizeBody

_REF = "#/components/schemas/{name}"
_IDS: dict[str, Any] = {"type": "array", "items": {"type": "integer"}, "minItems": 1}
_PROMPT: dict[str, Any] = {
    "anyOf": [
        {"type": "string", "minLength": 1},
        {"type": "array", "items": {"type": "string", "minLength": 1}, "minItems": 1},
        _IDS,
        {"type": "array", "items": _IDS, "minItems": 1},
    ]
}
_BOUNDS = {
    "deadline_s": (0.001, None),
    "frequency_penalty": (-2, 2),
    "logprobs": (0, 20),
    "max_completion_tokens": (1, None),
    "max_tokens": (1, None),
    "min_p": (0, 1),
    "min_tokens": (0, None),
    "n": (1, 128),
    "presence_penalty": (-2, 2),
    "repetition_penalty": (0.01, 10),
    "temperature": (0, 2),
    "top_logprobs": (0, 20),
    "top_p": (0.001, 1),
}
"""Least and most of numbers; whether the model can take them is another matter."""
_ERROR: dict[str, Any] = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}
_FAULTS = {
    "400": "wrong in itself, or more than the model takes",
    "401": "no API key, or not one of this server's",
    "404": "no such model",
    "408": "the body did not arrive in time",
    "413": "the body is too large",
    "415": "the body is no JSON by its content-type",
    "429": "too much is waiting: Retry-After says when to come back",
    "500": "the model cannot answer this",
    "503": "no instance can serve it now, or all attempts failed: Retry-After",
    "504": "no whole answer within its deadline",
}

_ONE_MODEL: dict[str, Any] = {
    "parameters": [{"name": "id", "in": "path", "required": True, "schema": {"type": "string"}}],
    "responses": {"200": {"description": "see docs/running.md"}, "404": {"description": "no such model"}},
}


def document(version: str) -> dict[str, Any]:
    """OpenAPI 3.1, JSON-able."""
    message = _plain("ChatMessage", ChatMessage)
    bodies = {
        "/v1/completions": _plain("Completion", CompletionBody),
        "/v1/chat/completions": _plain("Chat", ChatBody, messages=list[message]),  # type: ignore[valid-type]
        "/tokenize": _plain("Tokenize", TokenizeBody, messages=list[message] | None),  # type: ignore[valid-type]
        "/detokenize": _plain("Detokenize", DetokenizeBody),
    }
    schemas, components = msgspec.json.schema_components(bodies.values(), schema_hook=_anything, ref_template=_REF)
    components["ChatMessage"]["properties"]["role"] = {"type": "string", "enum": list(ROLES)}
    components["Part"]["properties"]["type"] = {"type": "string", "enum": ["text"]}
    for body in (components["Completion"], components["Chat"]):
        for name in _BOUNDS.keys() & body["properties"].keys():
            body["properties"][name] = _bounded(body["properties"][name], *_BOUNDS[name])
    components["Chat"]["properties"]["messages"]["minItems"] = 1
    components["Completion"]["properties"]["prompt"] = _PROMPT
    components["Completion"].setdefault("required", []).append("prompt")
    paths = {path: {"post": _post(schema)} for path, schema in zip(bodies, schemas, strict=True)}
    for path in ("/v1/models", "/health", "/ready", "/metrics", "/state", "/version", "/openapi.json"):
        paths[path] = {"get": {"responses": {"200": {"description": "see docs/running.md"}}}}
    paths["/v1/models/{id}"] = {"get": _ONE_MODEL}
    paths["/ready"]["get"]["responses"]["503"] = {
        "description": "which role has no living instance, or why none can meet"
    }
    return {
        "openapi": "3.1.0",
        "info": {"title": "pd", "version": version},
        "paths": paths,
        "components": {
            "schemas": components | {"Error": _ERROR},
            "securitySchemes": {"bearer": {"type": "http", "scheme": "bearer"}},
        },
    }


def _post(schema: dict[str, Any]) -> dict[str, Any]:
    fault = {"application/json": {"schema": {"$ref": _REF.format(name="Error")}}}
    responses: dict[str, Any] = {"200": {"description": "as OpenAI's, whole or as server-sent events"}}
    responses |= {status: {"description": why, "content": fault} for status, why in _FAULTS.items()}
    return {
        "requestBody": {"required": True, "content": {"application/json": {"schema": schema}}},
        "responses": responses,
    }


def _plain(name: str, struct: type[msgspec.Struct], **other: Any) -> type[msgspec.Struct]:
    """The struct without the fields that are taken as they come: they are refused, or described by hand."""
    hints = get_type_hints(struct)
    fields: list[Any] = []
    for field in msgspec.structs.fields(struct):
        kind = other.get(field.name, hints[field.name])
        if kind is msgspec.Raw:
            continue
        is_required = field.default is msgspec.NODEFAULT and field.default_factory is msgspec.NODEFAULT
        fields.append((field.name, kind) if is_required else (field.name, kind, field.default))
    return msgspec.defstruct(name, fields, kw_only=True)


def _bounded(schema: dict[str, Any], least: float, most: float | None) -> dict[str, Any]:
    bounds = {"minimum": least} | ({} if most is None else {"maximum": most})
    return schema | {
        "anyOf": [
            kind | bounds if kind.get("type") in ("integer", "number") else kind for kind in schema.get("anyOf", ())
        ]
    }


def _anything(kind: type) -> dict[str, Any]:
    """A chat template's own variables."""
    assert kind is object, kind
    return {"description": "of the chat template: anything"}  # not empty: msgspec takes that for no answer
