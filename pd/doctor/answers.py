"""What libraries and measurements answer. Plain data: made in `pd.doctor.ask`, judged in `pd.doctor.checks`."""

from __future__ import annotations

import msgspec

from pd.doctor.machine import Answer


class Packages(Answer, frozen=True):
    """Installed Python distributions, canonical name -> version, and the Python that runs."""

    python: str
    versions: dict[str, str]


class Clock(Answer, frozen=True):
    """adjtimex(2), read only."""

    synchronized: bool
    max_error_s: float


class Cma(Answer, frozen=True):
    """Whether one process may read another's memory (process_vm_readv of a child): UCX's fast path on one host."""

    works: bool
    error: str


class Hosts(Answer, frozen=True):
    """This host's name and the addresses that it resolves to."""

    name: str
    addresses: tuple[str, ...]
    error: str


class Gpu(msgspec.Struct, frozen=True):
    name: str
    capability: str  # "9.0"; for HIP the arch name, "gfx942"
    memory: int  # bytes


class Torch(Answer, frozen=True):
    version: str
    cuda: str | None  # the CUDA it was built for
    hip: str | None
    available: bool
    error: str  # what initialising the device said
    gpus: tuple[Gpu, ...] = ()
    arch_list: tuple[str, ...] = ()
    nccl: str | None = None
    peers: tuple[tuple[bool, ...], ...] = ()  # can_device_access_peer
    wants_triton: str | None = None  # torch's own requirement, "3.7.1"


class NvmlGpu(msgspec.Struct, frozen=True):
    name: str
    bus: str  # "0000:18:00.0"
    memory: int  # bytes
    memory_used: int
    bar1: int | None  # bytes
    ecc: bool | None  # None: the card has none
    uncorrected: int  # since the driver was loaded
    remap_pending: bool
    remap_failed: bool
    persistence: bool | None
    mig: bool
    throttled: tuple[str, ...]  # reasons that cost speed; idle and set limits are none
    links_up: int
    links_down: int
    fabric: str | None  # None: no NVSwitch fabric; else completed | in progress | not started | error …
    pcie: tuple[int, int, int, int] | None = None  # generation, its maximum, width, its maximum


class Nvml(Answer, frozen=True):
    driver: str
    cuda: str  # the newest CUDA this driver runs, "12.4"
    gpus: tuple[NvmlGpu, ...]
    p2p: tuple[tuple[str, ...], ...] = ()  # "ok" or the driver's reason, a row a GPU; "self" on the diagonal


class Verbs(Answer, frozen=True):
    """libibverbs: what it opens, or the error of loading it."""

    devices: tuple[str, ...]
    opened: tuple[str, ...]
    error: str


class Gdr(Answer, frozen=True):
    """The proof: a page of GPU memory registered with each NIC, and a write through one compared."""

    registered: dict[str, str]  # NIC -> "peermem" | "dma-buf" | the error
    wrote: bool | None  # None: not tried
    error: str


class Nixl(Answer, frozen=True):
    version: str
    cuda: str  # of the wheel in use: "12"
    plugins: tuple[str, ...]
    backend_error: str  # of creating an agent with UCX; "" when it came up
    memory_types: tuple[str, ...]


class Mooncake(Answer, frozen=True):
    version: str
    error: str  # of making a TCP engine on loopback


class Timing(msgspec.Struct, frozen=True):
    nbytes: int
    seconds: float  # the best of a few, until the bytes are visible at the peer


class Loopback(Answer, frozen=True):
    """A backend between two processes of this host. Every size was compared byte for byte by checksum."""

    backend: str
    timings: tuple[Timing, ...]
    error: str
    note: str = ""


class Visit(Answer, frozen=True):
    """What a visit to another host's doctor found. MTUs and packet sizes in bytes, IP headers included."""

    error: str  # "": the visit went through
    interface: str = ""  # ours, that leads there
    here: dict[str, str] = msgspec.field(default_factory=dict)
    there: dict[str, str] = msgspec.field(default_factory=dict)
    latency_s: float = 0.0  # a round trip
    skew_s: float = 0.0  # their clock minus ours
    out: str = ""  # connecting to a fresh port there; "" went
    back: str = ""  # and from there to here
    mtu_here: int | None = None
    mtu_there: int | None = None
    whole_out: int = 0  # the largest uncut packet that arrived there; 0: none did
    whole_back: int = 0


class RankNeeds(msgspec.Struct, frozen=True):
    weights: int  # bytes
    query_heads: int
    kv_heads: int
    page_nbytes: int


class Needs(Answer, frozen=True):
    """What a launch of a model needs, a rank each."""

    error: str  # "": its config.json was understood
    hint: str = ""
    architecture: str = ""
    dtype: str = ""
    kv_dtype: str = ""
    num_layers: int = 0
    num_query_heads: int = 0
    num_kv_heads: int = 0
    is_latent: bool = False  # one KV head, a latent, that every rank holds
    max_positions: int = 0  # tokens
    token_nbytes: int = 0  # of KV, over the whole model
    ranks: tuple[RankNeeds, ...] = ()
