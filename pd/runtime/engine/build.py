"""From a checkpoint's directory to a rank that steps: the engine's one door.

config.json ─► spec ─► checks ─► mesh (ranks meet) ─► weights ─► pool ─► runner
                          └─ ConfigError, all faults at once, before any rank waits for another
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from pd.runtime.config import ConfigError, InstanceConfig, RankConfig
from pd.runtime.engine import cpu_build
from pd.runtime.engine.device import device_of, enter
from pd.runtime.engine.inputs import Slots
from pd.runtime.engine.kv_pool import KVPool, count_pages, make_pool
from pd.runtime.engine.mesh import Mesh, make_mesh
from pd.runtime.engine.models.llama import Llama
from pd.runtime.engine.operators import Shapes, choose, takes_kernels
from pd.runtime.engine.room import Room, measure, out_of_memory
from pd.runtime.engine.runner import Launched, Runner
from pd.runtime.engine.sampler import Sampler
from pd.runtime.engine.shards import layout_of, parts, share_of
from pd.runtime.engine.spec import ModelSpec, read_spec
from pd.runtime.engine.weights import DTYPES, Checkpoint, Reader, open_checkpoint
from pd.runtime.wire.plans import StepPlan
from pd.runtime.wire.values import ModelCard, Role, Token
from pd.transfer.float8 import E4M3
from pd.transfer.layout import KVLayout, page_nbytes, tp_shards
from pd.transfer.staging import STAGING_NBYTES
from pd.transfer.transport import Transport

T = TypeVar("T")

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_KV_DTYPES = {"fp8_e4m3": E4M3}


class Notes(NamedTuple):
    start_up: str  # dtype, threads, operators, weights: for a person
    operators: str  # equal where two ranks compute the same bits


class Engine:
    """One rank, ready. Owns weights, pool views and its place in the mesh; the transport stays its caller's."""

    def __init__(
        self, card: ModelCard, layout: KVLayout, pool: KVPool, *, notes: Notes, runner: Runner, mesh: Mesh
    ) -> None:
        self.card = card
        self.layout = layout
        self.shard = pool.shard
        self.region = pool.region
        self.notes = notes
        self.reshard = runner.ops.reshard
        self._runner: Runner | None = runner
        self._mesh = mesh

    def launch(self, plan: StepPlan, on_kv: Callable[[int], None] | None = None) -> Launched:
        """Run a plan: retire, admit, chunks. Called in the order of plans; each may be launched before the one
        before it is finished. `on_kv`: as in Runner.launch.
        """
        assert self._runner is not None, "step after close"
        return self._runner.launch(plan, on_kv)

    def step(self, plan: StepPlan) -> tuple[Token, ...]:
        """Launch and finish."""
        return self.launch(plan).finish()

    def close(self) -> None:
        """Leave the mesh and let go of the pool's memory, so that the transport can free it. Idempotent."""
        if self._runner is not None:
            self._runner = None
            self._mesh.close()


def build(config: RankConfig, transport: Transport, report: Callable[[int, int], None]) -> Engine:
    """Read this rank's weights and make its pool. Blocks until all ranks of the instance are there.

    `report(done_bytes, total_bytes)` is called as weights are read. Raises ConfigError for what a person can mend.
    """
    checked = _check(config)
    enter(checked.device)
    mesh = make_mesh(config.instance.device.tp, config.rank, like=checked.like, rendezvous=config.rendezvous)
    try:
        with torch.inference_mode():
            return _load(config, checked, mesh, transport=transport, report=report)
    except torch.OutOfMemoryError as error:
        mesh.close()
        raise out_of_memory(error) from error
    except BaseException:
        mesh.close()
        raise


# ---- what can be said before anything is loaded ------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Checked:
    spec: ModelSpec
    checkpoint: Checkpoint
    device: torch.device
    dtype: torch.dtype
    kv_dtype: torch.dtype
    layout: KVLayout

    @property
    def like(self) -> Tensor:
        """An empty tensor of the model's dtype and device."""
        return torch.empty(0, dtype=self.dtype, device=self.device)


def _check(config: RankConfig) -> _Checked:
    instance, directory = config.instance, Path(config.checkpoint)
    spec, checkpoint = read_spec(directory), open_checkpoint(directory)
    faults: list[ConfigError] = []
    device = _attempt(faults, lambda: device_of(instance.device.device, config.rank))
    dtype = _attempt(faults, lambda: _dtype(instance.model.dtype, spec, checkpoint, device))
    kv_dtype = _attempt(faults, lambda: _kv_dtype(instance.kv.dtype, dtype or torch.float32))
    _attempt(faults, lambda: _check_sizes(instance, spec))
    if not faults:
        _attempt(
            faults, lambda: checkpoint.check(parts(spec, share_of(spec, instance.device.tp, config.rank)), spec.unread)
        )
    if faults or device is None or dtype is None or kv_dtype is None:
        hints = [fault.hint for fault in faults if fault.hint]
        raise ConfigError(*(str(fault) for fault in faults), hint="; ".join(hints))
    layout = layout_of(spec, page_size=instance.kv.page_size, dtype=_name(kv_dtype), order=instance.kv.order)
    return _Checked(spec, checkpoint, device, dtype, kv_dtype, layout)


def _attempt(faults: list[ConfigError], check: Callable[[], T]) -> T | None:
    try:
        return check()
    except ConfigError as fault:
        faults.append(fault)
        return None


def _dtype(word: str, spec: ModelSpec, checkpoint: Checkpoint, device: torch.device | None) -> torch.dtype:
    if word != "auto":
        if word not in _DTYPES:
            raise ConfigError(f"dtype {word!r} is unknown", hint=f"auto, {', '.join(_DTYPES)}")
        return _DTYPES[word]
    stored = _DTYPES.get(spec.dtype or "")
    if stored is None:
        header = checkpoint.headers.get("model.embed_tokens.weight")
        stored = DTYPES.get(header.dtype, torch.float32) if header else torch.float32
    on_cpu = device is None or device.type == "cpu"
    return torch.bfloat16 if stored is torch.float16 and on_cpu else stored


def _kv_dtype(word: str, of_model: torch.dtype) -> torch.dtype:
    if word != "auto" and word not in _KV_DTYPES:
        raise ConfigError(f"kv dtype {word!r} is unknown", hint=f"auto, {', '.join(_KV_DTYPES)}")
    return _KV_DTYPES.get(word, of_model)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _check_sizes(instance: InstanceConfig, spec: ModelSpec) -> None:
    faults, tp, asked = [], instance.device.tp, instance.model.max_model_len
    if not 1 <= tp <= spec.num_query_heads:
        faults.append(f"tp {tp} is not within 1 and the model's {spec.num_query_heads} query heads")
    if asked is not None and not 1 <= asked <= spec.max_positions:
        faults.append(f"max_model_len {asked} is not within 1 and the model's {spec.max_positions} positions")
    if instance.kv.page_size < 1:
        faults.append(f"page_size {instance.kv.page_size} is not positive")
    if instance.step.max_running < 1:
        faults.append(f"max_running {instance.step.max_running} is not positive")
    if faults:
        raise ConfigError(*faults)


# ---- loading ----------------------------------------------------------------------------------------------------


def _load(
    config: RankConfig, checked: _Checked, mesh: Mesh, *, transport: Transport, report: Callable[[int, int], None]
) -> Engine:
    instance, spec, device = config.instance, checked.spec, checked.device
    share = share_of(spec, mesh.tp, mesh.rank)
    limit = instance.model.max_model_len or spec.max_positions
    reader = Reader(checked.checkpoint, parts(spec, share), dtype=checked.dtype, device=device, report=report)
    room = measure(device, weights=reader.nbytes, tp=mesh.tp)
    if device.type == "cuda":
        room.check_weights()
    with reader:
        stacks = takes_kernels(instance.device.kernels, spec, checked.like)
        model = Llama(spec, share, mesh, reader=reader, max_model_len=limit, stacks=stacks)
    pool = _pool(instance, checked, mesh, room=room, transport=transport)
    max_model_len = min(limit, pool.shard.num_pages * instance.kv.page_size)
    max_context = -(-max_model_len // instance.kv.page_size) * instance.kv.page_size
    ops = choose(instance.device.kernels, Shapes(spec, share, max_context, checked.like, checked.kv_dtype))
    num_slots = instance.step.max_running
    slots = Slots(num_slots=num_slots, max_model_len=max_model_len, page_size=instance.kv.page_size, device=device)
    sampler = Sampler(vocab_size=spec.vocab_size, max_slots=num_slots, device=device, draws=ops.draws)
    runner = Runner(model, pool, mesh, ops=ops, slots=slots, sampler=sampler)
    runner.warm_up(
        max_context=max_context, page_size=instance.kv.page_size, max_tokens=instance.step.max_prefill_tokens
    )
    if instance.device.graphs:
        runner.take_graphs(max_context // instance.kv.page_size)
    operators = f"{ops.note}{_products(device)}"
    where = _count(torch.get_num_threads()) if device.type == "cpu" else str(device)
    weights = f"{reader.nbytes / 2**20:.0f} MiB"
    dtypes = _name(checked.dtype) + (f" (KV {checked.layout.dtype})" if checked.kv_dtype is not checked.dtype else "")
    start_up = f"{dtypes}, {where}, {operators}, sums {mesh.note}, weights {weights}"
    card = _card(config, checked, max_model_len)
    notes = Notes(start_up, operators)
    return Engine(card, checked.layout, pool, notes=notes, runner=runner, mesh=mesh)


def _products(device: torch.device) -> str:
    """Whose matrix products the linear layers are, where it is not said yet."""
    if device.type == "cpu":
        return ", oneDNN bf16" if cpu_build.has_bf16_gemm() else ""
    return f", PyTorch {torch.__version__} on {torch.cuda.get_device_name(device)}"


def _count(num_threads: int) -> str:
    return "1 thread" if num_threads == 1 else f"{num_threads} threads"


def _pool(instance: InstanceConfig, checked: _Checked, mesh: Mesh, *, room: Room, transport: Transport) -> KVPool:
    """The same number of pages on every rank: what the smallest can hold."""
    layout, page_size = checked.layout, instance.kv.page_size
    shard = tp_shards(layout, checked.spec.num_query_heads, mesh.tp, 0)[mesh.rank]
    own = count_pages(instance.kv, layout, shard, device=checked.device, num_sharing=mesh.tp)
    num_pages = mesh.minimum(own)
    asked = instance.model.max_model_len
    if num_pages < 1 or (asked is not None and num_pages * page_size < asked):
        own_page = page_nbytes(layout, shard)
        raise room.pool_fault(max(0, num_pages), page_size=page_size, page_nbytes=own_page, max_model_len=asked)
    shard = dataclasses.replace(shard, num_pages=num_pages)
    hands_off = instance.role is not Role.COLOCATED and instance.link.move != "direct"
    return make_pool(
        layout,
        shard,
        dtype=checked.kv_dtype,
        device=checked.device,
        transport=transport,
        staging_nbytes=STAGING_NBYTES if hands_off else 0,
    )


def _card(config: RankConfig, checked: _Checked, max_model_len: int) -> ModelCard:
    directory = Path(config.checkpoint)
    model = config.instance.model
    hub_id = model.model if model.model and not Path(model.model).exists() else None
    return ModelCard(
        name=model.served_name or hub_id or directory.resolve().name,
        fingerprint=checked.checkpoint.fingerprint(json.dumps(dataclasses.asdict(checked.spec), sort_keys=True)),
        vocab_size=checked.spec.vocab_size,
        max_model_len=max_model_len,
        dtype=_name(checked.dtype),
    )
