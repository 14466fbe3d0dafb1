"""Reads the sizes of multi-head latent attention, DeepSeek's. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from pd.runtime.engine.fields import Fields
from pd.runtime.engine.rope_spec import RopeSpec, mscale


@dataclass(frozen=True, slots=True)
class LatentSpec:
    """Keys and values of all heads come out of one latent a token, and all heads share one rotated key.

    A page keeps `size` elements a token: the latent, normed, and behind it the rotated key.
    """

    rank: int  # elements of the latent
    rope_dim: int  # of the rotated part of a query or key
    nope_dim: int  # of the part that is not
    value_dim: int
    query_rank: int | None  # queries too come out of a latent of so many; None: straight from the hidden state
    is_interleaved: bool  # the checkpoint's rotated pairs are neighbours: (0, 1), (2, 3), …
    scale: float  # of scores

    @property
    def size(self) -> int:
        return self.rank + self.rope_dim

    @property
    def query_dim(self) -> int:
        return self.nope_dim + self.rope_dim


def read_latent(fields: Fields, rope: RopeSpec, *, is_interleaved: bool) -> LatentSpec:
    config = fields.config
    if config.get("num_key_value_heads") not in (None, config.get("num_attention_heads")):
        fields.faults.append("num_key_value_heads must be num_attention_heads: latent attention shares no heads")
    if sparse := [name for name in config if name.startswith("index_")]:
        fields.faults.append(f"{sparse[0]}: sparse attention (DeepSeek-V3.2's indexer) is not supported")
    if fields.flag("mlp_bias"):
        fields.faults.append("mlp_bias is not supported beside latent attention")
    given = config.get("rope_scaling") or config.get("rope_parameters") or {}
    all_dim = given.get("mscale_all_dim") if isinstance(given, dict) else None
    if all_dim and rope.kind not in ("default", "yarn"):
        fields.faults.append(f"mscale_all_dim is not supported for rope type {rope.kind!r}; yarn's is")
    nope_dim, rope_dim = fields.size("qk_nope_head_dim", 128), fields.size("qk_rope_head_dim", 64)
    hotter = mscale(rope.factor, rope.mscale_all_dim) if rope.mscale_all_dim else 1.0
    asked = config.get("q_lora_rank", 1536)
    return LatentSpec(
        rank=fields.size("kv_lora_rank", 512),
        rope_dim=rope_dim,
        nope_dim=nope_dim,
        value_dim=fields.size("v_head_dim", 128),
        query_rank=None if asked is None else fields.size("q_lora_rank", 1536),
        is_interleaved=is_interleaved,
        scale=(nope_dim + rope_dim) ** -0.5 * hotter * hotter,
    )
