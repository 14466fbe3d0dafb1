"""The law on GPUs: apart, from GPU to GPU of one host, answers as transformers does on a CPU. One GPU suffices."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.equality.cluster import apart
from tests.equality.conftest import COMMON, NUM_TOKENS, Case

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA or ROCm device, and torch built for it"),
]
ON_GPU = (*COMMON, "--device", "cuda", "--kernels", "triton")


@pytest.mark.parametrize("decode", [(), ("--page-size", "64", "--num-pages", "200")], ids=["direct", "packed"])
def test_apart_on_gpus_answers_as_transformers(cases: dict[str, Case], tmp_path: Path, decode: tuple[str, ...]) -> None:
    case = cases["qwen3"]
    with apart(case.model, tmp_path, decode=decode, common=ON_GPU) as cluster:
        assert cluster.generate_all(case.prompts, NUM_TOKENS) == case.answers
        for instance in cluster.wait_idle()["instances"]:
            assert instance["num_free_pages"] == instance["num_pages"], instance
