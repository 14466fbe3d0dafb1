"""Memory and the limits on it: what a KV pool, shared memory and registered memory meet first."""

from __future__ import annotations

from pd.doctor.answers import Cma
from pd.doctor.check import Check
from pd.doctor.machine import Machine, Silence
from pd.doctor.pci import AMD, NVIDIA, gpus
from pd.doctor.rdma import has_rdma
from pd.doctor.readings import (
    GIB,
    MIB,
    Capability,
    cgroup_memory_limit,
    container,
    count,
    has_capability,
    human,
    limit,
    meminfo,
)
from pd.doctor.result import Result, fail, passed, skip, warn

DOCKER_SHM = 64 * MIB
"""Docker's default --shm-size."""
POOL = 2 * GIB
"""A CPU rank's default KV pool (KVConfig.kv_memory)."""
DEFAULT_MAPS = 65530
"""vm.max_map_count of the kernel: too low for large registered pools; Mooncake's guide asks for 16777216."""
MAPS = 16777216
FILES = 4096
"""A router holds a socket a client and a worker some dozens; 1024, the usual soft limit, is reached at 1000 clients."""


def memory(machine: Machine) -> Result:
    """Memory free for weights and KV, the cgroup's limit counted.

    Reads /proc/meminfo and memory.max (or memory.limit_in_bytes). A cgroup limit does not show in `free`;
    crossing it ends the process with SIGKILL and no message.
    """
    info = meminfo(machine)
    if "MemAvailable" not in info:
        return skip("/proc/meminfo is not readable")
    available, whole = info["MemAvailable"], info["MemTotal"]
    bound = cgroup_memory_limit(machine)
    read = f"{human(available)} available of {human(whole)}"
    if bound is not None and bound < whole:
        read += f", the cgroup's limit is {human(bound)}"
        available = min(available, bound)
    if available < GIB:
        return fail(
            read,
            "Less than 1 GiB is left: even the default model and its pool (about 2.5 GiB) do not fit.",
            "end what uses it, or raise the limit (docker: --memory; kubernetes: resources.limits.memory)",
        )
    if available < 4 * GIB:
        return warn(
            read,
            f"The default KV pool takes {human(POOL)} a CPU rank, so two ranks will not fit.",
            "pd launch --kv-memory 512MiB, or raise the limit",
        )
    return passed(read)


def pages(machine: Machine) -> Result:
    """Huge pages: transparent ones for pools, reserved ones for those who ask.

    Reads /sys/kernel/mm/transparent_hugepage/enabled and HugePages_* of /proc/meminfo. Copies between processes
    pin page by page: with 4 KiB pages UCX's path on one host reaches 0.35 of memcpy, with huge ones 0.84. In
    containers UCX may fail on reserved ones with "ibv_reg_mr failed: Bad address" (then put `huge` last in
    UCX_*_ALLOC).
    """
    text = machine.read("/sys/kernel/mm/transparent_hugepage/enabled")
    if text is None:
        return skip("this kernel has no transparent huge pages")
    mode = text.partition("[")[2].partition("]")[0]
    info = meminfo(machine)
    reserved = f"{info.get('HugePages_Free', 0)} of {info.get('HugePages_Total', 0)} reserved ones free"
    if mode == "never":
        return warn(
            f"transparent huge pages: never; {reserved}",
            "Copies between processes of this host run at a third of the speed they could.",
            "echo madvise | sudo tee /sys/kernel/mm/transparent_hugepage/enabled",
        )
    return passed(f"transparent: {mode}; {reserved}")


def shm(machine: Machine) -> Result:
    """The size of /dev/shm, where NCCL and UCX keep buffers between processes.

    Asks statvfs. Docker gives 64 MiB unless told. NCCL then says "unable to allocate shared memory" or "No space left
    on device"; a buffer that outgrows it while in use dies of SIGBUS. pd's own pools are not kept there.
    """
    space = machine.space("/dev/shm")
    size, free = space or (0, 0)
    read = "/dev/shm is not there" if space is None else f"{human(free)} free of {human(size)}"
    has_gpu = bool(gpus(machine, NVIDIA) or gpus(machine, AMD))
    if free >= (GIB if has_gpu else DOCKER_SHM):
        return passed(read)
    judge = fail if has_gpu and size <= DOCKER_SHM else warn
    return judge(
        read,
        "NCCL's buffers between GPUs of one host do not fit: 'No space left on device'."
        if has_gpu
        else "UCX's buffers between processes of one host may not fit.",
        "docker: --ipc=host or --shm-size=16g\nkubernetes: an emptyDir of medium Memory at /dev/shm"
        "\nelse: sudo mount -o remount,size=16g /dev/shm",
    )


def memlock(machine: Machine) -> Result:
    """How much memory may be locked, which RDMA needs for every byte that it registers.

    Reads "Max locked memory" of /proc/self/limits and bit 14 (IPC_LOCK) of CapEff. Too little shows as UCX's
    "ibv_reg_mr(address=…, length=…) failed: Cannot allocate memory".
    """
    bound = limit(machine, "Max locked memory")
    if bound is None:
        return skip("/proc/self/limits is not readable")
    read = "unlimited" if bound.soft is None else human(bound.soft)
    if bound.soft is None or bound.soft >= 64 * GIB:
        return passed(read)
    if has_capability(machine, Capability.IPC_LOCK):
        return passed(f"{read}, and CAP_IPC_LOCK lifts the limit")
    if not has_rdma(machine):
        return passed(f"{read}; enough without an RDMA device")
    fix = (
        "docker: --ulimit memlock=-1 --cap-add IPC_LOCK\nkubernetes: securityContext.capabilities.add: [IPC_LOCK]"
        if container(machine)
        else "/etc/security/limits.conf: '* soft memlock unlimited' and '* hard memlock unlimited'; log in again"
        "\na systemd service: LimitMEMLOCK=infinity"
    )
    return fail(
        f"{read} and no CAP_IPC_LOCK",
        "RDMA locks every byte it registers: a KV pool above the limit fails with 'Cannot allocate memory'.",
        fix,
    )


def nofile(machine: Machine) -> Result:
    """How many files, sockets among them, this process may open.

    Reads "Max open files" of /proc/self/limits. Too few shows as "socket create failed: the maximal number of files" or
    "Too many open files" once about as many clients are connected.
    """
    bound = limit(machine, "Max open files")
    if bound is None:
        return skip("/proc/self/limits is not readable")
    if bound.soft is not None and bound.soft < FILES:
        hard = "unlimited" if bound.hard is None else str(bound.hard)
        return warn(
            f"{bound.soft} (hard limit {hard})",
            "A router at a thousand clients runs out of sockets.",
            f"ulimit -n {hard if hard.isdigit() else 65536}; docker: --ulimit nofile=65536; systemd: LimitNOFILE=65536",
        )
    return passed("unlimited" if bound.soft is None else str(bound.soft))


def maps(machine: Machine) -> Result:
    """How many memory mappings a process may have.

    Reads /proc/sys/vm/max_map_count. The kernel's 65530 is too low for large registered pools; registration then fails
    with "Cannot allocate memory" though memory is free.
    """
    text = machine.read("/proc/sys/vm/max_map_count")
    if text is None:
        return skip("/proc/sys/vm/max_map_count is not readable")
    if int(text) <= DEFAULT_MAPS and has_rdma(machine):
        return warn(
            f"{text}, the kernel's default",
            "Large registered pools can meet it, and then fail with 'Cannot allocate memory' though memory is free.",
            f"sudo sysctl vm.max_map_count={MAPS}",
        )
    return passed(text if has_rdma(machine) else f"{text}; enough without an RDMA device")


def cma(machine: Machine) -> Result:
    """Whether a process may read another's memory: UCX's one-copy path on one host.

    Tries process_vm_readv(2) on a child of its own. Yama's ptrace_scope, seccomp filters and user namespaces forbid it;
    UCX then copies twice, or fails with "process_vm_readv: Operation not permitted".
    """
    scope = machine.read("/proc/sys/kernel/yama/ptrace_scope")
    yama = "no Yama" if scope is None else f"ptrace_scope {scope}"
    answer = machine.ask(Cma)
    if isinstance(answer, Silence):
        return skip(f"not tried: {answer.reason}")
    if answer.works and scope in (None, "0"):
        return passed(f"process_vm_readv works, {yama}")
    if answer.works:
        return warn(
            f"process_vm_readv of a child works, {yama}",
            "Between processes that are not parent and child it is refused, so nixl on one host copies twice.",
            "sudo sysctl kernel.yama.ptrace_scope=0; or use --transfer shm, which does not need it",
        )
    return warn(
        f"process_vm_readv: {answer.error}, {yama}",
        "nixl on one host copies twice, or fails.",
        "docker: --cap-add SYS_PTRACE; or use --transfer shm, which does not need it",
    )


def ports(machine: Machine) -> Result:
    """Ports for outgoing connections, and how many wait to be free again.

    Reads net.ipv4.ip_local_port_range and tw of /proc/net/sockstat. Running out shows as "connect: Cannot assign
    requested address"; with Mooncake's TCP transport MC_TCP_ENABLE_CONNECTION_POOL=1 keeps connections.
    """
    text = machine.read("/proc/sys/net/ipv4/ip_local_port_range")
    if text is None:
        return skip("ip_local_port_range is not readable")
    first, last = map(int, text.split())
    words = (machine.read("/proc/net/sockstat") or "").split()
    waiting = int(words[words.index("tw") + 1]) if "tw" in words else 0
    read = f"{first} to {last}, {count(waiting, 'connection')} in TIME_WAIT"
    if waiting > (last - first + 1) // 2 or last - first < 10_000:
        return warn(
            read,
            "Outgoing connections will soon fail with 'Cannot assign requested address'.",
            "sudo sysctl net.ipv4.ip_local_port_range='10240 65535'; find what opens a connection a request",
        )
    return passed(read)


CHECKS = (
    Check("machine.memory", "Memory", memory),
    Check("machine.hugepages", "Huge pages", pages),
    Check("machine.shm", "Shared memory", shm),
    Check("machine.memlock", "Locked memory", memlock),
    Check("machine.nofile", "Open files", nofile),
    Check("machine.maps", "Memory mappings", maps),
    Check("machine.cma", "Reading a peer's memory", cma),
    Check("machine.ports", "Outgoing ports", ports),
)
