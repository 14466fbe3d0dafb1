"""Which GPUs each instance of `pd serve` sees: its own first, so that no two of them count from 0 on the same ones.

It sees the others too: KV goes from one GPU to another, and not every library reaches one that its process cannot see.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

_NVIDIA, _AMD = "CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"


def gpu_environments(
    tps: Sequence[int], environment: Mapping[str, str], *, root: Path = Path("/")
) -> list[dict[str, str]]:
    """Variables for instances of these sizes: the GPUs that we may use, each instance's `tp` neighbouring ones first.

    Where ranks outnumber them instances begin anew with the first. Nothing where there are none.
    """
    variable, visible = _visible(environment, root)
    starts = [start % len(visible) for start in itertools.accumulate(tps, initial=0)] if visible else []
    said = [{variable: ",".join(visible[start:] + visible[:start])} for start in starts[: len(tps)]]
    return said or [{} for _ in tps]


def ranks_a_gpu(tps: Sequence[int], environment: Mapping[str, str], *, root: Path = Path("/")) -> int:
    """The most that share one."""
    _, visible = _visible(environment, root)
    return max(1, -(-sum(tps) // len(visible))) if visible else 1


def _visible(environment: Mapping[str, str], root: Path) -> tuple[str, list[str]]:
    """The vendor's variable, and the GPUs that it leaves."""
    variable = _AMD if (root / "dev/kfd").exists() else _NVIDIA
    return variable, _said(environment.get(variable)) or [str(i) for i in range(_count(root))]


def _said(value: str | None) -> list[str]:
    return [entry.strip() for entry in (value or "").split(",") if entry.strip()]


def _count(root: Path) -> int:
    """Devices of NVIDIA's driver, or nodes of AMD's that compute."""
    nvidia = [node for node in root.glob("dev/nvidia*") if re.fullmatch(r"nvidia\d+", node.name)]
    if nvidia:
        return len(nvidia)
    nodes = root.glob("sys/class/kfd/kfd/topology/nodes/*/properties")
    return sum(bool(re.search(r"^simd_count [1-9]", node.read_text(), re.M)) for node in nodes)
