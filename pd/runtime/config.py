"""What people may set, checked before anything starts. Pure.

Every field has its unit in its name or beneath it, with the default's reason. `None` means: derived at start, and the
start-up line says what was chosen.
"""

from __future__ import annotations

import ipaddress
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from pd.runtime.wire.values import Role
from pd.transfer.layout import DEFAULT_ORDER


class ConfigError(Exception):
    """Before start, the user's to mend. Carries all faults at once; `hint` is printed on its own line."""

    def __init__(self, *faults: str, hint: str = "") -> None:
        super().__init__("\n".join(faults))
        self.hint = hint


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    model: str | None = None
    """A directory, or a hub id where a hub can be reached. None: the default model."""
    served_name: str | None = None
    """As clients say it. None: the directory's last part or the hub id."""
    dtype: str = "auto"
    """auto: the checkpoint's own; fp16 checkpoints become bfloat16 on CPU, where fp16 is slow."""
    max_model_len: int | None = None
    """Tokens of prompt + answer. None: the model's limit, or the pool's where that is smaller."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KVConfig:
    page_size: int = 16
    """Tokens. Small enough to share prefixes, large enough that a page's heads are one copy of over 100 KB."""
    num_pages: int | None = None
    """A rank. None: from kv_memory."""
    kv_memory: float | None = None
    """Bytes if above 1, else the fraction of free device memory left after weights. None: 0.9 on GPU, 2 GiB on CPU."""
    order: tuple[str, ...] = DEFAULT_ORDER
    dtype: str = "auto"
    """auto: the model's. fp8_e4m3: half of bfloat16's bytes, so twice the tokens; K and V are rounded to 3 bits of
    fraction as they stand (scale 1), those beyond 448 to 448."""
    prefix_cache: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class StepConfig:
    max_running: int = 256
    """Requests with a slot at once."""
    max_prefill_tokens: int = 2048
    """Of one step: long enough for GEMM-bound work, short enough to stream a long prompt's KV while it computes."""
    max_waiting: int = 4096
    """Requests queued in one instance; more are refused with Retry-After."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceConfig:
    device: str = "auto"
    """auto: cuda (also ROCm's) where there is one, else cpu."""
    kernels: str = "auto"
    """auto: Triton's on a GPU where they can run, else PyTorch's and C++'s. triton or torch: that or a clear error."""
    graphs: bool = True
    """Decode by captured graphs, on a GPU with kernels. False: where a capture fails, and to see what they gain."""
    tp: int = 1
    """Ranks. Any number up to the query heads, dividing or not."""
    threads: int | None = None
    """CPU threads a rank. None: the instance's cores over its ranks, at least 1."""
    cores: tuple[int, ...] | None = None
    """CPU cores of this instance. None: all this process may use."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkConfig:
    host: str = "127.0.0.1"
    """Where this process binds. Not loopback only if said."""
    port: int | None = None
    """HTTP of a router (None: 8000); handoff messages of a worker (None: any free one)."""
    router: str = "tcp://127.0.0.1:8500"
    """The router's membership address: the router binds it, workers connect to it."""
    transfer: str = "auto"
    """auto: shm when the peer is on this host, else tcp or, with RDMA and a library, whichever proves faster."""
    move: Literal["auto", "direct", "packed"] = "auto"
    """direct: KV is moved as it lies. packed: through staging, in the peer's arrangement. auto: packed where the dtype
    differs or direct pieces would be small."""
    stream_layers: int | None = None
    """Of a prefill instance that writes: layers whose KV starts on its way together, while those after them compute.
    None: all, when the step is done."""
    transfer_devices: tuple[str, ...] = ()
    """Network interfaces or NICs. A backend that cannot honour them refuses."""
    transfer_params: tuple[tuple[str, str], ...] = ()
    """A library's own settings. A backend refuses those that it does not know."""
    cluster_key: str | None = None
    """A file: see pd.runtime.keys. None: links are open, and bound to loopback."""
    insecure: bool = False
    """Bind elsewhere without a key all the same."""


def read_transfer_params(given: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """Of `--transfer-param KEY=VALUE`, each given once: they, and what is wrong with them."""
    pairs = [(key.strip(), value.strip()) for key, _, value in (param.partition("=") for param in given)]
    faults = [
        f"--transfer-param is {param!r}, must be KEY=VALUE"
        for param, pair in zip(given, pairs, strict=True)
        if not all(pair)
    ]
    counts = Counter(key for key, _ in pairs)
    faults += [f"--transfer-param gives {key} {num} times, must be once" for key, num in counts.items() if num > 1]
    return dict(pairs), faults


def is_loopback(host: str) -> bool:
    """Only processes of this machine reach `host`. A name other than localhost is not looked up: it may change."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceConfig:
    """One prefill, decode or colocated instance."""

    role: Role
    name: str
    """Unique in the cluster; the membership names instances, not addresses."""
    model: ModelConfig = field(default_factory=ModelConfig)
    kv: KVConfig = field(default_factory=KVConfig)
    step: StepConfig = field(default_factory=StepConfig)
    device: DeviceConfig = field(default_factory=DeviceConfig)
    link: LinkConfig = field(default_factory=LinkConfig)
    log: str = "requests"
    """requests: a line an event. instances: none of requests that go well."""
    drain_s: float = 3.0
    """From SIGTERM: running requests may end; what still runs then the router starts again elsewhere.
    All is gone in 5 s."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterConfig:
    model: ModelConfig = field(default_factory=ModelConfig)
    link: LinkConfig = field(default_factory=LinkConfig)
    api_key_file: str | None = None
    """HTTP clients must show one of its keys. None: everyone is served."""
    max_queue: int = 1024
    """Requests without an instance yet; more get 429 with Retry-After."""
    queue_s: float = 30.0
    """How long one may wait there before 503."""
    request_s: float = 600.0
    """A whole answer."""
    max_attempts: int = 5
    """Two faults at once may take a request twice; what fails five times is likely to be its own fault."""
    reserve: str = "early"
    """early: decode takes pages before prefill begins, and KV comes while it computes. late: when prefill is done, so
    that no page of decode waits for prefill's queue."""
    direction: str = "push"
    """push: prefill writes. pull: decode reads when all is computed, and prefill keeps its pages under a lease."""
    verify_kv: bool = False
    """Decode compares a digest of the KV that landed with prefill's of what it sent. Off: it costs a pass over all KV
    on both sides, and what it would find is a fault of hardware, of a library, or ours."""
    log: str = "requests"
    """As an instance's."""
    max_body_bytes: int = 8 << 20
    stream_buffer_tokens: int = 4096
    """Of one client that reads slowly; then its request is cancelled."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankConfig:
    """What each of an instance's ranks is told at birth."""

    rank: int
    instance: InstanceConfig
    epoch: str
    leader: str
    """ZMQ address of the leader's rank socket."""
    rendezvous: str
    """torch.distributed init_method; a file:// or tcp:// of the leader's choice."""
    checkpoint: str
    """Resolved local directory."""
    parent: int
    """The leader's process id: a rank ends with it."""
