"""Environment variables that contradict each other or the machine, and what this host calls itself."""

from __future__ import annotations

import ipaddress
from collections.abc import Callable
from typing import NamedTuple

from pd.doctor.answers import Hosts
from pd.doctor.check import Check
from pd.doctor.machine import Machine, Silence
from pd.doctor.pci import AMD, NVIDIA, gpus
from pd.doctor.rdma import has_rdma
from pd.doctor.readings import count
from pd.doctor.result import Result, Status, fail, passed, skip, warn

ACTIVE_MESSAGES = frozenset(
    [
        "all",
        "ib",
        "tcp",
        "rc",
        "rc_v",
        "rc_x",
        "rc_verbs",
        "rc_mlx5",
        "dc",
        "dc_x",
        "dc_mlx5",
        "ud",
        "ud_v",
        "ud_x",
        "ud_verbs",
        "ud_mlx5",
        "srd",
    ]
)
"""UCX transports that carry active messages and notice a dead peer; with `sm`, `self`, `cma` alone nixl's agent
fails."""
PROXIES = ("http_proxy", "https_proxy", "all_proxy")
MATTER = (
    "UCX_",
    "NCCL_",
    "RCCL_",
    "MC_",
    "MOONCAKE_",
    "NIXL_",
    "CUDA_",
    "HIP_",
    "ROCR_",
    "HSA_",
    "GLOO_",
    "OMP_",
    "WITH_NV",
)


class Fault(NamedTuple):
    status: Status
    said: str
    means: str
    fix: str


def variables(machine: Machine) -> Result:
    """Variables of UCX, NCCL, Mooncake, CUDA and HIP that contradict each other or name what is not there.

    UCX_TLS without a transport for active messages ("Destination is unreachable"), or without cuda_copy on a GPU
    machine ("invalid permissions for mapped object"); devices that do not exist; GID indices that differ;
    switches that turn the fast path off.
    """
    matter = sorted(k for k in machine.env if k.startswith(MATTER))
    faults = [fault for rule in _RULES for fault in rule(machine)]
    listed = tuple(f"{k}={machine.env[k]}" for k in matter)
    if not faults:
        return passed(f"{count(len(matter), 'variable')} set, none contradicts" if matter else "none set", *listed)
    worst = fail if any(f.status is Status.FAIL for f in faults) else warn
    return worst(
        "; ".join(f.said for f in faults),
        " ".join(f.means for f in faults),
        "\n".join(f.fix for f in faults),
        *listed,
    )


def _transports(machine: Machine) -> list[Fault]:
    value = machine.env.get("UCX_TLS", "")
    names = {n.strip() for n in value.split(",") if n.strip()}
    if not names or value.startswith("^"):
        return []
    found = []
    if not names & ACTIVE_MESSAGES:
        means = "UCX has no transport for active messages left: the agent fails, 'Destination is unreachable'."
        found.append(Fault(Status.FAIL, f"UCX_TLS={value}", means, "unset UCX_TLS, or add tcp (or rc) to it"))
    for vendor, kind in ((NVIDIA, "cuda"), (AMD, "rocm")):
        known = any(n == "all" or n.startswith(kind) for n in names)
        if gpus(machine, vendor) and not known:
            means = f"Without {kind} UCX takes GPU memory for host memory: 'invalid permissions for mapped object'."
            found.append(Fault(Status.FAIL, f"UCX_TLS={value} lacks {kind}", means, f"export UCX_TLS={value},{kind}"))
    return found


def _devices(machine: Machine) -> list[Fault]:
    known = {*machine.list("/sys/class/infiniband"), *machine.list("/sys/class/net"), "all"}
    found = []
    for name in ("UCX_NET_DEVICES", "NCCL_IB_HCA", "NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
        value = machine.env.get(name, "")
        if value.startswith("^"):
            continue
        named = [d.strip().lstrip("=").partition(":")[0] for d in value.split(",") if d.strip()]
        exact = name in ("UCX_NET_DEVICES", "GLOO_SOCKET_IFNAME")  # NCCL's are prefixes
        absent = [d for d in named if d not in known and (exact or not any(k.startswith(d) for k in known))]
        if absent:
            means = f"{', '.join(absent)} is not on this machine."
            found.append(
                Fault(
                    Status.FAIL, f"{name}={value}", means, f"unset {name}, or name one of /sys/class/net or infiniband"
                )
            )
    return found


def _indices(machine: Machine) -> list[Fault]:
    names = ("MC_GID_INDEX", "UCX_IB_GID_INDEX", "NCCL_IB_GID_INDEX")
    given = {n: v for n in names if (v := machine.env.get(n, "")).isdigit()}
    if len(set(given.values())) < 2:
        return []
    said = ", ".join(f"{n}={v}" for n, v in given.items())
    means = "The libraries would use different addresses of one port."
    return [Fault(Status.WARN, said, means, "set all to the index that rdma.gid names, or unset all")]


def _switches(machine: Machine) -> list[Fault]:
    env, found = machine.env, []
    many = len(gpus(machine, NVIDIA)) + len(gpus(machine, AMD))
    slow = (
        ("NCCL_IB_DISABLE", has_rdma(machine), "NCCL leaves the RDMA adapters alone and uses TCP."),
        ("NCCL_P2P_DISABLE", many > 1, "NCCL copies between GPUs through the host."),
        ("CUDA_LAUNCH_BLOCKING", many > 0, "Each kernel is waited for: several times slower."),
    )
    for name, matters, means in slow:
        if matters and env.get(name, "0") not in ("", "0"):
            found.append(Fault(Status.WARN, f"{name}={env[name]}", means, f"unset {name}"))
    if many and env.get("CUDA_VISIBLE_DEVICES", "0").strip() in ("", "-1"):
        means = "Every GPU is hidden from this process."
        found.append(Fault(Status.WARN, "CUDA_VISIBLE_DEVICES hides all", means, "unset CUDA_VISIBLE_DEVICES"))
    if gpus(machine, AMD) and env.get("HSA_OVERRIDE_GFX_VERSION"):
        said = f"HSA_OVERRIDE_GFX_VERSION={env['HSA_OVERRIDE_GFX_VERSION']}"
        means = "Kernels of another chip are run: wrong results or crashes."
        found.append(Fault(Status.WARN, said, means, "unset HSA_OVERRIDE_GFX_VERSION"))
    return found


_RULES: tuple[Callable[[Machine], list[Fault]], ...] = (_transports, _devices, _indices, _switches)


def proxies(machine: Machine) -> Result:
    """HTTP proxies that would catch requests between hosts of the cluster, or to this one.

    Reads http_proxy, https_proxy, all_proxy, no_proxy in both spellings. Health checks then hang or answer 403, 503.
    """
    env = machine.env
    given = [n for n in (*PROXIES, *(p.upper() for p in PROXIES)) if env.get(n)]
    if not given:
        return passed("none set")
    spared = {part.strip() for part in f"{env.get('no_proxy', '')},{env.get('NO_PROXY', '')}".split(",")}
    if "*" in spared or {"localhost", "127.0.0.1"} <= spared:
        return passed(f"{', '.join(given)}; no_proxy spares this host")
    return warn(
        f"{', '.join(given)}, and no_proxy does not spare localhost and 127.0.0.1",
        "Clients such as curl and openai send requests for this host to the proxy: 403, 503 or a hang.",
        "export no_proxy=localhost,127.0.0.1,<the hosts of the cluster>",
    )


def hostname(machine: Machine) -> Result:
    """What this host's name resolves to.

    Asks the resolver. A name that resolves to 127.0.0.1 (Debian's /etc/hosts) or to docker0 is what libraries
    advertise to other hosts, which then connect to themselves. It does not matter on one host.
    """
    answer = machine.ask(Hosts)
    if isinstance(answer, Silence):
        return skip(f"not asked: {answer.reason}")
    if answer.error:
        return warn(
            f"{answer.name} does not resolve: {answer.error}",
            "Libraries that look their own host up fail to start or pick any interface.",
            f"add a line to /etc/hosts: <this host's address> {answer.name}",
        )
    inside = [a for a in answer.addresses if ipaddress.ip_address(a.partition("%")[0]).is_loopback]
    docker = [a for a in answer.addresses if a.startswith("172.17.")]
    read = f"{answer.name} is {', '.join(answer.addresses)}"
    if inside == list(answer.addresses) or docker:
        kind = "docker's own bridge" if docker else "loopback"
        return warn(
            read,
            f"Other hosts that are told this address ({kind}) reach themselves. On one host it does not matter.",
            "pd launch --host <address that peers reach>, or put that address beside the name in /etc/hosts",
        )
    return passed(read)


CHECKS = (
    Check("software.env", "Environment", variables),
    Check("network.hostname", "Host name", hostname),
    Check("network.proxies", "Proxies", proxies),
)
