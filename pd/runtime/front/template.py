"""Chat templates, rendered as transformers renders them (its `utils/chat_template_utils.py`, 5.24).

A template is code from a model's repository: it runs in jinja's immutable sandbox.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from typing import NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from pd.runtime.config import ConfigError
from pd.runtime.front.errors import RequestError

Message = Mapping[str, object]
"""JSON-able: role, content, and what else a template may look at. No key with a None in it."""


class ChatTemplate:
    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        """`special_tokens`: bos_token, eos_token … as templates name them. Raises ConfigError if it is no template."""
        try:
            self._template = _environment().from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise ConfigError(f"the chat template is malformed at line {error.lineno}: {error.message}") from error
        self._special_tokens = dict(special_tokens)

    def render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        variables: Mapping[str, object] | None = None,
    ) -> str:
        """The prompt's text. Raises RequestError if the template refuses the messages, with its own words."""
        values = {"tools": None, "documents": None, **self._special_tokens, **(variables or {})}
        values |= {"messages": list(messages), "add_generation_prompt": add_generation_prompt}
        try:
            return self._template.render(values)
        except (jinja2.TemplateError, TypeError, ValueError, LookupError, ArithmeticError) as error:
            # Python errors too: a template that adds a string to a missing content raises TypeError.
            raise RequestError(
                f"the model's chat template does not take these messages: {error}", param="messages"
            ) from error


class _Generation(jinja2.ext.Extension):
    """{% generation %} … {% endgeneration %} marks the assistant's tokens for training; it prints what is inside."""

    tags = {"generation"}  # noqa: RUF012 jinja declares it so

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> jinja2.Environment:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _tojson(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """jinja's own escapes HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.datetime.now().strftime(pattern)
