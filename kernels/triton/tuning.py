"""Block sizes, warps and stages by kernel, architecture and size: data, with what was tried beside it.

Rules
1. A row is (up to this size, launch); the first that fits counts. An architecture without rows of its own takes its
   family's: sm_90 for later NVIDIA, sm_80 for earlier, gfx942 for AMD. "kernel variant" wins over "kernel" where the
   architecture or its family has rows there.
2. Rows were chosen by what compiles without spills and leaves room for two programs a multiprocessor; none has been
   measured on a GPU yet. `python -m benchmarks.kernels` measures them where there is one.
"""

from typing import NamedTuple

from pd.kernels.target import Target


class Launch(NamedTuple):
    """One launch's shape. Unused fields keep their defaults."""

    block_m: int = 16
    block_n: int = 64
    block_k: int = 64
    num_warps: int = 4
    num_stages: int = 1
    waves_per_eu: int = 0
    instruction: int = 0  # AMD's matrix_instr_nonkdim: 16 needs fewer registers than 32

    def options(self, target: Target) -> dict[str, int]:
        """Keyword arguments of a launch; each vendor refuses the other's."""
        common = {"num_warps": self.num_warps, "num_stages": self.num_stages}
        if not target.is_hip:
            return common
        return common | {"waves_per_eu": self.waves_per_eu, "matrix_instr_nonkdim": self.instruction}


Rows = tuple[tuple[int, Launch], ...]

# Indirect loads through a page table cap the useful depth of a pipeline at 2 stages on CUDA; on HIP each stage costs
# registers and LDS (64 KiB at 4), so 1.
_HIP = {"num_stages": 1, "instruction": 16}

TABLE: dict[str, dict[str, Rows]] = {
    # size: head size. block_m: least rows; the launcher takes what the packed group needs.
    "paged_decode": {
        "interpreter": ((1024, Launch(block_n=128)),),
        "sm_80": (
            (64, Launch(block_n=64, num_stages=2)),
            (128, Launch(block_n=32, num_stages=2)),
            (256, Launch(block_n=32, num_stages=2)),
        ),
        "sm_90": (
            (64, Launch(block_n=128, num_stages=2)),
            (128, Launch(block_n=64, num_stages=2)),
            (256, Launch(block_n=32, num_stages=2)),
        ),
        "gfx942": ((128, Launch(block_n=32, **_HIP)), (256, Launch(block_n=16, **_HIP))),
    },
    # size: value size. Splits merged.
    "merge": {"interpreter": ((1024, Launch(block_n=1024)),), "sm_80": ((1024, Launch(block_n=128)),)},
    # size: head size. block_m: rows, i.e. query tokens x heads of a group.
    "paged_prefill": {
        "interpreter": ((1024, Launch(block_m=64, block_n=128)),),
        "sm_80": (
            (64, Launch(block_m=128, block_n=64, num_warps=8, num_stages=2)),
            (128, Launch(block_m=128, block_n=64, num_warps=8, num_stages=1)),
            (256, Launch(block_m=64, block_n=32, num_warps=8, num_stages=1)),
        ),
        "sm_90": (
            (64, Launch(block_m=128, block_n=64, num_warps=8, num_stages=2)),
            (128, Launch(block_m=128, block_n=64, num_warps=8, num_stages=2)),
            (256, Launch(block_m=64, block_n=32, num_warps=8, num_stages=1)),
        ),
        "sm_100": (
            (64, Launch(block_m=128, block_n=64, num_warps=8, num_stages=1)),  # 2 stages spill 12 bytes there
            (128, Launch(block_m=128, block_n=64, num_warps=8, num_stages=2)),
            (256, Launch(block_m=64, block_n=32, num_warps=8, num_stages=1)),
        ),
        "gfx942": (
            (64, Launch(block_m=64, block_n=64, **_HIP)),
            (128, Launch(block_m=64, block_n=32, **_HIP)),
            (256, Launch(block_m=32, block_n=16, **_HIP)),
        ),
    },
    # In float32 NVIDIA's products are plain multiply-adds, of registers: the tiles above spill, prefill's 64 KiB.
    "paged_decode fp32": {
        "sm_80": ((128, Launch(block_n=32, num_stages=2)), (256, Launch(block_n=16, num_stages=2))),
        "sm_90": ((128, Launch(block_n=32, num_stages=1)), (256, Launch(block_n=16, num_stages=2))),
    },
    "paged_prefill fp32": {
        name: (
            (64, Launch(block_m=64, block_n=32, num_warps=8)),
            (128, Launch(block_m=32, block_n=32, num_warps=8)),
            (256, Launch(block_m=rows, block_n=16, num_warps=8)),
        )
        for name, rows in (("sm_80", 16), ("sm_90", 16), ("sm_100", 32))
    },
    # Heads of 256 in float8: 32 tokens spill 4 to 8 bytes.
    "paged_decode fp8": {
        "sm_80": (
            (64, Launch(block_n=64, num_stages=2)),
            (128, Launch(block_n=32, num_stages=2)),
            (256, Launch(block_n=16, num_stages=2)),
        ),
        "sm_100": (
            (64, Launch(block_n=128, num_stages=2)),
            (128, Launch(block_n=64, num_stages=2)),
            (256, Launch(block_n=16, num_stages=2)),
        ),
    },
    # sm_80 widens float8 by hand: 64 tokens spill 320 bytes.
    "paged_prefill fp8": {
        "sm_80": (
            (128, Launch(block_m=128, block_n=32, num_warps=8)),
            (256, Launch(block_m=32, block_n=32, num_warps=8)),
        ),
    },
    # size: latent elements. block_m: (token, head) pairs. Each latent is 1 KiB a token: tiles of few tokens.
    "mla_decode": {
        "interpreter": ((1024, Launch(block_m=16, block_n=128)),),
        "sm_80": ((512, Launch(block_m=16, block_n=32, num_warps=8, num_stages=2)),),
        "sm_90": ((512, Launch(block_m=16, block_n=32, num_warps=8, num_stages=2)),),
        "gfx942": ((512, Launch(block_m=16, block_n=16, num_warps=4, **_HIP)),),
    },
    "mla_prefill": {
        "interpreter": ((1024, Launch(block_m=64, block_n=128)),),
        "sm_80": ((512, Launch(block_m=32, block_n=32, num_warps=8, num_stages=1)),),
        "sm_90": ((512, Launch(block_m=32, block_n=32, num_warps=8, num_stages=1)),),
        "gfx942": ((512, Launch(block_m=32, block_n=16, num_warps=8, **_HIP)),),
        "gfx950": ((512, Launch(block_m=16, block_n=16, num_warps=4, **_HIP)),),  # 32 rows spill 132 bytes there
    },
    # Widened by hand or by the hardware, float8 takes registers: the tiles above spill 4 to 670 bytes; so do AMD's of
    # float32 prefill, 1,000.
    "mla_decode fp8": {"sm_80": ((512, Launch(block_m=16, block_n=16, num_warps=8, num_stages=2)),)},
    "mla_prefill fp8": {
        "sm_80": ((512, Launch(block_m=16, block_n=32, num_warps=8, num_stages=1)),),
        "sm_90": ((512, Launch(block_m=16, block_n=32, num_warps=8, num_stages=1)),),
        "gfx942": ((512, Launch(block_m=16, block_n=16, num_warps=4, **_HIP)),),
    },
    "mla_prefill fp32": {"gfx942": ((512, Launch(block_m=16, block_n=16, num_warps=4, **_HIP)),)},
    # size: experts.
    "moe_route": {"sm_80": ((256, Launch(num_warps=1)), (1024, Launch(num_warps=4)))},
    "moe_sort": {"interpreter": ((1024, Launch(block_n=256)),), "sm_80": ((1024, Launch(block_n=1024)),)},
    # size: pairs an expert, on average. block_m: rows, block_n: outputs, block_k: inputs.
    "grouped_gemm": {
        "interpreter": ((1 << 30, Launch(block_m=16, block_n=128, block_k=128)),),
        "sm_80": (
            (16, Launch(block_m=16, block_n=64, block_k=64, num_stages=3)),
            (64, Launch(block_m=64, block_n=64, block_k=64, num_stages=3)),
            (1 << 30, Launch(block_m=128, block_n=128, block_k=32, num_warps=8, num_stages=3)),
        ),
        "gfx942": (
            (16, Launch(block_m=16, block_n=64, block_k=64, num_stages=2, instruction=16)),
            (64, Launch(block_m=64, block_n=64, block_k=64, num_stages=2, instruction=16)),
            (1 << 30, Launch(block_m=128, block_n=128, block_k=32, num_warps=8, num_stages=2, instruction=16)),
        ),
    },
    # size: head size. block_m: tokens at once.
    "kv_reshard": {"sm_80": ((1024, Launch(block_m=16)),)},
    # block_n: words at once.
    "copy_spans": {"sm_80": ((1, Launch(block_n=1024)),)},
    # size: the last dim. block_n there: elements a program takes at once.
    "rms_norm": {"sm_80": ((1024, Launch(num_warps=2)), (4096, Launch(num_warps=4)), (1 << 20, Launch(num_warps=8)))},
    "silu_mul": {"interpreter": ((1 << 30, Launch(block_n=1024)),), "sm_80": ((1 << 30, Launch(block_n=1024)),)},
    # size: the vocabulary. block_n: tokens a program takes at once.
    "vocabulary": {
        "interpreter": ((1 << 30, Launch(block_n=65536)),),
        "sm_80": ((1 << 30, Launch(block_n=4096, num_warps=8)),),
    },
    "floors": {
        "interpreter": ((1 << 30, Launch(block_n=8192)),),
        "sm_80": ((1 << 30, Launch(block_n=1024, num_warps=8)),),
    },
    # size: heads written. block_m: heads a program takes.
    "kv_write": {"interpreter": ((1 << 20, Launch(block_m=16)),), "sm_80": ((1 << 20, Launch(block_m=8)),)},
}


def launch_of(kernel: str, target: Target, size: int, *, variant: str = "") -> Launch:
    """The table's launch. `variant`: "fp32", "fp8" or none. Raises ValueError where no row is large enough."""
    own, plain, family = TABLE.get(f"{kernel} {variant}", {}), TABLE[kernel], _family(target)
    found = (own.get(target.arch), own.get(family), plain.get(target.arch), plain.get(family), plain.get("sm_80"))
    rows = next(rows for rows in found if rows is not None)
    for largest, launch in rows:
        if size <= largest:
            return launch
    raise ValueError(f"{kernel}: size {size} is larger than {rows[-1][0]}, the largest on {target.arch}")


def _family(target: Target) -> str:
    if target.is_hip:
        return "gfx942"
    if target.arch == "interpreter":
        return "interpreter"
    return "sm_90" if int(target.arch.removeprefix("sm_")) >= 90 and target.arch != "sm_120" else "sm_80"
