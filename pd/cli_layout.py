"""From `pd serve`'s options to the processes it keeps: a router and instances, as `pd launch` takes them."""

from __future__ import annotations

import contextlib
import os
import re
import socket
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from urllib.parse import urlsplit

from pd.cli_config import check_keys, core_faults, own_faults, parse_cores, shared_faults, show_cores
from pd.cli_gpus import gpu_environments, ranks_a_gpu
from pd.cli_options import LaunchOptions, ServeOptions, SharedOptions, as_arguments
from pd.runtime.checkpoint import resolve, served_name
from pd.runtime.config import ConfigError, LinkConfig
from pd.runtime.engine.spec import read_spec
from pd.runtime.roles.child import Child
from pd.runtime.roles.supervisor import ServeConfig, claim_port, hold_port
from pd.runtime.wire.values import Role

_KEYS = ("tp", "name", "num-pages", "threads", "cores")
_ROUTERS_OWN = ("host", "api_key_file", "deadline", "direction", "max_attempts", "reserve", "verify_kv")
_NUMBERS = ("tp", "num-pages", "threads")
_MEMBERSHIP_PORT = urlsplit(LinkConfig().router).port or 0
_MAX_TRIES = 16
_LOOPBACK = {"0.0.0.0": "127.0.0.1", "::": "::1"}
_GPU_NODES = (Path("/dev/nvidiactl"), Path("/dev/kfd"))


def serve_config(options: ServeOptions) -> ServeConfig:
    """What the supervisor keeps. Looks which ports are free and gets the model, once for all processes.

    Raises ConfigError: all faults of the options at once, else the port's, else the model's.
    """
    router, *instances = launches(options)
    instances = share_memory(instances)
    port = claim_port(options.host, options.port)
    folder = resolve(options.model)
    _check_shapes(instances, read_spec(folder).num_query_heads)
    model = str(folder)
    name = options.served_name or served_name(options.model)
    keeper, meeting = _meeting()
    processes = [
        replace(router, model=model, served_name=name, router=meeting, port=port),
        *(replace(instance, model=model, served_name=name, router=meeting) for instance in instances),
    ]
    return ServeConfig(
        children=tuple(map(_child, processes, [{}, *_gpus(instances)])),
        host=_LOOPBACK.get(options.host, options.host),
        port=port,
        model=name,
        restart=options.restart == "always",
        api_key_file=options.api_key_file,
        keeper=keeper,
    )


def _check_shapes(instances: Sequence[LaunchOptions], num_query_heads: int) -> None:
    faults = [
        f"{one.name}: tp is {one.tp}, the model has {num_query_heads} query heads"
        for one in instances
        if one.tp > num_query_heads
    ]
    if faults:
        raise ConfigError(*faults, hint=f"tp may be 1 to {num_query_heads}")


def launches(options: ServeOptions) -> list[LaunchOptions]:
    """The router first, then the instances, cores shared out. Raises ConfigError with all faults at once."""
    faults = [*shared_faults(options)]
    if options.cores is not None:
        faults += core_faults(options.cores)
    if options.restart not in ("always", "never"):
        faults.append(f"--restart is {options.restart!r}, must be one of always, never")
    if not 0 <= options.port <= 65535:
        faults.append(f"--port is {options.port}, must be 0 to 65535")
    specs = _specs(options)
    if len({role for role, _ in specs} & {Role.PREFILL, Role.DECODE}) == 1:
        faults.append("beside --colocated, --prefill and --decode come in pairs or not at all")
    if options.stream_layers is not None and not any(role is Role.PREFILL for role, _ in specs):
        faults.append(f"--stream-layers {options.stream_layers} is for prefill instances, and there is none")
    instances: list[LaunchOptions] = []
    for role, text in specs:
        number = sum(instance.role == role.value for instance in instances)
        instance, own = _instance(options, role, text, number=number)
        instances.append(instance)
        faults += own
    names = [instance.name for instance in instances]
    faults += [f"two instances are named {name}" for name in sorted({n for n in names if n and names.count(n) > 1})]
    if faults:
        raise ConfigError(*dict.fromkeys(faults), hint=_hint(faults))
    check_keys(options)
    kept = {name: getattr(options, name) for name in (*_ROUTERS_OWN, "cluster_key", "insecure", "log")}
    router = LaunchOptions(role=Role.ROUTER.value, **kept)
    return [router, *_with_cores(instances, options)]


def share_cores(cores: Sequence[int], weights: Sequence[int]) -> list[tuple[int, ...]]:
    """Neighbouring cores for each instance, at least one, in proportion to its weight.

    With fewer cores than instances all share all: two pinned to one core would wait for each other there.
    """
    if len(cores) < len(weights):
        return [tuple(cores)] * len(weights)
    counts = [1] * len(weights)
    for _ in range(len(cores) - len(weights)):
        counts[min(range(len(weights)), key=lambda i: counts[i] / weights[i])] += 1
    starts = [sum(counts[:i]) for i in range(len(counts))]
    return [tuple(cores[start : start + count]) for start, count in zip(starts, counts, strict=True)]


def share_memory(instances: list[LaunchOptions]) -> list[LaunchOptions]:
    """Where ranks share GPUs each takes a share of what is free: two that took 0.9 of it would not both start."""
    on_gpus = [instance.tp for instance in instances if not _is_cpu(instance.device)]
    num_sharing = ranks_a_gpu(on_gpus, os.environ)
    if num_sharing == 1:
        return instances
    share = f"{0.9 / num_sharing:.3f}"
    return [
        one if one.kv_memory or one.num_pages or _is_cpu(one.device) else replace(one, kv_memory=share)
        for one in instances
    ]


def _hint(faults: Sequence[str]) -> str:
    """With an example where an instance's settings were no settings."""
    wrong = next((fault for fault in faults if "is not KEY=VALUE" in fault), None)
    return "pd serve --help" if wrong is None else f"such as {wrong.split()[0]} tp=2; pd serve --help"


def _specs(options: ServeOptions) -> list[tuple[Role, str]]:
    """Role and settings of each instance. A side left out gets one, unless there are colocated ones."""
    missing = [] if options.colocated else [""]
    return [
        *((Role.PREFILL, text) for text in options.prefill or missing),
        *((Role.DECODE, text) for text in options.decode or missing),
        *((Role.COLOCATED, text) for text in options.colocated),
    ]


def _instance(options: ServeOptions, role: Role, text: str, *, number: int) -> tuple[LaunchOptions, list[str]]:
    """One instance, and what is wrong with its text."""
    pairs, faults = _pairs(text)
    settings: dict[str, str | int] = {}
    for key, value in pairs.items():
        if key in _NUMBERS and not re.fullmatch(r"-?\d{1,9}", value):
            faults.append(f"{key}={value} is no number")
        else:
            settings[key.replace("-", "_")] = int(value) if key in _NUMBERS else value
    shared = {entry.name: getattr(options, entry.name) for entry in fields(SharedOptions)}
    for name in ("cores", *_ROUTERS_OWN):  # the first they all share between them
        del shared[name]
    if role is not Role.PREFILL:
        del shared["stream_layers"]
    instance = LaunchOptions(**{"role": role.value, "name": f"{role.value}-{number}", **shared, **settings})
    faults += own_faults(instance)
    return instance, [f'--{role.value} "{text}": {fault}' for fault in faults]


def _pairs(text: str) -> tuple[dict[str, str], list[str]]:
    """`tp=2,cores=0,3` -> {tp: 2, cores: 0,3}: a piece without `=` goes on with the value before it."""
    pairs: dict[str, str] = {}
    faults: list[str] = []
    key = ""
    for piece in filter(None, (piece.strip() for piece in text.split(","))):
        if "=" in piece:
            key, value = (part.strip() for part in piece.split("=", 1))
            pairs[key] = value
        elif key:
            pairs[key] += f",{piece}"
        else:
            faults.append(f"{piece!r} is not KEY=VALUE")
    unknown = [key for key in pairs if key not in _KEYS]
    faults += [f"unknown key {key!r}, known are {', '.join(_KEYS)}" for key in unknown]
    return {key: value for key, value in pairs.items() if key in _KEYS}, faults


def _with_cores(instances: list[LaunchOptions], options: ServeOptions) -> Iterator[LaunchOptions]:
    """On a CPU every instance gets cores of its own; on a GPU they are left free unless `--cores` says so."""
    if options.cores is None and not _is_cpu(options.device):
        yield from instances
        return
    allowed = parse_cores(options.cores or "") or tuple(sorted(os.sched_getaffinity(0)))
    taken = {core for instance in instances for core in parse_cores(instance.cores or "") or ()}
    open_ones = [instance for instance in instances if instance.cores is None]
    left = [core for core in allowed if core not in taken] or list(allowed)
    shares = iter(share_cores(left, [instance.tp for instance in open_ones]))
    for instance in instances:
        yield instance if instance.cores else replace(instance, cores=show_cores(next(shares)))


def _child(process: LaunchOptions, environment: Mapping[str, str]) -> Child:
    is_router = process.role == Role.ROUTER.value
    return Child(
        name=process.name or process.role,
        says=(process.role, "" if is_router else str(process.tp), process.cores or ""),
        command=(sys.executable, "-P", "-m", "pd", "launch", *as_arguments(process)),
        environment=tuple(environment.items()),
    )


def _gpus(instances: Sequence[LaunchOptions]) -> list[dict[str, str]]:
    """Of each instance; the CPU's get none of them."""
    on_gpus = [instance for instance in instances if not _is_cpu(instance.device)]
    shares = iter(gpu_environments([instance.tp for instance in on_gpus], os.environ))
    return [{} if _is_cpu(instance.device) else next(shares) for instance in instances]


def _meeting() -> tuple[socket.socket, str]:
    """Where instances meet the router: at the default port, so that `pd launch` finds it too; at any free one where
    that is taken, or about to be: another's router there would take our instances for its own."""
    for wanted in (_MEMBERSHIP_PORT, *[0] * _MAX_TRIES):
        with contextlib.suppress(ConfigError):
            port = claim_port("127.0.0.1", wanted)
            if (keeper := hold_port(port)) is not None:
                return keeper, f"tcp://127.0.0.1:{port}"
    raise ConfigError("no free port for instances to meet the router", hint="end what holds the ports of 127.0.0.1")


def _is_cpu(device: str) -> bool:
    return device == "cpu" or (device == "auto" and not any(node.exists() for node in _GPU_NODES))
