"""The project's own source, parsed: what the shape tests look at."""

from __future__ import annotations

import ast
import functools
import gc
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Module:
    name: str
    """As imported: kernels/triton is pd.kernels."""
    path: Path
    tree: ast.Module
    num_lines: int

    def __str__(self) -> str:
        return str(self.path.relative_to(ROOT))

    @functools.cached_property
    def nodes(self) -> tuple[ast.AST, ...]:
        """All of the tree, as `ast.walk` gives them: walked once, for most of the time goes there."""
        return tuple(ast.walk(self.tree))

    def functions(self) -> Iterator[Function]:
        return (node for node in self.nodes if isinstance(node, Function))

    def classes(self) -> Iterator[ast.ClassDef]:
        return (node for node in self.nodes if isinstance(node, ast.ClassDef))


def modules(*folders: str) -> tuple[Module, ...]:
    """Every Python file under `folders` of the project, parsed."""
    paths = sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))
    gc.disable()  # a tree is many objects, and looking for garbage among them takes three quarters of the time
    try:
        return tuple(_module(path) for path in paths)
    finally:
        gc.enable()


def product() -> tuple[Module, ...]:
    return modules("pd", "kernels")


def under(name: str, package: str) -> bool:
    return name == package or name.startswith(package + ".")


def words(name: str) -> list[str]:
    """snake_case and CamelCase taken apart, in lower case; a tensor's axes (`q_THE`) are no words."""
    spaced = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", re.sub(r"_[A-Z]+$", "", name))
    return [word.lower() for word in spaced.split("_") if word]


@functools.cache
def _module(path: Path) -> Module:
    text = path.read_text()
    parts = path.relative_to(ROOT).with_suffix("").parts
    if parts[:2] == ("kernels", "triton"):
        parts = ("pd", "kernels", *parts[2:])
    name = ".".join(parts).removesuffix(".__init__")
    return Module(name, path, ast.parse(text), len(text.splitlines()))


def listed(found: Iterable[str]) -> str:
    """For an assertion's message: all of them, a line each."""
    return "\n" + "\n".join(found)
