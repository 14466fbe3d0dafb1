"""Which GPUs each instance of `pd serve` sees: its own, so that no two of them count from 0 on the same ones."""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

_NVIDIA, _AMD = "CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"


def gpu_environments(
    tps: Sequence[int], environment: Mapping[str, str], *, root: Path = Path("/")
) -> list[dict[str, str]]:
    """Variables for instances of these sizes: neighbouring GPUs of those that we may use, `tp` each.

    Nothing where there are none, or fewer than ranks: then all see all, and ranks share GPUs.
    """
    variable = _AMD if (root / "dev/kfd").exists() else _NVIDIA
    visible = _said(environment.get(variable)) or [str(i) for i in range(_count(root))]
    if sum(tps) > len(visible):
        return [{} for _ in tps]
    starts = itertools.accumulate(tps, initial=0)
    return [{variable: ",".join(visible[start : start + tp])} for start, tp in zip(starts, tps, strict=False)]


def _said(value: str | None) -> list[str]:
    return [entry.strip() for entry in (value or "").split(",") if entry.strip()]


def _count(root: Path) -> int:
    """Devices of NVIDIA's driver, or nodes of AMD's that compute."""
    nvidia = [node for node in root.glob("dev/nvidia*") if re.fullmatch(r"nvidia\d+", node.name)]
    if nvidia:
        return len(nvidia)
    nodes = root.glob("sys/class/kfd/kfd/topology/nodes/*/properties")
    return sum(bool(re.search(r"^simd_count [1-9]", node.read_text(), re.M)) for node in nodes)
