"""Which operators a rank computes with: one table, read once at start by device, dtype and head size, and logged.

| kernels | on | rows of a layer, the draw, repacked KV | attention |
|---|---|---|---|
| torch | any device | `cpu_ops`: C++ on a CPU where built, else PyTorch | `NativeAttention`, or `Attention` |
| … with a float8 pool | | the same, but what writes K and V is PyTorch | the same, pages widened a request at a time |
| triton | GPUs; a CPU under TRITON_INTERPRET=1 | `pd.kernels` | `PagedAttention`, or `PagedLatents` |
| auto | | triton on a GPU where it can be imported and takes dtype and heads, else torch | |

Over latents PyTorch's and C++'s attention takes them for keys and values alike (`OverLatents`).

`pd.kernels` is imported here alone, when it is chosen: where triton is not installed nothing else may ask for it.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pd.runtime.config import ConfigError
from pd.runtime.engine import cpu_ops
from pd.runtime.engine.attention import Attend, Attention, NamedAttend, OverLatents
from pd.runtime.engine.cpu_attention import MAX_HEAD_SIZE, NativeAttention
from pd.runtime.engine.cpu_build import native_for
from pd.runtime.engine.draws import Draws, Filters, Penalties, torch_draws
from pd.runtime.engine.experts import Experts, mix
from pd.runtime.engine.paged_attention import PagedAttention, PagedLatents
from pd.runtime.engine.shards import RankShare
from pd.runtime.engine.spec import ModelSpec
from pd.runtime.engine.staging import upload
from pd.transfer.packed import Place
from pd.transfer.reshard import Reshard, reshard

KERNEL_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
LARGEST_HEAD, LARGEST_LATENT, MOST_EXPERTS = 256, 512, 1024  # elements; the tuning tables end there


@dataclass(frozen=True, slots=True)
class Operators:
    """One rank's, with the contracts that `cpu_ops` states."""

    rms_norm: Callable[..., Tensor]
    silu_mul: Callable[[Tensor], Tensor]
    experts: Callable[[Tensor, Experts], Tensor]
    rope_and_write: Callable[..., None]
    draws: Draws
    attention: Attend
    reshard: Reshard
    pads: bool
    """Whether rows of context 0 on page -1 do nothing, so that a smaller batch can fill a captured graph."""
    note: str
    """For the start-up line; equal where two ranks compute the same bits."""


@dataclass(frozen=True, slots=True)
class Shapes:
    """What the choice depends on."""

    spec: ModelSpec
    share: RankShare
    max_context: int  # tokens of the longest request, rounded up to whole pages
    like: Tensor  # of the model's dtype and device
    kv_dtype: torch.dtype  # of the pool: the model's, or e4m3fn


def takes_kernels(kernels: str, spec: ModelSpec, like: Tensor) -> bool:
    """Whether `choose` will take Triton's. Raises ConfigError where kernels are forced that cannot run here."""
    reason = why_not(spec, like)
    if kernels == "triton" and reason:
        raise ConfigError(f"--kernels triton: {reason}", hint="--kernels auto takes PyTorch where kernels cannot run")
    return kernels == "triton" or (kernels == "auto" and like.device.type == "cuda" and not reason)


def choose(kernels: str, shapes: Shapes) -> Operators:
    """Raises ConfigError as `takes_kernels`."""
    if takes_kernels(kernels, shapes.spec, shapes.like):
        return _triton(shapes)
    is_fallback = kernels == "auto" and shapes.like.device.type == "cuda"
    return _torch(shapes, f" (no kernels: {why_not(shapes.spec, shapes.like)})" if is_fallback else "")


def why_not(spec: ModelSpec, like: Tensor) -> str:
    """Why the kernels cannot run; empty if they can."""
    experts, latent = spec.experts, spec.latent
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    if not _kernel("target").can_run(like.device):
        return f"they run on GPUs, and on a CPU only under TRITON_INTERPRET=1; this is {like.device.type}"
    if like.dtype not in KERNEL_DTYPES:
        return f"they do not compute in {like.dtype}"
    if latent is None and spec.head_dim > LARGEST_HEAD:
        return f"heads of {spec.head_dim} elements are larger than {LARGEST_HEAD}"
    if latent is not None and latent.rank > LARGEST_LATENT:
        return f"latents of {latent.rank} elements are larger than {LARGEST_LATENT}"
    if experts is not None and experts.num_experts > MOST_EXPERTS:
        return f"{experts.num_experts} experts are more than {MOST_EXPERTS}"
    if experts is not None and experts.num_groups.bit_count() != 1:
        return f"{experts.num_groups} groups of experts are no power of two"
    return ""


def _torch(shapes: Shapes, why: str) -> Operators:
    is_narrower = shapes.kv_dtype is not shapes.like.dtype
    attention = _torch_attention(shapes)
    rows = cpu_ops.describe() if shapes.like.device.type == "cpu" else "PyTorch's operators"
    return Operators(
        rms_norm=cpu_ops.rms_norm,
        silu_mul=cpu_ops.silu_mul,
        experts=mix,
        rope_and_write=cpu_ops.rope_and_write_reference if is_narrower else cpu_ops.rope_and_write,
        draws=torch_draws(),
        attention=attention,
        reshard=reshard,
        pads=False,
        note=f"{rows}{why}, attention {attention.note}",
    )


def _torch_attention(shapes: Shapes) -> NamedAttend:
    attend: NamedAttend
    if native_for(shapes.like) is not None and shapes.spec.head_dim <= MAX_HEAD_SIZE:
        attend = NativeAttention(shapes.spec, shapes.share)
    else:
        attend = Attention(
            shapes.spec,
            shapes.share,
            max_context=shapes.max_context,
            like=shapes.like,
            kv_dtype=shapes.kv_dtype,
        )
    return attend if shapes.spec.latent is None else OverLatents(attend, shapes.spec.latent.rank)


def _triton(shapes: Shapes) -> Operators:
    target = _kernel("target").target_of(shapes.like)
    return Operators(
        rms_norm=_kernel("rms_norm").rms_norm,
        silu_mul=_kernel("silu_mul").silu_mul,
        experts=_mix,
        rope_and_write=_kernel("kv_write").rope_and_write,
        draws=_triton_draws(),
        attention=_triton_attention(shapes),
        reshard=_triton_reshard(),
        pads=True,
        note=f"Triton kernels for {target.arch}",
    )


def _triton_attention(shapes: Shapes) -> Attend:
    if shapes.spec.latent is not None:
        return PagedLatents(shapes.spec.latent, kernels=(_kernel("paged"), _kernel("mla")))
    kernels = _kernel("paged"), _kernel("paged_decode"), _kernel("paged_prefill")
    return PagedAttention(shapes.spec, shapes.share, device=shapes.like.device, kernels=kernels)


def _mix(x_TI: Tensor, experts: Experts) -> Tensor:
    """`mix` by kernels: pairs of token and expert in order of experts, then two grouped products. Asks nothing of the
    device.
    """
    route, sort, gemm = _kernel("moe_route"), _kernel("moe_sort"), _kernel("grouped_gemm")
    spec = experts.spec
    routing = route.Routing(
        spec.num_chosen, spec.is_sigmoid, spec.is_renormalised, spec.factor, spec.num_groups, spec.num_groups_chosen
    )
    weights_TK, ids_TK = route.route(experts.router(x_TI), routing, experts.bias_X)
    num_pairs = ids_TK.numel()
    tiles = sort.sort_pairs(ids_TK, spec.num_experts, gemm.tile_rows(num_pairs, spec.num_experts, x_TI))
    gate_up_PN = gemm.grouped_gemm(x_TI, experts.gate_up_XNI, tiles, num_pairs=num_pairs, share=spec.num_chosen)
    inner_PC = _kernel("silu_mul").silu_mul(gate_up_PN)
    out_PI = gemm.grouped_gemm(inner_PC, experts.down_XIC, tiles, num_pairs=num_pairs, share=1)
    out_TI: Tensor = gemm.combine(out_PI, weights_TK)
    return out_TI


def _triton_reshard() -> Reshard:
    """The kernel takes heads that lie in one piece; other orders, and float8 with its limit, are PyTorch's."""
    kernel = _kernel("kv_reshard").reshard

    def reshard_places(src_PHLSE: Tensor, dst_PHLSE: Tensor, places_N4: Sequence[Place], *, unit: int) -> None:
        is_narrow = torch.float8_e4m3fn in (src_PHLSE.dtype, dst_PHLSE.dtype)
        if is_narrow or src_PHLSE.stride(4) != 1 or dst_PHLSE.stride(4) != 1:
            reshard(src_PHLSE, dst_PHLSE, places_N4, unit=unit)
            return
        (places,) = upload([np.array(places_N4, np.int32)], dst_PHLSE.device)
        kernel(src_PHLSE, dst_PHLSE, places, unit=unit)

    return reshard_places


def _triton_draws() -> Draws:
    race, floors, penalise = _kernel("race"), _kernel("floors").floors, _kernel("penalties").penalise

    def floors_of(logits_NV: Tensor, filters: Filters) -> Tensor:
        min_p, top_k, top_p = filters
        arrays = [np.array(min_p, np.float32), np.array(top_k, np.int32), np.array(top_p, np.float32)]
        floor_N: Tensor = floors(logits_NV, *upload(arrays, logits_NV.device))
        return floor_N

    def penalise_rows(logits_BV: Tensor, counts: tuple[Tensor, Tensor], rows: Penalties) -> None:
        penalise(logits_BV, counts, **rows._asdict())

    return Draws(race.argmax, race.race, floors_of, penalise_rows)


def _kernel(name: str) -> Any:
    return importlib.import_module(f"pd.kernels.{name}")
