"""From options to configurations, with every fault found before anything starts.

`None` stays `None`: what it stands for is derived by those who know the model and the device.
"""

from __future__ import annotations

import math
import os
import re
import socket
from collections.abc import Iterator
from typing import Literal, cast

from pd.cli_options import LaunchOptions, SharedOptions
from pd.runtime.config import (
    ConfigError,
    DeviceConfig,
    InstanceConfig,
    KVConfig,
    LinkConfig,
    ModelConfig,
    RouterConfig,
    StepConfig,
    is_loopback,
    read_transfer_params,
)
from pd.runtime.keys import read_api_keys, read_cluster_key
from pd.runtime.wire.values import Role

_WORDS = {
    "dtype": ("auto", "float32", "bfloat16", "float16"),
    "kv_cache_dtype": ("auto", "fp8_e4m3"),
    "device": ("auto", "cpu", "cuda"),
    "kernels": ("auto", "triton", "torch"),
    "transfer": ("auto", "shm", "tcp", "nixl", "mooncake"),
    "move": ("auto", "direct", "packed"),
    "reserve": ("early", "late"),
    "direction": ("push", "pull"),
    "log": ("requests", "instances"),
}
_SHARED_COUNTS = ("page_size", "max_running", "max_prefill_tokens", "max_model_len", "max_attempts", "stream_layers")
_OWN_COUNTS = ("tp", "num_pages", "threads")
_OF_INSTANCES = (
    *(
        "name",
        "tp",
        "device",
        "kernels",
        "no_graphs",
        "dtype",
        "threads",
        "cores",
        "page_size",
        "num_pages",
        "kv_memory",
        "kv_cache_dtype",
        "no_prefix_cache",
    ),
    *("max_running", "max_prefill_tokens", "max_model_len", "transfer", "transfer_devices", "transfer_param", "move"),
    "stream_layers",
)
"""Options that say nothing to a router."""
_OF_ROUTERS = ("api_key_file", "deadline", "direction", "max_attempts", "reserve", "verify_kv")
_SIZE = re.compile(r"(\d+(?:\.\d+)?|\.\d+)\s*(?:([KMGT])i?B?|B)?", re.IGNORECASE)
_UNITS = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
_ADDRESS = re.compile(r"tcp://(\[[0-9a-fA-F:]+\]|[A-Za-z0-9*][A-Za-z0-9.-]*|\*):(\d{1,5})")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_RANGE = re.compile(r"(\d{1,5})(?:-(\d{1,5}))?")


def launch_config(options: LaunchOptions) -> InstanceConfig | RouterConfig:
    """Raises ConfigError with all faults at once."""
    faults = [*role_faults(options.role), *shared_faults(options), *own_faults(options)]
    if options.role == Role.ROUTER.value:
        faults += _strange(options, _OF_INSTANCES, "instances; a router")
    else:
        faults += _strange(options, _OF_ROUTERS, "the router; an instance")
    if options.role in (Role.DECODE.value, Role.COLOCATED.value):
        faults += _strange(options, ("stream_layers",), f"a prefill instance; a {options.role} one")
    if faults:
        raise ConfigError(*faults, hint="pd launch --help")
    check_keys(options)
    _check_reach(options)
    if options.role == Role.ROUTER.value:
        return RouterConfig(
            model=_model(options),
            link=_link(options),
            api_key_file=options.api_key_file,
            reserve=options.reserve,
            direction=options.direction,
            verify_kv=options.verify_kv,
            request_s=options.deadline,
            max_attempts=options.max_attempts,
            log=options.log,
        )
    return InstanceConfig(
        role=Role(options.role),
        name=options.name or f"{options.role}-{socket.gethostname()}-{os.getpid()}",
        model=_model(options),
        kv=KVConfig(
            page_size=options.page_size,
            num_pages=options.num_pages,
            kv_memory=None if options.kv_memory is None else parse_size(options.kv_memory),
            dtype=options.kv_cache_dtype,
            prefix_cache=not options.no_prefix_cache,
        ),
        step=StepConfig(max_running=options.max_running, max_prefill_tokens=options.max_prefill_tokens),
        device=DeviceConfig(
            device=options.device,
            kernels=options.kernels,
            graphs=not options.no_graphs,
            tp=options.tp,
            threads=options.threads,
            cores=None if options.cores is None else parse_cores(options.cores),
        ),
        link=_link(options),
        log=options.log,
    )


def check_keys(options: SharedOptions) -> None:
    """Read what the key files hold, so that a bad one is told before anything starts. Raises ConfigError."""
    read_cluster_key(options.cluster_key)
    read_api_keys(options.api_key_file)


def _check_reach(options: LaunchOptions) -> None:
    """Without a key no other machine may reach a link. Raises ConfigError."""
    is_router = options.role == Role.ROUTER.value
    host = options.router.removeprefix("tcp://").rpartition(":")[0] if is_router else options.host
    if options.cluster_key is not None or options.insecure or is_loopback(host):
        return
    said = f"--router {options.router}" if is_router else f"--host {host}"
    raise ConfigError(
        f"{said}: without a key only this machine's own processes may reach the links",
        hint="make a key with `pd key FILE` and give --cluster-key FILE to every process, or say --insecure",
    )


def role_faults(role: str) -> Iterator[str]:
    roles = [role.value for role in Role]
    if role not in roles:
        yield f"--role is {role!r}, must be one of {', '.join(roles)}"


def shared_faults(options: SharedOptions) -> Iterator[str]:
    """What is wrong with settings that all instances of a command share."""
    for name, words in _WORDS.items():
        if (word := getattr(options, name)) not in words:
            yield f"--{name.replace('_', '-')} is {word!r}, must be one of {', '.join(words)}"
    yield from _count_faults(options, _SHARED_COUNTS)
    if options.kv_memory is not None:
        if parse_size(options.kv_memory) is None:
            yield f"--kv-memory is {options.kv_memory!r}, must be bytes (4GiB) or a fraction (0.8)"
        if options.num_pages is not None:
            yield f"--num-pages {options.num_pages} and --kv-memory {options.kv_memory} both size the pool"
    yield from read_transfer_params(options.transfer_param or ())[1]
    if options.stream_layers is not None:
        given = f"--stream-layers {options.stream_layers}"
        if options.direction == "pull":
            yield f"{given} is for KV that prefill writes, and with --direction pull decode reads it"
        if options.reserve == "late":
            yield f"{given} is for KV that goes while it is computed, and with --reserve late it goes when all is"
    if not 0 < options.deadline < math.inf:
        yield f"--deadline is {options.deadline:g}, must be a number of seconds above 0"
    if not options.host:
        yield "--host is empty"


def own_faults(options: LaunchOptions) -> Iterator[str]:
    """What is wrong with settings that each process has for itself."""
    yield from _count_faults(options, _OWN_COUNTS)
    if options.cores is not None:
        yield from core_faults(options.cores)
    if options.name is not None and not _NAME.fullmatch(options.name):
        yield f"--name is {options.name!r}, must be up to 64 letters, digits, dots, dashes or underscores"
    if options.port is not None and not 1 <= options.port <= 65535:
        yield f"--port is {options.port}, must be 1 to 65535"
    match = _ADDRESS.fullmatch(options.router)
    if match is None or not 1 <= int(match[2]) <= 65535:
        yield f"--router is {options.router!r}, must be tcp://HOST:PORT with a port of 1 to 65535"


def core_faults(text: str) -> Iterator[str]:
    cores = parse_cores(text)
    if cores is None:
        yield f"--cores is {text!r}, must be numbers and ranges, such as 0-3,6"
        return
    allowed = os.sched_getaffinity(0)
    if missing := sorted(set(cores) - allowed):
        yield f"--cores names {show_cores(missing)}; this process may use {show_cores(sorted(allowed))}"


def parse_size(text: str) -> float | None:
    """Bytes if above 1, else a fraction. None: not a size."""
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        return None
    size = float(match[1]) * _UNITS.get((match[2] or "").upper(), 1)
    return size if size > 0 else None


def parse_cores(text: str) -> tuple[int, ...] | None:
    """ "0-2,6" -> (0, 1, 2, 6), ascending. None: malformed or empty."""
    cores: set[int] = set()
    for part in text.split(","):
        match = _RANGE.fullmatch(part.strip())
        if match is None:
            return None
        first, last = int(match[1]), int(match[2] or match[1])
        if first > last:
            return None
        cores |= set(range(first, last + 1))
    return tuple(sorted(cores))


def show_cores(cores: list[int] | tuple[int, ...]) -> str:
    """(0, 1, 2, 6) -> "0-2,6"; the inverse of `parse_cores`."""
    runs: list[list[int]] = []
    for core in cores:
        if runs and core == runs[-1][-1] + 1:
            runs[-1].append(core)
        else:
            runs.append([core])
    return ",".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else f"{run[0]}" for run in runs)


def _count_faults(options: SharedOptions, names: tuple[str, ...]) -> Iterator[str]:
    for name in names:
        value = getattr(options, name)
        if value is not None and value < 1:
            yield f"--{name.replace('_', '-')} is {value}, must be at least 1"


def _strange(options: LaunchOptions, names: tuple[str, ...], whose: str) -> Iterator[str]:
    """Options that were given and say nothing to this role."""
    plain = LaunchOptions(role=options.role)
    for name in names:
        if (value := getattr(options, name)) != getattr(plain, name):
            said = "" if value is True else f" {value}"
            yield f"--{name.replace('_', '-')}{said} is for {whose} has no use for it"


def _model(options: LaunchOptions) -> ModelConfig:
    return ModelConfig(
        model=options.model,
        served_name=options.served_name,
        dtype=options.dtype,
        max_model_len=options.max_model_len,
    )


def _link(options: LaunchOptions) -> LinkConfig:
    return LinkConfig(
        host=options.host,
        port=options.port,
        router=options.router,
        transfer=options.transfer,
        stream_layers=options.stream_layers,
        transfer_devices=tuple(filter(None, map(str.strip, (options.transfer_devices or "").split(",")))),
        transfer_params=tuple(read_transfer_params(options.transfer_param or ())[0].items()),
        move=cast(Literal["auto", "direct", "packed"], options.move),
        cluster_key=options.cluster_key,
        insecure=options.insecure,
    )
