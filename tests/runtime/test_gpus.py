"""Instances of one machine get GPUs of their own."""

from __future__ import annotations

from pathlib import Path

from pd.cli_gpus import gpu_environments, ranks_a_gpu


def machine(root: Path, *, nvidia: int = 0, amd: int = 0) -> Path:
    (root / "dev").mkdir(parents=True)
    for name in ("nvidiactl", "nvidia-uvm", *(f"nvidia{i}" for i in range(nvidia))):
        if nvidia:
            (root / "dev" / name).touch()
    for i in range(amd + 1 if amd else 0):  # the processor is a node as well
        node = root / "sys/class/kfd/kfd/topology/nodes" / str(i)
        node.mkdir(parents=True)
        (node / "properties").write_text(f"cpu_cores_count {0 if i else 64}\nsimd_count {304 if i else 0}\n")
    if amd:
        (root / "dev/kfd").touch()
    return root


def test_neighbouring_gpus_first_for_each_instance_and_the_others_seen(tmp_path: Path) -> None:
    root = machine(tmp_path, nvidia=8)
    assert gpu_environments([2, 1, 4], {}, root=root) == [
        {"CUDA_VISIBLE_DEVICES": "0,1,2,3,4,5,6,7"},
        {"CUDA_VISIBLE_DEVICES": "2,3,4,5,6,7,0,1"},
        {"CUDA_VISIBLE_DEVICES": "3,4,5,6,7,0,1,2"},
    ]
    assert ranks_a_gpu([2, 1, 4], {}, root=root) == 1


def test_only_those_that_we_may_use(tmp_path: Path) -> None:
    root = machine(tmp_path, nvidia=8)
    said = {"CUDA_VISIBLE_DEVICES": "5, GPU-8932f937,7"}
    assert gpu_environments([1, 2], said, root=root) == [
        {"CUDA_VISIBLE_DEVICES": "5,GPU-8932f937,7"},
        {"CUDA_VISIBLE_DEVICES": "GPU-8932f937,7,5"},
    ]


def test_amds_have_a_variable_of_their_own(tmp_path: Path) -> None:
    root = machine(tmp_path, amd=2)
    assert gpu_environments([1, 1], {}, root=root) == [{"HIP_VISIBLE_DEVICES": "0,1"}, {"HIP_VISIBLE_DEVICES": "1,0"}]


def test_ranks_that_outnumber_gpus_are_spread_over_them(tmp_path: Path) -> None:
    root = machine(tmp_path, nvidia=2)
    said = [environment["CUDA_VISIBLE_DEVICES"] for environment in gpu_environments([1, 1, 1, 2], {}, root=root)]
    assert said == ["0,1", "1,0", "0,1", "1,0"]
    assert ranks_a_gpu([1, 1, 1, 2], {}, root=root) == 3


def test_without_gpus_nothing_is_said(tmp_path: Path) -> None:
    root = machine(tmp_path)
    assert gpu_environments([1, 2], {}, root=root) == [{}, {}]
    assert ranks_a_gpu([1, 2], {}, root=root) == 1
