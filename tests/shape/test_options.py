"""The command line is frozen here: a new option must be added to this list, and earn it."""

from __future__ import annotations

import typer
from typer.main import get_command

from pd.cli import app
from tests.shape.source import ROOT

SHARED = {
    *("--cores", "--device", "--dtype", "--host", "--kv-memory", "--max-model-len", "--max-prefill-tokens"),
    *("--max-running", "--no-prefix-cache", "--num-pages", "--page-size", "--port", "--served-name", "--threads"),
    *("--transfer", "--transfer-devices"),
}
OPTIONS = {
    "doctor": {
        *("--explain", "--host", "--json", "--model", "--only", "--page-size", "--peer", "--port", "--role", "--serve"),
        *("--tp", "--verbose"),
    },
    "launch": SHARED | {"--model", "--name", "--role", "--router", "--tp"},
    "serve": SHARED | {"--colocated", "--decode", "--prefill", "--restart"},
}


def test_the_commands_and_their_options_are_these() -> None:
    group = get_command(app)
    context = typer.Context(group)
    found = {
        name: {option for param in command.params for option in param.opts if option.startswith("--")}
        for name, command in group.commands.items()
        if command.get_help(context)
    }
    assert found == OPTIONS


def test_every_option_is_documented() -> None:
    text = (ROOT / "docs" / "running.md").read_text()
    assert {option for options in OPTIONS.values() for option in options if f"`{option}`" not in text} == set()
