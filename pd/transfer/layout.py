"""What a KV pool looks like in memory, and which part of a model's KV one rank holds. Pure."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class KVKind(enum.Enum):
    GQA = "gqa"  # K and V a head; MHA and MQA are its ends
    MLA = "mla"  # one latent "head" a token, replicated over tensor parallelism


DEFAULT_ORDER = ("page", "head", "layer", "kv", "token", "dim")
"""Outermost first. Heads stand outside layers, so any range of heads of a page is one contiguous piece
across all layers, and unequal TP sizes cost as few descriptors as equal ones."""


@dataclass(frozen=True, slots=True)
class KVLayout:
    """The whole model's KV, before sharding. Two peers may differ in page_size, dtype and order."""

    num_layers: int
    num_kv_heads: int
    head_dim: int  # elements of a K head
    page_size: int  # tokens
    dtype: str  # "float32" | "bfloat16" | "float16"
    v_head_dim: int | None = None  # elements of a V head, where it differs from K's
    order: tuple[str, ...] = DEFAULT_ORDER
    kind: KVKind = KVKind.GQA


@dataclass(frozen=True, slots=True)
class Shard:
    """The box of layers × heads × pages that one rank holds. All ranges are half-open."""

    layer_start: int
    layer_stop: int
    head_start: int
    head_stop: int
    num_pages: int

    @property
    def layers(self) -> range:
        return range(self.layer_start, self.layer_stop)

    @property
    def heads(self) -> range:
        return range(self.head_start, self.head_stop)
