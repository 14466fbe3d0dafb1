"""What a result was measured on: versions, processor, GPUs, load, commit. Nothing here names the user or the host."""

from __future__ import annotations

import contextlib
import os
import platform
import subprocess
from importlib import metadata
from pathlib import Path

import pd

_PACKAGES = ("torch", "triton", "transformers", "uvicorn", "uvloop", "httptools", "vllm", "sglang", "nixl")
_COMMAND_S = 5.0


def environment() -> dict[str, object]:
    """JSON-able. Loads no torch: versions are read from what is installed."""
    return {
        "pd": pd.__version__,
        "commit": _commit(),
        "python": platform.python_version(),
        "packages": {name: version for name in _PACKAGES if (version := _version(name))},
        "cpu": _cpu(),
        "cores": len(os.sched_getaffinity(0)),
        "load": round(os.getloadavg()[0], 2),
        "gpus": _gpus(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
    }


def in_words(found: dict[str, object]) -> str:
    """One line for a person."""
    gpus = found.get("gpus") or []
    where = f"{found.get('cores')} cores of {found.get('cpu')}"
    if isinstance(gpus, list) and gpus:
        where = f"{len(gpus)} x {gpus[0]}; {where}"
    commit = f" ({found['commit']})" if found.get("commit") else ""
    return f"pd {found.get('pd')}{commit}, python {found.get('python')}, {where}, load {found.get('load')}"


def free_memory() -> int | None:
    """Bytes that this host can give before it must take them from somebody. None: it does not tell."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) << 10
    return None


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _commit() -> str | None:
    """Of the checkout this code runs from, with a + where it was changed; None where it is no checkout."""
    folder = Path(__file__).parent
    commit = _say("git", "-C", str(folder), "rev-parse", "--short=12", "HEAD")
    if not commit:
        return None
    return commit + ("+" if _say("git", "-C", str(folder), "status", "--porcelain", "--untracked-files=no") else "")


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def _gpus() -> list[str]:
    named = _say("nvidia-smi", "--query-gpu=name", "--format=csv,noheader")
    return named.splitlines() if named else []


def _say(*command: str) -> str:
    """A command's output; empty where it is not installed or fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_COMMAND_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
