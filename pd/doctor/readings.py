"""Reading what Linux keeps in text: sizes, lists, limits, cgroups, capabilities, kernel options. Pure but for
the seam."""

from __future__ import annotations

import enum
import re
from typing import NamedTuple

from pd.doctor.machine import Access, Machine

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30


def human(nbytes: float) -> str:
    """1536 -> "1.5 KiB"."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(nbytes) < 1024:
            return f"{nbytes:.3g} {unit}"
        nbytes /= 1024
    return f"{nbytes:.3g} TiB"


def duration(seconds: float) -> str:
    """0.00042 -> "420 µs"; 0.042 -> "42 ms"."""
    for factor, unit in ((1e6, "µs"), (1e3, "ms")):
        if abs(seconds) * factor < 1000:
            return f"{seconds * factor:.0f} {unit}"
    return f"{seconds:.3g} s"


def count(number: int, noun: str) -> str:
    """2, "core" -> "2 cores"; 2, "switch" -> "2 switches"; 2, "copy" -> "2 copies"."""
    if number == 1:
        return f"1 {noun}"
    if noun.endswith("y"):
        return f"{number} {noun[:-1]}ies"
    return f"{number} {noun}{'es' if noun.endswith(('s', 'ch')) else 's'}"


def fields(text: str | None) -> dict[str, str]:
    """`Key: value` lines, as of /proc/meminfo and /proc/self/status."""
    pairs = (line.partition(":") for line in (text or "").splitlines() if ":" in line)
    return {key.strip(): value.strip() for key, _, value in pairs}


def meminfo(machine: Machine) -> dict[str, int]:
    """Bytes; counts (HugePages_*) as they are."""
    return {
        key: int(value.split()[0]) * (KIB if value.endswith("kB") else 1)
        for key, value in fields(machine.read("/proc/meminfo")).items()
        if value and value.split()[0].isdigit()
    }


def cpus(text: str | None) -> frozenset[int]:
    """ "0-3,8" -> {0, 1, 2, 3, 8}."""
    found: set[int] = set()
    for part in (text or "").split(","):
        first, _, last = part.strip().partition("-")
        if first.isdigit():
            found.update(range(int(first), int(last or first) + 1))
    return frozenset(found)


class Limit(NamedTuple):
    soft: int | None  # None: unlimited
    hard: int | None


def limit(machine: Machine, name: str) -> Limit | None:
    """A line of /proc/self/limits: "Max locked memory", "Max open files"."""
    for line in (machine.read("/proc/self/limits") or "").splitlines():
        if line.startswith(name):
            soft, hard = line[len(name) :].split()[:2]
            return Limit(*(None if v == "unlimited" else int(v) for v in (soft, hard)))
    return None


class Capability(enum.IntEnum):
    """Bits of CapEff; include/uapi/linux/capability.h."""

    IPC_LOCK = 14
    SYS_PTRACE = 19
    SYS_ADMIN = 21
    SYS_RESOURCE = 24


def has_capability(machine: Machine, which: Capability) -> bool:
    """Effective, and in the first user namespace: elsewhere the kernel's `capable()` does not count it."""
    effective = fields(machine.read("/proc/self/status")).get("CapEff", "0")
    return bool(int(effective, 16) >> which & 1) and not in_user_namespace(machine)


def in_user_namespace(machine: Machine) -> bool:
    mapping = machine.read("/proc/self/uid_map")
    return mapping is not None and mapping.split() != ["0", "0", "4294967295"]


def container(machine: Machine) -> str | None:
    """What this process is boxed in, by the marks that each leaves. None: nothing seen."""
    if (
        machine.access("/var/run/secrets/kubernetes.io") is not Access.ABSENT
        or "KUBERNETES_SERVICE_HOST" in machine.env
    ):
        return "kubernetes"
    if machine.access("/run/.containerenv") is not Access.ABSENT:
        return "podman"
    if machine.access("/.dockerenv") is not Access.ABSENT and not _in_first_pid_namespace(machine):
        return "docker"  # the mark alone also lies in a virtual machine booted from an image
    if machine.env.get("container"):
        return machine.env["container"]
    return None


def _in_first_pid_namespace(machine: Machine) -> bool:
    """The first namespace's inode is fixed: PROC_PID_INIT_INO of include/linux/proc_ns.h."""
    return (machine.resolve("/proc/self/ns/pid") or "").endswith("pid:[4026531836]")


def kernel_version(machine: Machine) -> tuple[int, int]:
    """(6, 8) of "6.8.0-45-generic"; (0, 0) if unreadable."""
    found = re.match(r"(\d+)\.(\d+)", machine.read("/proc/sys/kernel/osrelease") or "")
    return (int(found[1]), int(found[2])) if found else (0, 0)


def kernel_option(machine: Machine, name: str) -> bool | None:
    """Whether CONFIG_<name> is y or m. None: no readable configuration of the running kernel."""
    release = machine.read("/proc/sys/kernel/osrelease") or ""
    places = (f"/boot/config-{release}", "/proc/config.gz", f"/lib/modules/{release}/build/.config")
    for text in map(machine.read, places):
        if text and "CONFIG_" in text:
            return re.search(rf"^CONFIG_{name}=[ym]$", text, re.MULTILINE) is not None
    return None


def cgroup_memory_limit(machine: Machine) -> int | None:
    """The smallest limit from here to the root, of either cgroup version. None: none."""
    found = [
        int(text)
        for path in (
            *_cgroup_files(machine, "", "memory.max"),
            *_cgroup_files(machine, "memory", "memory.limit_in_bytes"),
        )
        if (text := machine.read(path)) and text.isdigit()
    ]
    limits = [n for n in found if n < 1 << 60]  # version 1 says "none" as a huge number
    return min(limits, default=None)


def cgroup_cpus(machine: Machine) -> float | None:
    """Cores' worth of time a period, the smallest from here to the root. None: unlimited."""
    quotas: list[float] = []
    for path in _cgroup_files(machine, "", "cpu.max"):
        words = (machine.read(path) or "").split()
        if len(words) == 2 and words[0].isdigit():
            quotas.append(int(words[0]) / int(words[1]))
    for path in _cgroup_files(machine, "cpu", "cpu.cfs_quota_us"):
        quota, period = machine.read(path), machine.read(path.replace("quota", "period"))
        if quota and period and quota.isdigit():
            quotas.append(int(quota) / int(period))
    return min(quotas, default=None)


def _cgroup_files(machine: Machine, controller: str, name: str) -> list[str]:
    """`controller` "" is version 2. In a container with its own cgroup namespace the path is "/"."""
    root = f"/sys/fs/cgroup/{controller}".rstrip("/")
    own = "/"
    for line in (machine.read("/proc/self/cgroup") or "").splitlines():
        _, controllers, path = line.split(":", 2)
        if controller in controllers.split(","):
            own = path
    parts = own.strip("/").split("/") if own.strip("/") else []
    return ["/".join([root, *parts[:depth], name]) for depth in range(len(parts), -1, -1)]
