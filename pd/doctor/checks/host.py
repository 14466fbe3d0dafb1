"""The machine under everything: processors, what of them this process may use, the kernel, the clock, the box
around."""

from __future__ import annotations

from pd.doctor.answers import Clock
from pd.doctor.check import Check
from pd.doctor.machine import Machine, Silence
from pd.doctor.pci import AMD, gpus
from pd.doctor.readings import (
    Capability,
    cgroup_cpus,
    container,
    count,
    cpus,
    duration,
    fields,
    has_capability,
    in_user_namespace,
    kernel_version,
)
from pd.doctor.result import Result, fail, passed, skip, warn


def cpu(machine: Machine) -> Result:
    """The processor and the instruction sets that the CPU engine's speed hangs on.

    Reads /proc/cpuinfo. bf16 arithmetic needs avx512_bf16 or amx_bf16 to be fast; avx2 is the least that PyTorch's own
    kernels are tuned for.
    """
    text = machine.read("/proc/cpuinfo")
    if not text:
        return skip("/proc/cpuinfo is not readable")
    entry = fields(text)
    name = entry.get("model name") or entry.get("Model") or "unnamed processor"
    flags = set((entry.get("flags") or entry.get("Features") or "").split())
    wide = [f for f in ("avx2", "avx512f", "avx512_bf16", "amx_bf16", "sve", "bf16") if f in flags]
    if "flags" in entry and "avx2" not in flags:
        return warn(
            f"{name}, no avx2",
            "PyTorch falls back to its slowest kernels; serving on this CPU will crawl.",
            "a virtual machine: pass the host's CPU through (QEMU: -cpu host)",
        )
    return passed(f"{name}, {' '.join(wide) or 'no wide vectors'}")


def cores(machine: Machine) -> Result:
    """How many cores this process may really use: the machine's, its affinity's, its cgroup's.

    Reads /sys/devices/system/cpu/online, Cpus_allowed_list of /proc/self/status, cpu.max (or cpu.cfs_quota_us). A quota
    below the affinity is the classic trap: threads are started for every core seen, then throttled together.
    """
    online = cpus(machine.read("/sys/devices/system/cpu/online"))
    allowed = cpus(fields(machine.read("/proc/self/status")).get("Cpus_allowed_list"))
    usable = len(allowed & online) if online else len(allowed)
    quota = cgroup_cpus(machine)
    read = f"{usable} of {count(len(online) or usable, 'core')} usable"
    if quota is not None and quota < usable:
        return warn(
            f"{read}, but the cgroup grants {quota:.3g} cores' worth of time",
            "As many threads as cores are started and then throttled together, which shows as stalls of 10 to 100 ms.",
            f"pd launch --threads {max(1, int(quota))}, or raise the limit "
            f"(docker: --cpus {usable}; kubernetes: resources.limits.cpu: {usable})",
        )
    if usable == 1:
        return warn(
            f"{read}", "Prefill, decode and router take turns on one core.", "give it at least one core an instance"
        )
    return passed(f"{read}, no quota" if quota is None else f"{read}, quota {quota:.3g}")


def numa(machine: Machine) -> Result:
    """NUMA nodes, and whether the kernel moves pages between them behind the engine's back.

    Reads /sys/devices/system/node and /proc/sys/kernel/numa_balancing. AMD's guide for Instinct asks for balancing off:
    it unmaps pages to see who touches them, and GPUs pay for each fault.
    """
    nodes = [n for n in machine.list("/sys/devices/system/node") if n[4:].isdigit()]
    balancing = machine.read("/proc/sys/kernel/numa_balancing") or "0"
    listed = [f"{n}: cores {machine.read(f'/sys/devices/system/node/{n}/cpulist')}" for n in nodes]
    read = count(max(len(nodes), 1), "node")
    if balancing != "0" and len(nodes) > 1 and gpus(machine, AMD):
        return warn(
            f"{read}, automatic NUMA balancing is on",
            "Balancing stalls GPU work at random; AMD asks for it off on Instinct machines.",
            "sudo sysctl kernel.numa_balancing=0",
            *listed,
        )
    return passed(read, *listed)


def box(machine: Machine) -> Result:
    """The container around this process and what it takes away.

    Reads marks of docker, podman and kubernetes, CapEff and Seccomp of /proc/self/status, /proc/self/uid_map.
    Each thing that a container commonly hides (devices, locked memory, shared memory) has its own check; this
    one names the box.
    """
    status = fields(machine.read("/proc/self/status"))
    held = [c.name for c in Capability if has_capability(machine, c)]
    kind = container(machine)
    details = (
        f"capabilities that matter: {' '.join(held) or 'none'}",
        f"seccomp: {'filtered' if status.get('Seccomp') == '2' else 'off'}",
    )
    if in_user_namespace(machine):
        return warn(
            f"{kind or 'a user namespace'}, user ids are mapped",
            "CAP_IPC_LOCK does not count here, so locked memory is bound by the memlock limit "
            "whatever the capabilities say.",
            "docker: run without userns-remap; podman: run as root; or raise the memlock limit of the host's user",
            *details,
        )
    return passed(f"in a container ({kind})" if kind else "no container", *details)


def kernel(machine: Machine) -> Result:
    """The kernel's version.

    Reads /proc/sys/kernel/osrelease. Below 5.12 there is no dma-buf for RDMA (GPUs then need a peer-memory module);
    below 4.18 much of what UCX and rdma-core expect is missing.
    """
    release = machine.read("/proc/sys/kernel/osrelease")
    if not release:
        return skip("/proc/sys/kernel/osrelease is not readable")
    if kernel_version(machine) < (4, 18):
        return fail(
            f"Linux {release}",
            "UCX and rdma-core expect kernel 4.18 or newer (RHEL 8).",
            "boot a newer kernel",
        )
    return passed(f"Linux {release}")


def clock(machine: Machine) -> Result:
    """Whether the clock is disciplined.

    Asks adjtimex(2), which needs no right to read. pd never compares clocks of two hosts, so nothing breaks; but
    logs and traces of two hosts cannot be laid side by side.
    """
    answer = machine.ask(Clock)
    if isinstance(answer, Silence):
        return skip(f"adjtimex: {answer.reason}")
    if not answer.synchronized:
        return warn(
            "the kernel says: not synchronized",
            "Serving works, but log lines and traces of two hosts cannot be laid side by side.",
            "run chrony or systemd-timesyncd on the host (a container or guest shares what its host sets)",
        )
    return passed(f"synchronized, error at most {duration(answer.max_error_s)}")


CHECKS = (
    Check("machine.cpu", "Processor", cpu),
    Check("machine.cores", "Cores usable", cores),
    Check("machine.numa", "NUMA", numa),
    Check("machine.container", "Container", box),
    Check("machine.kernel", "Kernel", kernel),
    Check("machine.clock", "Clock", clock),
)
