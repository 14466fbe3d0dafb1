"""Libraries: there, of versions that fit each other, and one of each."""

from __future__ import annotations

import re

from pd.doctor.answers import Mooncake, Nixl, Packages, Torch
from pd.doctor.check import Check
from pd.doctor.machine import Machine, Silence, Why
from pd.doctor.pci import AMD, NVIDIA, gpus
from pd.doctor.rdma import has_rdma
from pd.doctor.readings import count
from pd.doctor.result import Result, fail, passed, skip, warn

TRANSFORMERS = (5, 12, 1)
"""Older ones break when a folder named kernels/ is on the import path."""
UCX_FOLDERS = (
    "/usr/lib/x86_64-linux-gnu",
    "/usr/lib/aarch64-linux-gnu",
    "/usr/lib64",
    "/usr/local/ucx/lib",
    "/opt/ucx/lib",
    "/opt/hpcx/ucx/lib",
)


def torch(machine: Machine) -> Result:
    """torch imports, and its build fits what is in the machine.

    Asks torch. Whether its CUDA or HIP fits the driver is nvidia.torch's and amd.torch's to say.
    """
    answer = machine.ask(Torch)
    if isinstance(answer, Silence):
        return fail(f"torch: {answer.reason}", "Without torch nothing runs.", "make install")
    build = f"CUDA {answer.cuda}" if answer.cuda else f"HIP {answer.hip}" if answer.hip else "CPU build"
    return passed(f"{answer.version}, {build}")


def triton(machine: Machine) -> Result:
    """triton of the very version that torch was built with.

    Compares the installed version with torch's own requirement; another one compiles wrong or not at all. Only
    GPU kernels need it.
    """
    packages, answer = machine.ask(Packages), machine.ask(Torch)
    if isinstance(packages, Silence):
        return skip(f"installed packages unknown: {packages.reason}")
    name = next((n for n in ("triton", "pytorch-triton-rocm", "triton-rocm") if n in packages.versions), None)
    if name is None:
        if gpus(machine, NVIDIA) or gpus(machine, AMD):
            return fail("not installed", "The GPU kernels need it.", "pip install triton (the version torch asks for)")
        return skip("not installed; only GPU kernels need it")
    version = packages.versions[name]
    wanted = answer.wants_triton if isinstance(answer, Torch) else None
    if wanted and wanted.split("+")[0] != version.split("+")[0]:
        return warn(
            f"{name} {version}, torch asks for {wanted}",
            "Kernels compiled by another triton than torch's own are untested, and have been wrong.",
            f"pip install {name}=={wanted}",
        )
    return passed(f"{name} {version}" + (", as torch asks" if wanted else ""))


def transformers(machine: Machine) -> Result:
    """transformers, for configurations, tokenizers and chat templates.

    Reads the installed version; below 5.12.1 it breaks beside a folder named kernels/.
    """
    packages = machine.ask(Packages)
    if isinstance(packages, Silence):
        return skip(f"installed packages unknown: {packages.reason}")
    version = packages.versions.get("transformers")
    if version is None:
        return fail("not installed", "Models cannot be loaded.", "make install")
    if tuple(map(int, re.findall(r"\d+", version)[:3])) < TRANSFORMERS:
        return fail(
            version, "Versions below 5.12.1 break beside a kernels/ folder.", "pip install 'transformers>=5.12.1'"
        )
    return passed(version)


def nixl(machine: Machine) -> Result:
    """nixl imports, its UCX comes up, and its wheel is of torch's CUDA.

    Asks nixl in a process of its own. A wheel of another CUDA says "libcudart.so.<major>: cannot open shared
    object file"; vLLM only says "NIXL is not available".
    """
    answer = machine.ask(Nixl)
    if isinstance(answer, Silence):
        if answer.why is Why.MISSING:
            return skip("not installed; needed only for --transfer nixl (pip install nixl)")
        return fail(
            f"{answer.why.value}: {answer.reason}",
            "It is installed but does not import.",
            "libcudart missing: install the wheel of your CUDA (nixl-cu12 or nixl-cu13)",
        )
    torch_answer = machine.ask(Torch)
    cuda = torch_answer.cuda if isinstance(torch_answer, Torch) else None
    if cuda and answer.cuda and cuda.split(".")[0] != answer.cuda:
        return warn(
            f"{answer.version} for CUDA {answer.cuda}, torch is for CUDA {cuda}",
            "Two CUDA runtimes in one process: GPU memory of one is unknown to the other.",
            f"pip install nixl-cu{cuda.split('.')[0]} and uninstall nixl-cu{answer.cuda}",
        )
    if answer.backend_error:
        return fail(
            f"{answer.version}; UCX: {answer.backend_error}",
            "The agent does not come up.",
            "unset UCX_TLS and UCX_NET_DEVICES and try again; see software.env and rdma.devices",
        )
    return passed(
        f"{answer.version}, UCX moves {' '.join(answer.memory_types)}", f"plugins: {' '.join(answer.plugins)}"
    )


def mooncake(machine: Machine) -> Result:
    """Mooncake's transfer engine imports and makes an engine.

    Asks it in a process of its own. Its ordinary wheel needs libcudart; mooncake-transfer-engine-non-cuda does
    not; both need libibverbs.so.1 and libnuma.so.1 of the system.
    """
    answer = machine.ask(Mooncake)
    if isinstance(answer, Silence):
        if answer.why is Why.MISSING:
            return skip("not installed; needed only for --transfer mooncake (pip install mooncake-transfer-engine)")
        return fail(
            f"{answer.why.value}: {answer.reason}",
            "It is installed but does not import.",
            "apt install libibverbs1 libnuma1 libnl-3-200 libnl-route-3-200\n"
            "without CUDA: pip install mooncake-transfer-engine-non-cuda",
        )
    if answer.error:
        return fail(
            f"{answer.version}: {answer.error}", "It makes no engine.", "see rdma.devices; MC_LOG_LEVEL=INFO says more"
        )
    return passed(answer.version)


def ucx(machine: Machine) -> Result:
    """UCX builds on this machine: one is well, two fight.

    Looks for libucp.so.0 in LD_LIBRARY_PATH and the usual folders, and for Debian's verbs providers, under which
    every UCX process ended by SIGSEGV (seen with nixl 1.5.1 on Debian 12; UCX_MODULES=cma cured it).
    """
    packages = machine.ask(Packages)
    bundled = isinstance(packages, Packages) and any(n.startswith("nixl-cu") for n in packages.versions)
    path = [p for p in machine.env.get("LD_LIBRARY_PATH", "").split(":") if p]
    first = [p for p in path if "libucp.so.0" in machine.list(p)]
    system = [p for p in UCX_FOLDERS if "libucp.so.0" in machine.list(p) and p not in first]
    output = machine.run("ucx_info", "-v")
    found = re.search(r"Library version: (\S+)", output.text) if output else None
    builds = [*first, *system, *(["nixl's own"] if bundled else [])]
    if not builds:
        return skip("no UCX here")
    if first and (system or bundled):
        return warn(
            f"{count(len(builds), 'build')}: {', '.join(builds)}",
            "LD_LIBRARY_PATH mixes one build's core with another's transport modules: 'Destination is "
            "unreachable', crashes.",
            f"take {', '.join(first)} out of LD_LIBRARY_PATH, or use the nixl that was built against it",
        )
    if bundled and not has_rdma(machine) and machine.list("/etc/libibverbs.d"):
        return warn(
            f"{', '.join(builds)}; verbs providers installed, but no RDMA device",
            "With Debian's ibverbs-providers each UCX process may crash as it ends (its transfers are right).",
            "export UCX_MODULES=cma, or apt remove ibverbs-providers",
        )
    return passed(f"{', '.join(builds)}{', ' + found[1] if found else ''}")


def nccl(machine: Machine) -> Result:
    """The collective library of torch's build.

    Asks torch (RCCL answers by NCCL's name). On CPU gloo does its work.
    """
    answer = machine.ask(Torch)
    if isinstance(answer, Silence):
        return skip("torch does not import: see software.torch")
    if answer.nccl is None:
        needs = "the GPUs need it" if gpus(machine, NVIDIA) or gpus(machine, AMD) else "gloo serves on CPU"
        return skip(f"torch has none; {needs}")
    return passed(f"{'RCCL' if answer.hip else 'NCCL'} {answer.nccl}")


CHECKS = (
    Check("software.torch", "torch", torch),
    Check("software.triton", "triton", triton),
    Check("software.transformers", "transformers", transformers),
    Check("software.nixl", "nixl", nixl),
    Check("software.mooncake", "Mooncake", mooncake),
    Check("software.ucx", "UCX", ucx),
    Check("software.nccl", "Collectives", nccl),
)
