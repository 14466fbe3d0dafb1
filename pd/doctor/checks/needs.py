"""What a launch would need: weights and KV a rank, pages and tokens, how heads split, what a handoff weighs."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from pd.doctor.answers import Needs, Torch
from pd.doctor.check import Check
from pd.doctor.machine import Machine, Silence
from pd.doctor.rdma import rdma_devices
from pd.doctor.readings import GIB, KIB, cgroup_memory_limit, count, human, meminfo
from pd.doctor.result import Result, fail, passed, skip, warn

ROLES = ("prefill", "decode", "colocated")
KV_DTYPES = ("auto", "fp8_e4m3")
GPU_FRACTION, CPU_POOL = 0.9, 2 * GIB
"""Of free memory, and bytes: what a rank's pool takes unless told (KVConfig.kv_memory)."""
PROMPTS = (2048, 8192, 32768)
SMALL_PIECE = 64 * KIB
"""Pieces below it cost a backend a third of its rate or more (16 KiB: two thirds); measured, nixl and Mooncake
on one host."""
UNKNOWN_LINK = 10.0
"""Gbit/s to reckon with where no interface says its rate."""


@dataclass(frozen=True, slots=True)
class Launch:
    model: str
    role: str
    tp: int
    page_size: int
    kv_cache_dtype: str = "auto"


def split(machine: Machine, *, launch: Launch) -> Result:
    """Whether the model is one that pd runs, and how its heads fall on the ranks.

    Reads config.json. TP need not divide the heads: a KV head is held by each rank that has a query head of its
    group, so KV memory is repeated where TP exceeds the KV heads.
    """
    needs = _ask(machine, launch)
    if isinstance(needs, Result):
        return needs
    heads = [r.query_heads for r in needs.ranks]
    kv_heads = [r.kv_heads for r in needs.ranks]
    kv = f" (KV {needs.kv_dtype})" if needs.kv_dtype != needs.dtype else ""
    shape = f"{needs.architecture}, {needs.num_layers} layers, {needs.dtype}{kv}"
    read = f"{shape}; {needs.num_query_heads} query heads as {_spread(heads)}"
    read += ", one latent on each" if needs.is_latent else f", {needs.num_kv_heads} KV heads as {_spread(kv_heads)}"
    if max(heads) > 1.5 * sum(heads) / len(heads):
        busiest = max(heads) / (sum(heads) / len(heads))
        return warn(
            read,
            f"The busiest rank has {busiest:.1f} times the average work; the others wait for it.",
            f"--tp {max(t for t in range(1, launch.tp + 1) if needs.num_query_heads % t == 0)} divides "
            "the heads evenly",
        )
    repeated = 0 if needs.is_latent else sum(kv_heads) - needs.num_kv_heads
    return passed(read + (f" ({count(repeated, 'copy')} more than one each)" if repeated else ""))


def weights(machine: Machine, *, launch: Launch) -> Result:
    """Whether the weights fit, and what is left for KV.

    Reckons each rank's tensors from config.json. On CPU all ranks share the host's memory (cgroup limits counted).
    """
    needs = _ask(machine, launch)
    if isinstance(needs, Result):
        return skip("see model.split")
    most, room = max(r.weights for r in needs.ranks), _room(machine, needs)
    read = f"{human(most)} a rank, {human(room)} there for it"
    if room <= most:
        return fail(
            read,
            "The weights do not fit.",
            "raise --tp, take a smaller or quantized model, or free memory (machine.memory, nvidia.memory, amd.memory)",
        )
    return passed(read)


def pages(machine: Machine, *, launch: Launch) -> Result:
    """Pages and tokens of a rank's pool, by the default of --kv-memory.

    On a GPU 0.9 of what weights leave, on CPU 2 GiB (or half of what is free, if less). All ranks take the
    number that the smallest can hold.
    """
    needs = _ask(machine, launch)
    if isinstance(needs, Result):
        return skip("see model.split")
    num_pages = _num_pages(machine, needs)
    tokens = num_pages * launch.page_size
    page = max(r.page_nbytes for r in needs.ranks)
    read = f"{num_pages} pages of {launch.page_size} tokens ({human(page)} each): {tokens} tokens"
    if num_pages < 1:
        return fail(read, "Not one page fits: the instance refuses to start.", "raise --kv-memory or --tp")
    if tokens < needs.max_positions:
        return warn(
            read,
            f"The model takes {needs.max_positions} tokens; a request above {tokens} is refused.",
            f"--kv-memory {human(page * -(-needs.max_positions // launch.page_size)).replace(' ', '')} "
            "holds one of full length; "
            f"or --max-model-len {tokens}",
        )
    return passed(f"{read}, {tokens // needs.max_positions} requests of full length")


def handoff(machine: Machine, *, launch: Launch) -> Result:
    """What a handoff of 2k, 8k and 32k tokens weighs, how long the link takes, and how many a second fill it.

    KV bytes of the whole model over the link's rate (the fastest RDMA port, else the fastest interface). Also
    the size of one contiguous piece: small ones cost a backend much of its rate.
    """
    needs = _ask(machine, launch)
    if isinstance(needs, Result):
        return skip("see model.split")
    if launch.role == "colocated":
        return skip("a colocated instance hands nothing over; try --role prefill")
    gbits, source = _link(machine)
    rows = [_handoff_row(needs, tokens, gbits) for tokens in PROMPTS]
    piece = min(r.page_nbytes // max(r.kv_heads, 1) for r in needs.ranks)
    read = f"{rows[0]} at {gbits:g} Gbit/s ({source})"
    details = (*rows[1:], f"one head of a page, the smallest piece between unequal TP: {human(piece)}")
    if piece < SMALL_PIECE:
        larger = launch.page_size * -(-SMALL_PIECE // piece)
        return warn(
            read,
            f"Between unequal TP a piece is {human(piece)}; below {human(SMALL_PIECE)} a backend loses "
            "a third of its rate or more.",
            f"--page-size {larger}, or equal TP on both sides (then a page is one piece)",
            *details,
        )
    return passed(read, *details)


def _handoff_row(needs: Needs, tokens: int, gbits: float) -> str:
    nbytes = needs.token_nbytes * tokens
    seconds = nbytes / (gbits / 8 * 1e9)
    return (
        f"{tokens // 1024}k tokens: {human(nbytes)}, {seconds * 1e3:.3g} ms, {1 / seconds:.3g} a second fill the link"
    )


def _ask(machine: Machine, launch: Launch) -> Needs | Result:
    """The needs; or a failure that says what is wrong with the model."""
    device = "gpu" if _gpu_memory(machine) else "cpu"
    needs = machine.ask(Needs, launch.model, str(launch.tp), str(launch.page_size), device, launch.kv_cache_dtype)
    if isinstance(needs, Silence):
        return fail(f"{needs.why.value}: {needs.reason}", "The model cannot be read.", "give a Hugging Face directory")
    if needs.error:
        return fail(needs.error, "What it needs cannot be told.", needs.hint or "see pd launch --help")
    return needs


def _gpu_memory(machine: Machine) -> int:
    """Bytes of the smallest GPU that torch sees; 0: none, the CPU it is."""
    answer = machine.ask(Torch)
    return min((g.memory for g in answer.gpus), default=0) if isinstance(answer, Torch) else 0


def _host_memory(machine: Machine) -> int:
    available = meminfo(machine).get("MemAvailable", 0)
    bound = cgroup_memory_limit(machine)
    return available if bound is None else min(available, bound)


def _room(machine: Machine, needs: Needs) -> int:
    """Bytes for one rank."""
    return _gpu_memory(machine) or _host_memory(machine) // len(needs.ranks)


def _num_pages(machine: Machine, needs: Needs) -> int:
    left = max(0, _room(machine, needs) - max(r.weights for r in needs.ranks))
    pool = int(left * GPU_FRACTION) if _gpu_memory(machine) else min(CPU_POOL, left // 2)
    return min(pool // r.page_nbytes for r in needs.ranks)


def _link(machine: Machine) -> tuple[float, str]:
    """Gbit/s, and whose."""
    ports = [(p.rate, d.name) for d in rdma_devices(machine) for p in d.ports if p.is_up]
    if ports:
        return max(ports)
    found = [
        (int(text) / 1000, name)
        for name in machine.list("/sys/class/net")
        if (text := machine.read(f"/sys/class/net/{name}/speed") or "").isdigit() and int(text) > 0
    ]
    return max(found, default=(UNKNOWN_LINK, "assumed: no interface says its rate"))


def _spread(numbers: list[int]) -> str:
    """[5, 4] -> "5+4"."""
    return "+".join(map(str, numbers))


def needs_checks(launch: Launch) -> tuple[Check, ...]:
    """Raises ValueError for a role that has no model, sizes that are none, or a dtype that pages do not have."""
    if launch.role not in ROLES:
        raise ValueError(f"--role {launch.role}: one of {', '.join(ROLES)}")
    if launch.tp < 1 or launch.page_size < 1:
        raise ValueError("--tp and --page-size are at least 1")
    if launch.kv_cache_dtype not in KV_DTYPES:
        raise ValueError(f"--kv-cache-dtype {launch.kv_cache_dtype}: one of {', '.join(KV_DTYPES)}")
    return (
        Check("model.split", "Heads", partial(split, launch=launch)),
        Check("model.weights", "Weights", partial(weights, launch=launch)),
        Check("model.pages", "KV pool", partial(pages, launch=launch)),
        Check("model.handoff", "Handoff", partial(handoff, launch=launch)),
    )
