"""Bounds on the maximum, not the average: what is larger than this needs a seam. The style asks for less."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from tests.shape.source import Function, Module, listed, modules, product

MAX_FILE, MAX_TEST_FILE, MAX_FUNCTION, MAX_METHODS, MAX_PARAMETERS, MAX_NESTING = 400, 600, 60, 15, 6, 4
_NESTS = (ast.If, ast.For, ast.AsyncFor, ast.While, ast.With, ast.AsyncWith, ast.Try, ast.Match)


def test_files_are_short() -> None:
    limits = [*((module, MAX_FILE) for module in product()), *((module, MAX_TEST_FILE) for module in modules("tests"))]
    found = {str(module): module.num_lines for module, limit in limits if module.num_lines > limit}
    assert not found, listed(map(str, found.items()))


def test_functions_are_short() -> None:
    found = {
        f"{module}:{function.name}": length(function)
        for module in modules("pd", "kernels", "tests", "scripts")
        for function in module.functions()
        if length(function) > MAX_FUNCTION
    }
    assert not found, listed(map(str, found.items()))


def test_classes_have_few_methods() -> None:
    counts = {f"{module}:{cls.name}": count for module in product() for cls, count in methods(module)}
    found = {name: count for name, count in counts.items() if count > MAX_METHODS}
    assert not found, listed(map(str, found.items()))


def test_functions_have_few_parameters() -> None:
    found = {
        f"{module}:{function.name}": len(parameters(function))
        for module in product()
        for function in module.functions()
        if len(parameters(function)) > MAX_PARAMETERS
    }
    assert not found, listed(map(str, found.items()))


def test_nesting_is_shallow() -> None:
    found = {
        f"{module}:{function.name}": nesting(function)
        for module in product()
        for function in module.functions()
        if nesting(function) > MAX_NESTING
    }
    assert not found, listed(map(str, found.items()))


def test_nesting_is_counted_as_a_reader_sees_it() -> None:
    source = "def f():\n for a in b:\n  if a:\n   pass\n  elif c:\n   with d:\n    pass\n"
    (function,) = (node for node in ast.walk(ast.parse(source)) if isinstance(node, Function))
    assert nesting(function) == 3


def length(function: Function) -> int:
    assert function.end_lineno is not None
    return function.end_lineno - function.lineno + 1


def methods(module: Module) -> Iterator[tuple[ast.ClassDef, int]]:
    for cls in module.classes():
        own = [node for node in cls.body if isinstance(node, Function)]
        yield cls, sum(not node.name.startswith("__") for node in own)


def parameters(function: Function) -> list[str]:
    """Without the object, and without a kernel's: they are a launch's flat arguments."""
    if any("jit" in ast.unparse(decorator) for decorator in function.decorator_list):
        return []
    spec = function.args
    names = [arg.arg for arg in (*spec.posonlyargs, *spec.args, *spec.kwonlyargs)]
    return names[1:] if names[:1] in (["self"], ["cls"]) else names


def nesting(node: ast.AST, depth: int = 0) -> int:
    """Levels of blocks within; `elif` is no level of its own, a function within begins anew."""
    deepest = depth
    for field, value in ast.iter_fields(node):
        for child in value if isinstance(value, list) else [value]:
            if not isinstance(child, ast.AST) or isinstance(child, Function | ast.ClassDef | ast.Lambda):
                continue
            is_elif = isinstance(node, ast.If) and field == "orelse" and isinstance(child, ast.If) and len(value) == 1
            deepest = max(deepest, nesting(child, depth + (isinstance(child, _NESTS) and not is_elif)))
    return deepest
