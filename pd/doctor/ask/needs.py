"""What a launch of a model would need, from its config.json alone: nothing is loaded, nothing is downloaded."""

from __future__ import annotations

from pathlib import Path

from huggingface_hub import try_to_load_from_cache
from huggingface_hub.errors import HFValidationError

from pd.doctor.answers import Needs, RankNeeds
from pd.runtime.config import ConfigError
from pd.runtime.engine.shards import layout_of, parts, share_of
from pd.runtime.engine.spec import ModelSpec, read_spec
from pd.transfer.layout import page_nbytes, tp_shards

CPU_DTYPE = {"float16": "bfloat16"}
"""fp16 checkpoints become bfloat16 on CPU (ModelConfig.dtype)."""
KV_DTYPE = {"fp8_e4m3": "float8_e4m3fn"}
"""KVConfig.dtype's words, but auto: the model's."""
ITEMSIZE = {"float32": 4, "bfloat16": 2, "float16": 2}


def answer(model: str, tp: str, page_size: str, device: str, kv_cache_dtype: str = "auto") -> Needs:
    try:
        spec = read_spec(_directory(model))
        return _needs(spec, int(tp), page_size=int(page_size), device=device, kv_cache_dtype=kv_cache_dtype)
    except ConfigError as error:
        return Needs(error="; ".join(str(error).splitlines()), hint=error.hint)


def _directory(model: str) -> Path:
    """A directory that holds config.json: the path itself, or what a hub id left in the cache."""
    path = Path(model).expanduser()
    if path.is_dir():
        return path
    try:
        cached = try_to_load_from_cache(model, "config.json")
    except HFValidationError as error:
        raise ConfigError(f"{model} is neither a directory nor a hub id") from error
    if not isinstance(cached, str):
        hint = "give a directory that holds its config.json (the doctor downloads nothing)"
        raise ConfigError(f"{model} is not on this machine", hint=hint)
    return Path(cached).parent


def _needs(spec: ModelSpec, tp: int, *, page_size: int, device: str, kv_cache_dtype: str) -> Needs:
    if not 1 <= tp <= spec.num_query_heads:
        raise ConfigError(
            f"tp {tp} is not within 1 and the model's {spec.num_query_heads} query heads",
            hint=f"--tp {min(max(tp, 1), spec.num_query_heads)}",
        )
    dtype = spec.dtype or "float32"
    if device == "cpu":
        dtype = CPU_DTYPE.get(dtype, dtype)
    kv_dtype = KV_DTYPE.get(kv_cache_dtype, dtype)
    try:
        layout = layout_of(spec, page_size=page_size, dtype=kv_dtype)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    shares = [share_of(spec, tp, rank) for rank in range(tp)]
    shards = tp_shards(layout, spec.num_query_heads, tp, 0)
    ranks = tuple(
        RankNeeds(
            weights=sum(p.nbytes(ITEMSIZE.get(dtype, 4)) for p in parts(spec, share).values()),
            query_heads=len(share.query_heads),
            kv_heads=len(shard.heads),
            page_nbytes=page_nbytes(layout, shard),
        )
        for share, shard in zip(shares, shards, strict=True)
    )
    return Needs(
        error="",
        architecture=spec.architecture,
        dtype=dtype,
        kv_dtype=kv_dtype,
        num_layers=spec.num_layers,
        num_query_heads=spec.num_query_heads,
        num_kv_heads=spec.num_kv_heads,
        is_latent=spec.latent is not None,
        max_positions=spec.max_positions,
        token_nbytes=layout.token_nbytes,
        ranks=ranks,
    )
