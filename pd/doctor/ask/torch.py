"""torch: its build, and the GPUs it sees (CUDA's and HIP's alike)."""

from __future__ import annotations

import re
from importlib import metadata

import torch

from pd.doctor.answers import Gpu, Torch


def answer() -> Torch:
    available, error = _start()
    count = torch.cuda.device_count() if available else 0
    return Torch(
        version=str(torch.__version__),
        cuda=torch.version.cuda,
        hip=torch.version.hip,
        available=available,
        error=error,
        gpus=tuple(_gpu(i) for i in range(count)),
        arch_list=tuple(torch.cuda.get_arch_list()) if available else (),
        nccl=_nccl(),
        peers=tuple(
            tuple(i == j or torch.cuda.can_device_access_peer(i, j) for j in range(count)) for i in range(count)
        ),
        wants_triton=_wants_triton(),
    )


def _start() -> tuple[bool, str]:
    if torch.version.cuda is None and torch.version.hip is None:
        return False, ""
    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]
    except (RuntimeError, AssertionError) as error:
        return False, str(error).splitlines()[0]
    return torch.cuda.is_available(), ""


def _gpu(index: int) -> Gpu:
    properties = torch.cuda.get_device_properties(index)
    arch = getattr(properties, "gcnArchName", "").partition(":")[0]
    capability = arch if torch.version.hip else f"{properties.major}.{properties.minor}"
    return Gpu(name=properties.name, capability=capability, memory=properties.total_memory)


def _nccl() -> str | None:
    if not torch.distributed.is_available() or not torch.distributed.is_nccl_available():
        return None
    return ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]


def _wants_triton() -> str | None:
    """From torch's own requirements: "triton==3.7.1; platform_system == …"."""
    for line in metadata.requires("torch") or ():
        found = re.match(r"(?:pytorch-)?triton(?:-rocm)?==([\w.+]+)", line.replace(" ", ""))
        if found:
            return found[1]
    return None
