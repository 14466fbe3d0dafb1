"""Instances of one machine get GPUs of their own."""

from __future__ import annotations

from pathlib import Path

from pd.cli_gpus import gpu_environments


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


def test_neighbouring_gpus_for_each_instance(tmp_path: Path) -> None:
    root = machine(tmp_path, nvidia=8)
    assert gpu_environments([2, 1, 4], {}, root=root) == [
        {"CUDA_VISIBLE_DEVICES": "0,1"},
        {"CUDA_VISIBLE_DEVICES": "2"},
        {"CUDA_VISIBLE_DEVICES": "3,4,5,6"},
    ]


def test_only_those_that_we_may_use(tmp_path: Path) -> None:
    root = machine(tmp_path, nvidia=8)
    said = {"CUDA_VISIBLE_DEVICES": "5, GPU-8932f937,7"}
    assert gpu_environments([1, 2], said, root=root) == [
        {"CUDA_VISIBLE_DEVICES": "5"},
        {"CUDA_VISIBLE_DEVICES": "GPU-8932f937,7"},
    ]


def test_amds_have_a_variable_of_their_own(tmp_path: Path) -> None:
    root = machine(tmp_path, amd=2)
    assert gpu_environments([1, 1], {}, root=root) == [{"HIP_VISIBLE_DEVICES": "0"}, {"HIP_VISIBLE_DEVICES": "1"}]


def test_too_few_and_none_leave_all_to_see_all(tmp_path: Path) -> None:
    assert gpu_environments([1, 2], {}, root=machine(tmp_path / "two", nvidia=2)) == [{}, {}]
    assert gpu_environments([1], {}, root=machine(tmp_path / "none")) == [{}]
