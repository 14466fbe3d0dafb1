"""Builds kernels/cpu into an extension module beside this file, and loads it where it fits; and kernels/cpu/bytes into
a library for pd/transfer, which knows neither torch nor Python.

The module's name carries a hash of the sources, the flags, torch's version and Python's: after any of them
changes, the old one is not found and the ops are plain PyTorch until the next build, which `load` says.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, cast

import torch
from torch import Tensor

from pd.transfer import native as plain

SOURCES = Path(__file__).parents[3] / "kernels" / "cpu"
MODULE = "_cpu_ops"
_DTYPES = (torch.bfloat16, torch.float32)
COMMON = ("-std=c++20", "-fPIC", "-fvisibility=hidden", "-Wall", "-Wextra", "-ffp-contract=off")
_AVX512 = ("-mavx2", "-mfma", "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq")
# GCC 12 warns of its own AVX-512 headers (its bug 105593).
_QUIET = ("-Wno-uninitialized", "-Wno-maybe-uninitialized")


@dataclass(frozen=True, slots=True)
class Unit:
    """One compilation. `source` is compiled once for each instruction set that has a unit."""

    name: str
    source: str
    flags: tuple[str, ...]


UNITS = (
    # The longest first: it holds torch's headers.
    Unit("binding", "binding.cpp", ("-O1", "-fopenmp", "-Wno-unknown-pragmas")),
    Unit("avx512_bf16", "isa.cpp", ("-O2", *_AVX512, "-mavx512bf16", *_QUIET, "-DPD_AVX512BF16")),
    Unit("avx512", "isa.cpp", ("-O2", *_AVX512, *_QUIET, "-DPD_AVX512")),
    Unit("avx2", "isa.cpp", ("-O2", "-mavx2", "-mfma")),
    Unit("shm_group", "shm_group.cpp", ("-O2",)),
)


class NativeGroup(Protocol):
    """One rank's end of shm_group.py's collectives."""

    def all_reduce(self, x: Tensor, /) -> None: ...
    def gather_to_first(self, x: Tensor, /) -> Tensor | None: ...
    def broadcast(self, x: Tensor, /) -> None: ...
    def close(self) -> None: ...


class NativeOps(Protocol):
    """The extension module's functions; cpu_ops says what each means. They check their tensors themselves."""

    GroupBroken: type[Exception]

    def make_region(self, size: int, slot_bytes: int, /) -> int: ...
    def ShmGroup(self, rank: int, size: int, fd: int, slot_bytes: int, deadline_s: float, /) -> NativeGroup: ...
    def available(self) -> list[str]: ...
    def use(self, name: str, /) -> None: ...
    def pack(self, weight_NI: Tensor, /) -> Tensor: ...
    def linear(self, x_MI: Tensor, panels: Tensor, num_outputs: int, bias_N: Tensor | None, /) -> Tensor: ...
    def paged_decode(
        self,
        q_BHE: Tensor,
        pools: tuple[Tensor, Tensor],
        context: tuple[Tensor, Tensor],
        kv_head_of_query_H: Tensor,
        scale: float,
        window: int,
        /,
    ) -> Tensor: ...
    def paged_prefill(
        self,
        q_THE: Tensor,
        pools: tuple[Tensor, Tensor],
        chunks: tuple[Tensor, Tensor, Tensor],
        kv_head_of_query_H: Tensor,
        scale: float,
        window: int,
        /,
    ) -> Tensor: ...
    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, residual: Tensor | None, /) -> Tensor: ...
    def silu_mul(self, gate_up: Tensor, /) -> Tensor: ...
    def rope_and_write(
        self,
        qkv: tuple[Tensor, Tensor, Tensor],
        angles: tuple[Tensor, Tensor],
        pools: tuple[Tensor, Tensor],
        places: tuple[Tensor, Tensor],
        /,
    ) -> None: ...
    def argmax(self, x_BV: Tensor, /) -> Tensor: ...
    def race(self, logits_RV: Tensor, floor_R: Tensor, seed_R: Tensor, position_R: Tensor, /) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class Native:
    module: NativeOps | None
    description: str


class BuildError(Exception):
    """There is a compiler and it failed; the message ends with its last lines."""


@functools.cache
def load() -> Native:
    """The extension module with the best instruction set of this CPU, or why there is none. Once a process."""
    path = module_path()
    if path is None:
        return Native(None, f"plain PyTorch (no C++ ops: {_hindrance()})")
    if not path.exists():
        return Native(None, "plain PyTorch (C++ ops not built: python -m pd.runtime.engine.cpu_ops build)")
    spec = importlib.util.spec_from_file_location(MODULE, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    native = cast(NativeOps, module)
    names = native.available()
    if not names:
        return Native(None, "plain PyTorch (no C++ ops: this CPU has no AVX2)")
    native.use(names[0])
    return Native(native, f"C++ ops ({names[0]})")


def native_for(x: Tensor) -> NativeOps | None:
    """The C++ ops if they were built and take such a tensor. 0.3 µs; asking for `device.type` alone costs 1."""
    native = load().module
    return native if native is not None and x.is_cpu and x.dtype in _DTYPES else None


@functools.cache
def has_bf16_gemm() -> bool:
    """Whether oneDNN multiplies bf16 matrices at full speed here."""
    return bool(torch.cpu._is_avx512_bf16_supported())


def build() -> str:
    """Compile what is missing, and say what is there now. Raises BuildError; having no compiler is no error."""
    _build_bytes()
    path = module_path()
    if path is not None and not path.exists():
        if _hindrance():
            return f"plain PyTorch (no C++ ops: {_hindrance()})"
        with tempfile.TemporaryDirectory(dir=path.parent, prefix=".cpu_ops-") as folder:
            linked = _compile(Path(folder))
            if module_path() != path:
                raise BuildError("kernels/cpu was changed while it was compiled: build it once more")
            for old in path.parent.glob(f"{MODULE}.*.so"):
                old.unlink(missing_ok=True)
            os.replace(linked, path)
        load.cache_clear()
    return load().description


def module_path() -> Path | None:
    """Where the module for these sources is or would be; None where they cannot be built at all."""
    if platform.machine() not in ("x86_64", "AMD64") or not SOURCES.is_dir():
        return None
    key = hashlib.sha256(f"{torch.__version__} {sys.implementation.cache_tag} {COMMON} {UNITS}".encode())
    for source in sorted(path for path in SOURCES.iterdir() if path.is_file()):
        key.update(source.read_bytes())
    return Path(__file__).with_name(f"{MODULE}.{key.hexdigest()[:16]}.so")


def _hindrance() -> str:
    """Why nothing can be built here; empty if something can."""
    if platform.machine() not in ("x86_64", "AMD64"):
        return f"they are for x86-64, not {platform.machine()}"
    if not SOURCES.is_dir():
        return f"no sources at {SOURCES}"
    if shutil.which("g++") is None:
        return "no g++"
    header = Path(sysconfig.get_paths()["include"]) / "Python.h"
    return "" if header.exists() else f"no {header}"


def _build_bytes() -> None:
    path = plain.library_path()
    if path is None or path.exists() or shutil.which("g++") is None:
        return
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=".cpu_ops-") as folder:
        linked = Path(folder) / path.name
        _run(*plain.build_command(linked))
        for old in path.parent.glob(f"{plain.LIBRARY}.*.so"):
            old.unlink(missing_ok=True)
        os.replace(linked, path)
    plain.load.cache_clear()
    try:
        plain.load()
    except OSError as error:
        raise BuildError(f"kernels/cpu/bytes was compiled and cannot be loaded: {error}") from error


def _compile(folder: Path) -> Path:
    torch_folder = Path(torch.__file__).parent
    includes = [
        f"-isystem{path}"
        for path in (
            torch_folder / "include",
            torch_folder / "include/torch/csrc/api/include",
            sysconfig.get_paths()["include"],
        )
    ]

    def one(unit: Unit) -> Path:
        compiled = folder / f"{unit.name}.o"
        _run("g++", *COMMON, *unit.flags, *includes, "-c", str(SOURCES / unit.source), "-o", str(compiled))
        return compiled

    with ThreadPoolExecutor(min(len(UNITS), os.cpu_count() or 1)) as pool:
        objects = list(pool.map(one, UNITS))
    linked = folder / f"{MODULE}.so"
    # Not linked with -fopenmp: its symbols then come from the OpenMP that torch itself brings, so there is one pool.
    libraries = [f"-L{torch_folder / 'lib'}", "-ltorch_python", "-ltorch_cpu", "-ltorch", "-lc10"]
    _run("g++", "-shared", *map(str, objects), "-o", str(linked), *libraries)
    return linked


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise BuildError("\n".join([" ".join(command), *done.stderr.splitlines()[-20:]]))
