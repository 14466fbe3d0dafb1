"""Unknown fields are ignored and said once; the known ones stand in the manual."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from pd.runtime.front.openai import ChatBody, CompletionBody
from pd.runtime.front.strangers import Strangers

MANUAL = Path(__file__).parents[2] / "docs" / "running.md"


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records]


def test_an_unknown_field_is_said_once_with_the_one_that_was_meant(caplog: pytest.LogCaptureFixture) -> None:
    strangers = Strangers()
    for _ in range(3):
        strangers.look(b'{"prompt": "x", "max_token": 3, "n": 1}', CompletionBody)
    strangers.look(b'{"messages": [], "zz\\n": {"a": [1]}}', ChatBody)
    assert said(caplog) == [
        "ignored the field 'max_token' of a request: unknown; max_tokens is known",
        "ignored the field 'zz\\n' of a request: unknown",
    ]


def test_made_up_names_do_not_fill_the_log(caplog: pytest.LogCaptureFixture) -> None:
    strangers = Strangers()
    for number in range(10):
        strangers.look(msgspec.json.encode({f"-{number}-{index}": 0 for index in range(50)}), ChatBody)
    assert len(said(caplog)) == 64 + 1
    assert said(caplog)[-1] == "ignored 64 unknown fields by now; no more of them are said"


def test_every_known_field_stands_in_the_manual() -> None:
    told = MANUAL.read_text()
    fields = {*CompletionBody.__struct_fields__, *ChatBody.__struct_fields__}
    assert {name for name in fields if f"`{name}`" not in told} == set()
