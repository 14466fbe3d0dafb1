"""What a rank imports is imported before ranks are forked: it must leave nothing that a fork breaks."""

from __future__ import annotations

import os
import subprocess
import sys

IMPORTING = """
import importlib.util, os
import torch

def asked(*_, **__):
    raise AssertionError("asked for a GPU, whose driver works in no process that is forked after")

torch.cuda.is_available = torch.cuda.device_count = torch.cuda._lazy_init = asked
if importlib.util.find_spec("triton"):
    from triton.backends.amd import driver as amd
    from triton.backends.nvidia import driver as nvidia
    amd.HIPDriver.is_active = nvidia.CudaDriver.is_active = staticmethod(asked)
    amd.HIPUtils.__new__ = nvidia.CudaUtils.__new__ = asked
{then}
import pd.runtime.roles.rank
print(len(os.listdir("/proc/self/task")), "threads")
"""


def imported(then: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-P", "-c", IMPORTING.format(then=then)],
        env=os.environ | {"OPENBLAS_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def test_no_thread_is_started_and_no_gpu_is_asked_for() -> None:
    done = imported("")
    assert (done.stdout, done.returncode) == ("1 threads\n", 0), done.stderr


def test_this_test_would_see_a_question() -> None:
    done = imported("torch.cuda.current_device()")
    assert done.returncode == 1 and "asked for a GPU" in done.stderr
