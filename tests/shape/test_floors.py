"""The building's floors (docs/structure.md): a module imports downstairs only, a pure one nothing that acts."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests.shape.source import Module, listed, product, under, words

ACTS = {
    *("torch", "numpy", "triton", "transformers", "zmq", "asyncio", "socket", "ssl", "http", "urllib", "aiohttp"),
    *("uvicorn", "threading", "multiprocessing", "concurrent", "subprocess", "signal", "time", "datetime", "random"),
    *("secrets", "uuid", "os", "sys", "io", "pathlib", "tempfile", "logging", "select", "selectors", "ctypes", "mmap"),
}
"""Devices, input and output, clocks, dice, threads: not for pure modules, which take `now` and seeds as arguments."""

_MESSAGES = (*(f"pd.runtime.wire.{name}" for name in ("messages", "plans", "values")), "pd.transfer.layout")
_KITCHEN = ("pd.transfer", "pd.dp_attention", "pd.spec_decode", "pd.kernels")
_TOOL = ("pd.runtime", "pd.transfer")
_SEEDED = ACTS - {"random", "datetime"}
"""For what rolls dice of a seed it is given, and reads dates that others wrote."""
_PURE_BENCH = ("asks", "datasets", "traces", "arrivals", "outcome", "goals", "metrics", "reading")
_BENCH = ("pd.bench.specs", *(f"pd.bench.load.{name}" for name in _PURE_BENCH))

FLOORS: dict[str, tuple[tuple[str, ...], set[str]]] = {
    # package: (what of ours it may import beside itself, what else it may not); the longest match counts
    "pd": ((), ACTS),
    "pd.kernels": ((), {"zmq", "asyncio", "transformers"}),
    "pd.transfer.transport": ((), ACTS),
    "pd.transfer.layout": (("pd.transfer.transport",), ACTS),
    "pd.transfer.pairs": (("pd.transfer.layout", "pd.transfer.transport"), ACTS),
    "pd.transfer.plan": (("pd.transfer.layout", "pd.transfer.pairs", "pd.transfer.transport"), ACTS),
    "pd.transfer.handoff": ((), ACTS),
    "pd.transfer": (("pd.kernels",), {"transformers", "zmq"}),
    "pd.dp_attention.balance": ((), ACTS),
    "pd.dp_attention": (("pd.kernels",), {"transformers", "zmq"}),
    "pd.spec_decode.drafter": ((), ACTS),
    "pd.spec_decode.ngram": (("pd.spec_decode.drafter",), ACTS),
    "pd.spec_decode": (("pd.kernels",), {"zmq", "asyncio"}),
    "pd.runtime": ((), ACTS),
    "pd.runtime.config": (_MESSAGES, ACTS),
    "pd.runtime.wire.values": (("pd.transfer.layout",), ACTS),
    "pd.runtime.wire.plans": (("pd.runtime.wire.values", "pd.transfer.layout"), ACTS),
    "pd.runtime.wire.messages": (("pd.runtime.wire.plans", "pd.runtime.wire.values", "pd.transfer.layout"), ACTS),
    "pd.runtime.wire": (
        ("pd.runtime.core.events", "pd.runtime.keys", "pd.transfer.layout"),
        {"torch", "numpy", "transformers"},
    ),
    "pd.runtime.core": (
        (
            *("pd.runtime.config", *_MESSAGES, "pd.transfer.plan", "pd.transfer.handoff"),
            *("pd.dp_attention.balance", "pd.spec_decode.drafter", "pd.spec_decode.ngram"),
        ),
        ACTS,
    ),
    "pd.runtime.checkpoint": (("pd.runtime.config", "pd.runtime.gguf_checkpoint"), {"torch", "transformers", "zmq"}),
    "pd.runtime.gguf_checkpoint": (("pd.runtime.config",), {"torch", "transformers", "zmq"}),
    "pd.runtime.keys": (("pd.runtime.config",), {"torch", "transformers", "zmq"}),
    "pd.runtime.observe": (("pd.runtime.config", "pd.runtime.core.events", *_MESSAGES), {"torch", "zmq"}),
    "pd.runtime.engine": (("pd.runtime.config", *_MESSAGES, *_KITCHEN), {"zmq", "asyncio", "uvicorn"}),
    "pd.runtime.front": (
        ("pd.runtime.config", "pd.runtime.core.events", "pd.runtime.observe", *_MESSAGES),
        {"torch", "zmq"},
    ),
    "pd.runtime.roles": (("pd.runtime", *_KITCHEN), set()),
    "pd.doctor": (_TOOL, set()),
    **{f"pd.bench.load.{name}": (_BENCH, _SEEDED) for name in _PURE_BENCH},
    "pd.bench.compare.curve": ((), _SEEDED),
    "pd.bench.report.runs": (_BENCH, ACTS),
    "pd.bench.report.svg": ((), ACTS),
    "pd.bench.report.charts": ((*_BENCH, "pd.bench.report"), ACTS),
    "pd.bench.specs": ((), ACTS),
    "pd.bench": ((*_TOOL, "pd.options"), set()),
    "pd.plan": (_TOOL, set()),
    "pd.__main__": (("pd.cli",), set()),
    "pd.cli": (("pd",), set()),
    "pd.cli_bench": (("pd.cli_options", "pd.bench"), {"torch", "zmq", "transformers"}),
    "pd.options": ((), ACTS),
    "pd.cli_options": (("pd.options",), {"torch", "zmq", "transformers"}),
    "pd.cli_config": (
        ("pd.cli_options", "pd.runtime.config", "pd.runtime.keys", *_MESSAGES),
        {"torch", "zmq", "transformers"},
    ),
    "pd.cli_layout": (
        ("pd.cli_config", "pd.cli_gpus", "pd.cli_options", "pd.runtime", *_MESSAGES),
        {"torch", "zmq", "transformers"},
    ),
    "pd.cli_gpus": ((), {"torch", "zmq", "transformers"}),
}
LAZY = ("pd.cli", "pd.transfer", "pd.doctor", "pd.bench", "pd.runtime.checkpoint")
"""Where an import may stand within a function: what is optional, or slow and seldom needed."""


def floor_of(module: str) -> str:
    matches = [package for package in FLOORS if module == package or (package != "pd" and under(module, package))]
    assert matches, f"{module} stands on no floor: give it one in FLOORS and in docs/structure.md"
    return max(matches, key=len)


def imports(module: Module) -> Iterator[str]:
    """Every name that `module` imports, at any depth, in full."""
    for node in module.nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}:{node.lineno}: write imports in full"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def breaches(module: Module) -> Iterator[str]:
    floor = floor_of(module.name)
    ours, banned = FLOORS[floor]
    for name in imports(module):
        if name.split(".")[0] in banned:
            yield f"{module} imports {name}: not on the floor of {floor}"
        if (
            under(name, "pd")
            and name not in ("pd", "pd.__version__")
            and not any(under(name, package) for package in (floor, *ours))
        ):
            yield f"{module} imports {name}: upstairs or next door, seen from {floor}"
        if under(name, "kernels"):
            yield f"{module} imports {name}: kernels/triton is imported as pd.kernels"


def test_every_module_imports_downstairs_only() -> None:
    found = [breach for module in product() for breach in breaches(module)]
    assert not found, listed(found)


@pytest.mark.parametrize(
    ("name", "source", "breach"),
    [
        ("pd.runtime.core.pages", "import time", "imports time"),
        ("pd.runtime.core.pages", "from pd.runtime.roles import rank", "imports pd.runtime.roles.rank"),
        ("pd.transfer.shm", "from pd.runtime.wire.messages import Handle", "upstairs"),
        ("pd.kernels.rope", "from pd.transfer import layout", "upstairs"),
        ("pd.runtime.front.http", "def f():\n    import torch", "imports torch"),
    ],
)
def test_a_breach_is_seen(name: str, source: str, breach: str) -> None:
    some = product()[0]
    module = Module(name, some.path, ast.parse(source), 1)
    assert [breach in said for said in breaches(module)] == [True]


def test_imports_stand_at_the_top() -> None:
    found = [
        f"{module}:{node.lineno}"
        for module in product()
        if not any(under(module.name, package) or module.name.startswith("pd.cli") for package in LAZY)
        for function in module.functions()
        for node in ast.walk(function)
        if isinstance(node, ast.Import | ast.ImportFrom)
    ]
    assert not found, listed(found)


def test_transports_never_hear_of_requests() -> None:
    """Identifiers only; the state tables of a handoff, and what plans and repacks pages, are no transports."""
    foreign = {"request", "requests", "prompt", "sampling", "attempt", "chunk", "head", "heads", "page", "pages"}
    exempt = ("handoff", "layout", "pairs", "plan", "many", "packed", "reshard", "digest", "native")
    others = tuple(f"pd.transfer.{name}" for name in exempt)
    found = [
        f"{module}:{node.lineno} {name}"
        for module in product()
        if under(module.name, "pd.transfer") and module.name not in others
        for node in module.nodes
        for name in identifiers(node)
        if foreign & set(words(name))
    ]
    assert not found, listed(found)


def identifiers(node: ast.AST) -> Iterator[str]:
    match node:
        case ast.Name(id=name) | ast.Attribute(attr=name) | ast.arg(arg=name):
            yield name
        case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
            yield name


@pytest.mark.parametrize(
    ("role", "heavy"),
    [
        ("instance", {"torch", "transformers", "numba", "numpy", "uvicorn"}),
        ("router", {"torch", "numpy"}),
        ("supervisor", {"torch", "transformers", "zmq", "uvicorn", "aiohttp"}),
    ],
)
def test_a_leader_a_router_and_a_supervisor_never_load_torch(role: str, heavy: set[str]) -> None:
    script = f"import sys, pd.runtime.roles.{role}; print(*{{name.split('.')[0] for name in sys.modules}})"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert set(done.stdout.split()) & heavy == set()
