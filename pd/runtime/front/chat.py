"""The messages of a chat, as OpenAI writes them -> as a chat template reads them. Pure."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from pd.runtime.front.checks import asks_nothing, show, unsupported
from pd.runtime.front.errors import RequestError
from pd.runtime.front.template import Message

NOTHING = msgspec.Raw(b"null")

ROLES = ("system", "developer", "user", "assistant", "tool", "function")


class Part(msgspec.Struct):
    type: str
    text: str | None = None


class ChatMessage(msgspec.Struct):
    role: str
    content: str | list[Part] | None = None
    name: str | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    tool_calls: msgspec.Raw = NOTHING
    function_call: msgspec.Raw = NOTHING


def to_template(messages: Sequence[ChatMessage]) -> tuple[Message, ...]:
    """Raises RequestError naming the message at fault."""
    if not messages:
        raise RequestError("messages is empty", param="messages")
    return tuple(_message(message, f"messages[{index}]") for index, message in enumerate(messages))


def _message(asked: ChatMessage, where: str) -> Message:
    if asked.role not in ROLES:
        raise RequestError(
            f"{where}.role: expected one of {', '.join(ROLES)}, got {show(asked.role)}",
            param=f"{where}.role",
        )
    if not (asks_nothing(asked.tool_calls) and asks_nothing(asked.function_call)):
        raise unsupported(where, "tool calls are not supported")
    if asked.content is None and asked.role != "assistant":
        raise RequestError(f"{where}.content is missing", param=f"{where}.content")
    message = {
        "role": asked.role,
        "content": _content(asked.content or "", f"{where}.content"),
        "name": asked.name,
        "tool_call_id": asked.tool_call_id,
        "reasoning_content": asked.reasoning_content,
    }
    return {key: value for key, value in message.items() if value is not None}


def _content(content: str | list[Part], where: str) -> str:
    """Parts are joined by line ends, as vLLM does for templates that take a string."""
    if isinstance(content, str):
        return content
    texts: list[str] = []
    for index, part in enumerate(content):
        if part.type != "text":
            raise unsupported(f"{where}[{index}].type", f"only 'text' is supported, got {show(part.type)}")
        if part.text is None:
            raise RequestError(f"{where}[{index}].text is missing", param=f"{where}[{index}].text")
        texts.append(part.text)
    return "\n".join(texts)
