"""Between RDMA adapter and the rest: namespaces, resources, registration limits, PCI Express, IOMMU, EFA."""

from __future__ import annotations

import re

from pd.doctor.answers import Nixl
from pd.doctor.check import Check
from pd.doctor.machine import Machine
from pd.doctor.pci import AMD, NVIDIA, Pci, gpus
from pd.doctor.rdma import devinfo, has_rdma, lspci, number, rdma_devices
from pd.doctor.readings import container, count, fields, human, kernel_version, meminfo
from pd.doctor.result import Result, fail, passed, skip, warn

NONE = "no RDMA device here"
ANY_SIZE = 1 << 60
"""Adapters say "no limit" as a number of this order or larger."""


def netns(machine: Machine) -> Result:
    """Whether RDMA devices are shared by all network namespaces.

    Reads `rdma system show`. In exclusive mode a container sees only the devices moved into its namespace.
    """
    output = machine.run("rdma", "system", "show")
    if not has_rdma(machine):
        return skip(NONE)
    if output is None or output.code:
        return skip("no `rdma` command (iproute2)")
    mode = "exclusive" if "exclusive" in output.text else "shared"
    if mode == "exclusive" and container(machine):
        return warn(
            "exclusive, and this is a container",
            "Only devices moved into this namespace are usable; others are seen and fail to open.",
            "on the host: sudo rdma system set netns shared (with no namespace in use), or --network=host",
        )
    return passed(mode)


def resources(machine: Machine) -> Result:
    """Queue pairs and memory regions in use, against what the adapter has.

    Reads `rdma resource show` and max_qp, max_mr of `ibv_devinfo -v`. Running out shows as "Failed to create QP: Cannot
    allocate memory" or "Failed to register memory …: Resource temporarily unavailable [11]", with "CREATE_MKEY … no
    resources(0xf)" in dmesg.
    """
    if not has_rdma(machine):
        return skip(NONE)
    output, limits = machine.run("rdma", "resource", "show"), devinfo(machine)
    if output is None or output.code or not limits:
        return skip("needs the commands `rdma` (iproute2) and `ibv_devinfo` (ibverbs-utils)")
    lines, full = [], []
    for line in output.text.splitlines():
        found = re.match(r"\d+: (\S+?):? .*?qp (\d+).*? mr (\d+)", line)
        if not found or found[1] not in limits:
            continue
        for what, used in (("qp", int(found[2])), ("mr", int(found[3]))):
            most = number(limits[found[1]], f"max_{what}")
            lines.append(f"{found[1]}: {used} of {most} {what}")
            if most and used > most * 0.8:
                full.append(lines[-1])
    if full:
        return warn(
            "; ".join(full),
            "New connections or registrations will soon fail ('Resource temporarily unavailable [11]').",
            "rdma resource show qp (and mr) names the processes that hold them; end those that were left behind",
            *lines,
        )
    return passed(f"below 80 % on {count(len(lines) // 2, 'device')}", *lines)


def max_mr(machine: Machine) -> Result:
    """The largest region an adapter registers.

    Reads max_mr_size of `ibv_devinfo -v`. A pool above it fails with "Failed to register memory …: Input/output
    error [5]" and "Out of mr size" in dmesg.
    """
    if not has_rdma(machine):
        return skip(NONE)
    sizes = {d: s for d, v in devinfo(machine).items() if (s := number(v, "max_mr_size"))}
    if not sizes:
        return skip("needs the command `ibv_devinfo` (ibverbs-utils)")
    device, least = min(sizes.items(), key=lambda pair: pair[1])
    if least >= ANY_SIZE:
        return passed("no limit")
    memory = meminfo(machine).get("MemTotal", 0)
    if least < memory:
        return warn(
            f"{device}: {human(least)}",
            "A pool larger than that fails to register: 'Input/output error [5]'.",
            f"pd launch --kv-memory {human(least * 0.9).replace(' ', '')} at most",
        )
    return passed(f"{human(least)} or more")


def pcie(machine: Machine) -> Result:
    """Whether adapters and GPUs run at the PCI Express speed and width they could.

    Reads current_link_speed, current_link_width and their maxima. A card in a narrow slot, or a link trained
    down, halves bandwidth silently. GPUs lower their speed when idle, so only their width counts.
    """
    nics = [d.pci for d in rdma_devices(machine) if d.pci]
    cards = [*gpus(machine, NVIDIA), *gpus(machine, AMD)]
    if not nics and not cards:
        return skip(NONE)
    slow = [d for d in nics if d.is_degraded] + [c for c in cards if (c.width or 0) < (c.width_max or 0)]
    details = tuple(f"{d.address}: {_link(d)}" for d in (*nics, *cards))
    if slow:
        return warn(
            "; ".join(f"{d.address} {_link(d)}" for d in slow),
            "The link runs below what the card can do; so will every transfer through it.",
            "reseat the card, or move it to a slot of full width; check the BIOS's slot settings; then "
            f"sudo lspci -vvs {slow[0].address} | grep LnkSta",
            *details,
        )
    return passed(f"{count(len(nics) + len(cards), 'card')} at full width", *details)


def _link(device: Pci) -> str:
    now, most = (speed.removesuffix(" PCIe") for speed in (device.speed, device.speed_max))
    return f"{now} x{device.width} of {most} x{device.width_max}"


def acs(machine: Machine) -> Result:
    """PCI Access Control Services on bridges.

    Reads ACSCtl of `lspci -vvv`, which only root sees in full. On bare metal `SrcValid+` on a bridge sends
    traffic between GPU and NIC up to the CPU and back: slow, or broken. A virtual machine needs it on.
    """
    if not has_rdma(machine) and not gpus(machine, NVIDIA) and not gpus(machine, AMD):
        return skip(NONE)
    if "hypervisor" in fields(machine.read("/proc/cpuinfo")).get("flags", "").split():
        return skip("a virtual machine: the host's bridges are not seen from here")
    blocks = lspci(machine)
    bridges = {a: b for a, b in blocks.items() if "PCI bridge" in b.partition("\n")[0]}
    controls = {a: found[1] for a, b in bridges.items() if (found := re.search(r"ACSCtl:\s*(.*)", b))}
    if not controls:
        hint = "only root sees bridges' capabilities" if "access denied" in "".join(blocks.values()) else "no ACS shown"
        return skip(f"{hint}; look with: sudo lspci -vvv | grep ACSCtl") if blocks else skip("no `lspci` command")
    on = [a for a, text in controls.items() if "SrcValid+" in text]
    if on:
        return warn(
            f"on at {len(on)} of {count(len(controls), 'bridge')}",
            "Traffic between GPU and NIC goes up to the CPU and back: half the speed, or none.",
            "turn ACS off in the BIOS, or at each boot:\n"
            "for b in $(lspci -D | awk '/PCI bridge/{print $1}'); do sudo setpci -s $b ECAP_ACS+6.w=0000; done",
            *(f"{a}: {controls[a]}" for a in on[:8]),
        )
    return passed(f"off at all {count(len(controls), 'bridge')}")


def iommu(machine: Machine) -> Result:
    """Whether an IOMMU translates what GPUs and adapters send.

    Reads iommu_group/type of each card and /proc/cmdline. "identity" (iommu=pt) or none is what GPUDirect wants;
    translation costs speed, and hangs peer-to-peer copies on some machines.
    """
    cards = [*gpus(machine, NVIDIA), *gpus(machine, AMD), *(d.pci for d in rdma_devices(machine) if d.pci)]
    if not cards:
        return skip(NONE)
    kinds = {c.address: machine.read(f"/sys/bus/pci/devices/{c.address}/iommu_group/type") for c in cards}
    translated = [a for a, kind in kinds.items() if kind and kind != "identity"]
    set_by = [w for w in (machine.read("/proc/cmdline") or "").split() if "iommu" in w]
    read = f"kernel says {' '.join(set_by) or 'nothing of iommu'}"
    if translated:
        return warn(
            f"translated at {len(translated)} of {count(len(cards), 'card')}, {read}",
            "Peer-to-peer copies between GPU and NIC go through the IOMMU: slow, or they hang.",
            "add iommu=pt (and intel_iommu=on or amd_iommu=on) to the kernel's command line and reboot",
        )
    known = any(kinds.values())
    return passed(f"{'passed through' if known else 'none'}, {read}")


def ordering(machine: Machine) -> Result:
    """Relaxed ordering of adapters' PCI writes.

    Reads DevCtl of `lspci -vvv` (root). Without it 200 and 400 Gbit/s adapters fall far below their rate on CPUs
    with many dies; UCX asks for it where allowed (UCX_IB_PCI_RELAXED_ORDERING=try).
    """
    found = [d for d in rdma_devices(machine) if d.pci and not d.is_efa]
    if not found:
        return skip(NONE)
    blocks = lspci(machine)
    flags = {
        d.name: "RlxdOrd+" in blocks[d.pci.address]
        for d in found
        if d.pci and "RlxdOrd" in blocks.get(d.pci.address, "")
    }
    if not flags:
        return skip("only root sees it: sudo lspci -vvv | grep RlxdOrd")
    off = [name for name, on in flags.items() if not on]
    if off:
        return warn(
            f"off at {', '.join(off)}",
            "Fast adapters fall below their rate, on AMD EPYC most of all.",
            "enable 'PCI relaxed ordering' in the BIOS; leave UCX_IB_PCI_RELAXED_ORDERING unset",
        )
    return passed(f"allowed at all {len(flags)}")


def efa(machine: Machine) -> Result:
    """Amazon's adapter: which library can use it.

    Reads drivers of RDMA devices, `fi_info -p efa`, the kernel's version, nixl's plugins. UCX has no GPUDirect
    on EFA with kernel 6.8 and newer, so nixl needs its LIBFABRIC plugin; "fi_read still retrying EAGAIN on rail
    0" is what two processes of one node see.
    """
    found = [d for d in rdma_devices(machine) if d.is_efa]
    if not found:
        return skip("no EFA device here" if has_rdma(machine) else NONE)
    output = machine.run("fi_info", "-p", "efa")
    read = count(len(found), "EFA device")
    if output is None or output.code or "provider: efa" not in output.text:
        return fail(
            f"{read}, fi_info shows no efa provider",
            "libfabric is missing or has no EFA provider, so nothing can use the adapter.",
            "run Amazon's EFA installer (in the container too), then: fi_info -p efa",
        )
    answer = machine.ask(Nixl)
    if isinstance(answer, Nixl) and "LIBFABRIC" in answer.plugins:
        return passed(f"{read}, libfabric has it, nixl has LIBFABRIC")
    if kernel_version(machine) >= (6, 8):
        return warn(
            f"{read}, libfabric has it, nixl lacks LIBFABRIC",
            "nixl would use UCX, which has no GPUDirect on EFA with kernel 6.8 and newer: it copies through the host.",
            "pip install a nixl that has the LIBFABRIC plugin, and use that backend",
        )
    return passed(f"{read}, libfabric has it")


CHECKS = (
    Check("rdma.netns", "RDMA namespaces", netns),
    Check("rdma.resources", "Queue pairs and regions", resources),
    Check("rdma.max_mr", "Largest region", max_mr),
    Check("rdma.pcie", "PCI Express links", pcie),
    Check("rdma.acs", "PCI access control", acs),
    Check("rdma.iommu", "IOMMU", iommu),
    Check("rdma.ordering", "Relaxed ordering", ordering),
    Check("rdma.efa", "EFA", efa),
)
