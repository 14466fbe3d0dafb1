"""A Triton driver without a device: the launch code runs, for any target, and compiles; launches are recorded.

So a launch goes through the real binder, specialisation and code generation, with the strides, alignments and options
that it would have, and a launch that its vendor refuses (an unknown option, more shared memory than there is) fails
here.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas
from triton.compiler.compiler import make_backend
from triton.runtime.cache import triton_key
from triton.runtime.jit import JITFunction

from pd.kernels.target import SHARED_NBYTES

TARGETS = {
    **{f"sm_{arch}": GPUTarget("cuda", arch, 32) for arch in (80, 90, 100)},
    **{arch: GPUTarget("hip", arch, 64) for arch in ("gfx90a", "gfx942", "gfx950")},
}
_MATRIX = {
    "cuda": re.compile(r"wgmma\.mma_async|mma\.sync\.aligned|tcgen05\.mma"),
    "hip": re.compile(r"v_(?:mfma|wmma|smfmac)_\w+"),
}


@dataclass(frozen=True, slots=True)
class Compiled:
    """What one kernel takes of one target."""

    kernel: str
    shared_nbytes: int
    registers: int
    spilled_nbytes: int  # on the stack a thread, or in scratch memory
    uses_matrix_cores: bool


def record(launch: Any, target: str) -> list[Compiled]:
    """Call `launch`, which launches kernels on CPU tensors; what they compiled to. In a process of its own only."""
    kernels: list[Any] = []
    compile_plain = JITFunction._do_compile

    def compile_and_keep(self: Any, *args: Any, **named: Any) -> Any:
        kernel = compile_plain(self, *args, **named)
        kernels.append(kernel)
        return kernel

    JITFunction._do_compile = compile_and_keep
    triton.runtime.driver.set_active(_Driver(target))
    launch()
    return [_read(kernel, TARGETS[target].backend) for kernel in kernels]


def remember_versions(targets: Sequence[str]) -> None:
    """What Triton reads once a process to name its cache: half a second that its children need not spend."""
    triton_key()
    for target in targets:
        make_backend(TARGETS[target]).hash()


class _Driver:
    """What triton.runtime asks of a driver."""

    def __init__(self, name: str) -> None:
        self._target = TARGETS[name]
        self._shared_nbytes = SHARED_NBYTES[name]
        self.utils = self
        self.launcher_cls = lambda source, metadata: lambda *launch: None

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": self._shared_nbytes, "multiprocessor_count": 132, "warpSize": self._target.warp_size}

    def load_binary(self, name: str, binary: bytes, shared: int, device: int) -> tuple[int, int, int, int, int]:
        return 1, 1, 0, 0, 1024  # module, function, registers, spills, threads


def _read(kernel: Any, backend: str) -> Compiled:
    name, shared = kernel.metadata.name.lstrip("_"), kernel.metadata.shared
    if backend == "cuda":
        usage = _cubin_usage(kernel.asm["cubin"])
        uses = bool(_MATRIX["cuda"].search(kernel.asm["ptx"]))
        # A stack is a sign of spills, not a proof: only the assembler tells.
        spilled = _ptx_spills(kernel.asm["ptx"], kernel.metadata.target.arch) if usage["STACK"] + usage["LOCAL"] else 0
        return Compiled(name, shared + usage["SHARED"], usage["REG"], spilled, uses)
    text = kernel.asm["amdgcn"]

    def count(key: str) -> int:
        return int(re.search(rf"^[\s-]*\.{key}:\s+(\d+)", text, re.M)[1])

    scratch = int(re.search(r";\s*ScratchSize:\s*(\d+)", text)[1])
    spilled = scratch + 4 * count("vgpr_spill_count")
    return Compiled(name, shared, count("vgpr_count"), spilled, bool(_MATRIX["hip"].search(text)))


def _cubin_usage(cubin: bytes) -> dict[str, int]:
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        told = subprocess.run([tool, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True)
    return {key: int(value) for key, value in re.findall(r"(REG|STACK|SHARED|LOCAL):(\d+)", told.stdout)}


def _ptx_spills(ptx: str, arch: int) -> int:
    """Bytes a thread stores for want of registers."""
    architecture = re.search(r"\.target\s+(sm_\w+)", ptx)[1]
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(ptx)
        file.flush()
        command = [get_ptxas(arch).path, "-v", f"--gpu-name={architecture}", file.name, "-o", "/dev/null"]
        told = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    return int(re.search(r"(\d+) bytes spill stores", told)[1])
