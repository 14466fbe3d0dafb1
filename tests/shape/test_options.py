"""The command line is frozen here: a new option must be added to this list, and earn it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import typer
from typer.core import TyperGroup
from typer.main import get_command

from pd.cli import app
from tests.shape.source import ROOT

SHARED = {
    *("--api-key-file", "--cluster-key", "--deadline", "--insecure", "--kernels", "--no-graphs", "--max-attempts"),
    *("--cores", "--device", "--dtype", "--host", "--kv-cache-dtype", "--kv-memory", "--log", "--max-model-len"),
    *("--max-prefill-tokens", "--max-running", "--no-prefix-cache", "--num-pages", "--page-size", "--port"),
    *("--served-name", "--threads"),
    *("--direction", "--move", "--reserve", "--transfer", "--transfer-devices", "--transfer-param", "--verify-kv"),
    "--stream-layers",
}
TRAFFIC = {
    *("--allow-eos", "--arrival", "--chat", "--dataset", "--duration", "--extra", "--num-requests", "--output"),
    *("--seed", "--slo", "--timeout", "--tokenizer", "--warmup"),
}
OPTIONS = {
    "bench chaos": {
        *("--concurrency", "--duration", "--every", "--faults", "--logs", "--num-decode", "--num-prefill", "--options"),
        *("--router-options", "--seed", "--tokens"),
    },
    "bench latency": {
        *("--batches", "--contexts", "--device", "--dtype", "--output", "--prompts", "--rounds", "--threads"),
    },
    "bench compare": TRAFFIC
    | {"--colocated", "--cores", "--decode", "--options", "--prefill", "--rates", "--repeats", "--target", "--vs"},
    "bench report": {"--html", "--slo", "--title"},
    "bench router": {"--output", "--requests", "--rounds", "--step-ms", "--streams", "--tokens", "--vs"},
    "bench serve": TRAFFIC | {"--concurrency", "--model", "--rate", "--url"},
    "bench transfer": {
        *("--backend", "--decode-tp", "--model-shape", "--output", "--page-size", "--prefill-tp", "--seconds"),
        *("--tokens", "--transfer-param"),
    },
    "doctor": {
        *("--explain", "--host", "--json", "--kv-cache-dtype", "--model", "--only", "--page-size", "--peer", "--port"),
        *("--role", "--serve", "--tp", "--verbose"),
    },
    "drain": {"--cluster-key", "--router"},
    "key": set(),
    "launch": SHARED | {"--model", "--name", "--role", "--router", "--tp"},
    "serve": SHARED | {"--colocated", "--decode", "--prefill", "--restart"},
}


def test_the_commands_and_their_options_are_these() -> None:
    context = typer.Context(get_command(app))
    found = {
        name: {option for param in command.params for option in param.opts if option.startswith("--")}
        for name, command in commands(get_command(app))
        if command.get_help(context)
    }
    assert found == OPTIONS


def commands(group: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every command by the words that call it, those of groups included."""
    for name, command in group.commands.items():
        if isinstance(command, TyperGroup):
            yield from commands(command, f"{prefix}{name} ")
        else:
            yield prefix + name, command


def test_every_option_is_documented() -> None:
    pages = {name: (ROOT / "docs" / f"{name}.md").read_text() for name in ("running", "benchmarks")}
    missing = {
        (command, option)
        for command, options in OPTIONS.items()
        for option in options
        if f"`{option}`" not in pages["benchmarks" if command.startswith("bench ") else "running"]
    }
    assert missing == set()


def test_help_shows_what_a_value_is_and_not_its_type() -> None:
    raw = {
        (name, param.name)
        for name, command in commands(get_command(app))
        for param in command.params
        if param.param_type_name == "option" and not getattr(param, "is_flag", False) and not param.metavar
    }
    assert raw == set()
