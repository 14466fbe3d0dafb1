"""One word a thing (docs/words.md): the words we do not use, and the ones that messages and stamps do."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from tests.shape.source import ROOT, Module, listed, product, under, words

BANNED = {"manager", "handler", "helper", "helpers", "util", "utils", "ctx", "misc", "stuff"}
BANNED_FOR_THINGS = {"block", "blocks", "info"}
"""Not for files, classes and functions; in kernels `block` is Triton's word for a tile of a launch."""


def things(module: Module) -> Iterator[tuple[int, str]]:
    """Files, classes and functions."""
    yield 1, module.name.rsplit(".", 1)[-1]
    for node in module.nodes:
        match node:
            case ast.ClassDef(name=name) | ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                yield node.lineno, name


def variables(module: Module) -> Iterator[tuple[int, str]]:
    """Parameters and whatever is assigned to."""
    for node in module.nodes:
        match node:
            case ast.arg(arg=name) | ast.Name(id=name, ctx=ast.Store()):
                assert isinstance(node, ast.arg | ast.Name)
                yield node.lineno, name


def test_no_banned_word_names_anything() -> None:
    found = []
    for module in product():
        for_things = BANNED if under(module.name, "pd.kernels") else BANNED | BANNED_FOR_THINGS
        found += [f"{module}:{line} {name}" for line, name in things(module) if for_things & set(words(name))]
        found += [f"{module}:{line} {name}" for line, name in variables(module) if BANNED & set(words(name))]
    assert not found, listed(found)


def test_the_words_of_the_house_are_explained() -> None:
    explained = (ROOT / "docs" / "words.md").read_text()
    missing = [
        word
        for word in (
            *("page", "slot", "chunk", "step", "shard", "span", "handoff", "attempt", "rank", "instance", "peer"),
            *("leader", "router", "epoch", "ticket", "handle", "landed", "fenced", "sever", "quarantine", "brain"),
        )
        if f"**{word}**" not in explained
    ]
    assert missing == []
