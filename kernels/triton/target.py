"""What a launch must know of its device. The one place where architectures differ in fact, not in tuning."""

import functools
from dataclasses import dataclass

import torch
import triton
from torch import Tensor

INTERPRETED = bool(triton.knobs.runtime.interpret)
"""Whether kernels of this process run in Triton's interpreter, on the CPU. Fixed when they are imported."""

MIN_DOT = 16
"""Rows and inner size of a matrix product: CUDA refuses an inner size below it, and HIP leaves the matrix cores without
a word (285 registers instead of 86 in decode attention)."""

SHARED_NBYTES = {
    "sm_80": 163 << 10,
    "sm_86": 99 << 10,
    "sm_89": 99 << 10,
    "sm_90": 227 << 10,
    "sm_100": 227 << 10,
    "sm_120": 99 << 10,
    "gfx90a": 64 << 10,
    "gfx942": 64 << 10,
    "gfx950": 160 << 10,
}
"""Shared memory (LDS) that one program may take: CUDA C++ programming guide, technical specifications; CDNA ISAs."""

_NATIVE_E4M3 = ("sm_89", "sm_90", "sm_100", "sm_120", "gfx950")
"""Where float8 e4m3fn converts in hardware. Elsewhere Triton refuses the type (sm_80) or means e4m3fnuz, whose same
bits are half the value (gfx942)."""


@dataclass(frozen=True, slots=True)
class Target:
    """One device, as launches see it."""

    arch: str  # "sm_90", "gfx942" or "interpreter"
    num_multiprocessors: int

    @property
    def is_hip(self) -> bool:
        return self.arch.startswith("gfx")

    @property
    def wave(self) -> int:
        """Threads of a warp: CDNA's are 64 wide, RDNA's (gfx11, gfx12) and NVIDIA's 32."""
        return 64 if self.arch.startswith("gfx9") else 32

    @property
    def has_native_e4m3(self) -> bool:
        return self.arch in _NATIVE_E4M3


def target_of(x: Tensor) -> Target:
    """The device that a kernel launched on `x` runs on."""
    if INTERPRETED:
        return Target("interpreter", 8)
    if x.device.type == "cuda":
        return _of_device(x.device.index or 0)
    # A CPU tensor outside the interpreter: a dry run, which compiles for the driver's target and launches nothing.
    return Target(_name(triton.runtime.driver.active.get_current_target().arch), 132)


def can_run(device: torch.device) -> bool:
    """Whether kernels of this process can run on this device."""
    return INTERPRETED if device.type == "cpu" else device.type == "cuda" and not INTERPRETED


@functools.cache
def _of_device(index: int) -> Target:
    properties = torch.cuda.get_device_properties(index)
    if torch.version.hip:
        arch = properties.gcnArchName.split(":")[0]
    else:
        arch = _name(properties.major * 10 + properties.minor)
    return Target(arch, properties.multi_processor_count)


def _name(arch: int | str) -> str:
    return f"sm_{arch}" if isinstance(arch, int) else arch.split(":")[0]
