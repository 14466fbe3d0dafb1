"""Linux's texts are read as Linux means them."""

from __future__ import annotations

import pytest

from pd.doctor.pci import Distance, Pci, distance
from pd.doctor.readings import (
    Capability,
    Limit,
    cgroup_cpus,
    cgroup_memory_limit,
    count,
    cpus,
    duration,
    has_capability,
    human,
    kernel_option,
    limit,
)
from pd.doctor.recorded import Recorded, Recording


def machine(**files: str) -> Recorded:
    return Recorded(Recording(about="", sources=(), files={k.replace("__", "/"): v for k, v in files.items()}))


def with_files(files: dict[str, str]) -> Recorded:
    return Recorded(Recording(about="", sources=(), files=files))


@pytest.mark.parametrize(
    ("nbytes", "text"), [(0, "0 B"), (1536, "1.5 KiB"), (256 << 20, "256 MiB"), (3 << 40, "3 TiB")]
)
def test_sizes_are_written_for_people(nbytes: int, text: str) -> None:
    assert human(nbytes) == text


@pytest.mark.parametrize(("seconds", "text"), [(12e-6, "12 µs"), (0.0421, "42 ms"), (2.5, "2.5 s")])
def test_durations_are_written_for_people(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_nouns_are_counted() -> None:
    said = [count(1, "copy"), count(2, "copy"), count(2, "switch"), count(3, "core")]
    assert said == ["1 copy", "2 copies", "2 switches", "3 cores"]


def test_a_cpu_list_is_a_set() -> None:
    assert cpus("0-2,7") == {0, 1, 2, 7}
    assert cpus(None) == frozenset()


def test_limits_may_be_unlimited() -> None:
    text = "Max open files            1024                 524288               files"
    found = with_files(
        {"/proc/self/limits": text + "\nMax locked memory         unlimited            65536                bytes"}
    )
    assert limit(found, "Max open files") == Limit(1024, 524288)
    assert limit(found, "Max locked memory") == Limit(None, 65536)


def test_a_cgroup_limit_holds_from_any_level() -> None:
    files = {
        "/proc/self/cgroup": "0::/pods/mine",
        "/sys/fs/cgroup/pods/mine/memory.max": "max",
        "/sys/fs/cgroup/pods/memory.max": "4096",
        "/sys/fs/cgroup/pods/mine/cpu.max": "150000 100000",
        "/sys/fs/cgroup/cpu.max": "max 100000",
    }
    assert cgroup_memory_limit(with_files(files)) == 4096
    assert cgroup_cpus(with_files(files)) == 1.5


def test_version_one_cgroups_are_read_too() -> None:
    files = {
        "/proc/self/cgroup": "4:memory:/box\n2:cpu,cpuacct:/box",
        "/sys/fs/cgroup/memory/box/memory.limit_in_bytes": "9223372036854771712",
        "/sys/fs/cgroup/memory/memory.limit_in_bytes": "1048576",
        "/sys/fs/cgroup/cpu/box/cpu.cfs_quota_us": "50000",
        "/sys/fs/cgroup/cpu/box/cpu.cfs_period_us": "100000",
    }
    assert cgroup_memory_limit(with_files(files)) == 1048576
    assert cgroup_cpus(with_files(files)) == 0.5


@pytest.mark.parametrize(("mapping", "counts"), [("0 0 4294967295", True), ("0 1000 1", False)])
def test_a_capability_counts_only_in_the_first_user_namespace(mapping: str, counts: bool) -> None:
    found = with_files({"/proc/self/status": "CapEff:\t0000000000004000", "/proc/self/uid_map": mapping})
    assert has_capability(found, Capability.IPC_LOCK) is counts
    assert not has_capability(found, Capability.SYS_PTRACE)


def test_a_kernel_option_is_on_off_or_unknown() -> None:
    files = {
        "/proc/sys/kernel/osrelease": "6.8.0",
        "/boot/config-6.8.0": "CONFIG_A=y\n# CONFIG_B is not set\nCONFIG_C=m",
    }
    found = with_files(files)
    assert [kernel_option(found, n) for n in ("A", "B", "C")] == [True, False, True]
    assert kernel_option(machine(), "A") is None


def device(path: str, numa: int | None = None) -> Pci:
    return Pci(path.rpartition("/")[2], "", "", "", f"/sys/devices/{path}", numa, "", "", None, None)


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        (device("pci0/p:1/sw:0/d:0/gpu"), device("pci0/p:1/sw:0/d:1/nic"), Distance.PIX),
        (device("pci0/p:1/a/b/c/d/gpu"), device("pci0/p:1/a/x/y/z/nic"), Distance.PXB),
        (device("pci0/p:1/gpu"), device("pci0/p:2/nic"), Distance.PHB),
        (device("pci0/p:1/gpu", 0), device("pci8/p:2/nic", 0), Distance.NODE),
        (device("pci0/p:1/gpu", 0), device("pci8/p:2/nic", 1), Distance.SYS),
        (device("pci0/p:1/gpu"), device("pci8/p:2/nic"), Distance.SYS),
    ],
)
def test_distance_is_named_by_what_lies_between(one: Pci, other: Pci, expected: Distance) -> None:
    assert distance(one, other) is expected
    assert distance(other, one) is expected
