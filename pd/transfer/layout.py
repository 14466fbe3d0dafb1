"""What a KV pool looks like in memory, and which part of a model's KV one rank holds. Pure.

Rules
1. Every offset follows from `KVLayout.order` and a `Shard`; nobody divides or multiplies sizes elsewhere.
2. Offsets and strides are bytes from the start of the rank's pool; a `View`'s strides alone are elements.
3. K and V heads of different size stand side by side where `dim` is inside `kv`. Where `dim` is outside, the
   shorter is padded to the longer, so that each stride stays one number; the padding is never moved.
"""

from __future__ import annotations

import enum
import hashlib
import itertools
from dataclasses import dataclass
from typing import NamedTuple

from pd.transfer.transport import LayoutMismatch


class KVKind(enum.Enum):
    GQA = "gqa"  # K and V a head; MHA and MQA are its ends
    MLA = "mla"  # one latent "head" a token, replicated over tensor parallelism


DEFAULT_ORDER = ("page", "head", "layer", "kv", "token", "dim")
"""Outermost first. Heads stand outside layers, so any range of heads of a page is one contiguous piece
across all layers, and unequal TP sizes cost as few descriptors as equal ones."""

_ITEMSIZES = {"float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1}


@dataclass(frozen=True, slots=True)
class KVLayout:
    """The whole model's KV, before sharding. Two peers may differ in page_size, dtype and order.

    Raises ValueError for what no pool can have, so that a peer's nonsense ends at the codec.
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int  # elements of a K head, or of the latent
    page_size: int  # tokens
    dtype: str  # of the pages, which may be smaller than the model's: one of _ITEMSIZES
    v_head_dim: int | None = None  # elements of a V head, where it differs from K's
    order: tuple[str, ...] = DEFAULT_ORDER
    kind: KVKind = KVKind.GQA

    def __post_init__(self) -> None:
        sizes = (self.num_layers, self.num_kv_heads, self.head_dim, self.page_size)
        if min(sizes) < 1 or (self.v_head_dim is not None and self.v_head_dim < 1):
            raise ValueError(f"a KV layout's sizes are 1 or more, not {sizes}, v_head_dim {self.v_head_dim}")
        if self.dtype not in _ITEMSIZES:
            raise ValueError(f"KV dtype {self.dtype!r} is none of {', '.join(_ITEMSIZES)}")
        if sorted(self.order) != sorted(DEFAULT_ORDER):
            raise ValueError(f"KV order {self.order} is no permutation of {DEFAULT_ORDER}")
        if self.kind is KVKind.MLA and (self.num_kv_heads != 1 or self.v_head_dim is not None):
            heads, dim = self.num_kv_heads, self.v_head_dim
            raise ValueError(f"MLA keeps one latent head and no V, not {heads} heads and v_head_dim {dim}")

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        return _ITEMSIZES[self.dtype]

    @property
    def head_dims(self) -> tuple[int, ...]:
        """Elements of a K head and of a V head; of the latent alone for MLA."""
        if self.kind is KVKind.MLA:
            return (self.head_dim,)
        return (self.head_dim, self.head_dim if self.v_head_dim is None else self.v_head_dim)

    @property
    def token_nbytes(self) -> int:
        """Bytes that one token takes over the whole model, before any replication."""
        return self.num_layers * self.num_kv_heads * sum(self.head_dims) * self.itemsize


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


class Strides(NamedTuple):
    """Where K (or V) stands in one rank's pool, in bytes; `num_dims` is elements."""

    base: int  # of the first element
    page: int
    head: int
    layer: int
    token: int
    dim: int
    num_dims: int

    def offset(self, *, page: int, head: int, layer: int, token: int) -> int:
        """Of a row's first element; head and layer count from the shard's first."""
        return self.base + page * self.page + head * self.head + layer * self.layer + token * self.token


class View(NamedTuple):
    """One layer's K or V as a strided tensor [pages, heads, tokens, dim] over the pool."""

    offset: int  # bytes from the pool's start; a multiple of the itemsize
    shape: tuple[int, int, int, int]
    strides: tuple[int, int, int, int]  # elements


class LayerView(NamedTuple):
    k: View
    v: View | None  # None: MLA, whose V is read out of the latent


def strides(layout: KVLayout, shard: Shard) -> tuple[Strides, ...]:
    """Of K and of V; of the latent alone for MLA."""
    dims = layout.head_dims
    extents = {
        "page": shard.num_pages,
        "head": len(shard.heads),
        "layer": len(shard.layers),
        "token": layout.page_size,
    }
    is_padded = layout.order.index("dim") < layout.order.index("kv")
    extents_dim = [max(dims)] * len(dims) if is_padded else list(dims)
    sizes = [layout.itemsize] * len(dims)  # bytes of one step outwards, for K and for V
    bases = [0] * len(dims)
    steps: list[dict[str, int]] = [{} for _ in dims]
    for axis in reversed(layout.order):
        if axis == "kv":
            bases = [sum(sizes[:i]) for i in range(len(dims))]
            sizes = [sum(sizes)] * len(dims)
            continue
        for i, size in enumerate(sizes):
            steps[i][axis] = size
            sizes[i] = size * (extents_dim[i] if axis == "dim" else extents[axis])
    return tuple(
        Strides(base, s["page"], s["head"], s["layer"], s["token"], s["dim"], num_dims)
        for base, s, num_dims in zip(bases, steps, dims, strict=True)
    )


def page_nbytes(layout: KVLayout, shard: Shard) -> int:
    """Bytes that one page takes of the rank's pool, padding included."""
    dims = layout.head_dims
    is_padded = layout.order.index("dim") < layout.order.index("kv")
    elements = max(dims) * len(dims) if is_padded else sum(dims)
    return len(shard.heads) * len(shard.layers) * layout.page_size * elements * layout.itemsize


def pool_nbytes(layout: KVLayout, shard: Shard) -> int:
    """Bytes of the rank's whole pool."""
    return shard.num_pages * page_nbytes(layout, shard)


def views(layout: KVLayout, shard: Shard) -> tuple[LayerView, ...]:
    """K and V of each local layer, in layer order, for `as_strided` over a pool of the layout's dtype."""
    both = strides(layout, shard)

    def view(s: Strides, layer: int) -> View:
        size = layout.itemsize
        return View(
            s.offset(page=0, head=0, layer=layer, token=0),
            (shard.num_pages, len(shard.heads), layout.page_size, s.num_dims),
            (s.page // size, s.head // size, s.token // size, s.dim // size),
        )

    return tuple(
        LayerView(view(both[0], layer), view(both[1], layer) if len(both) == 2 else None)
        for layer in range(len(shard.layers))
    )


def split(n: int, parts: int) -> tuple[range, ...]:
    """Cut range(n) into `parts` contiguous, balanced ranges, the longer ones first."""
    if parts < 1 or n < 0:
        raise ValueError(f"cannot split {n} into {parts} parts")
    short, num_long = divmod(n, parts)
    starts = [i * short + min(i, num_long) for i in range(parts + 1)]
    return tuple(range(a, b) for a, b in itertools.pairwise(starts))


def kv_heads_of(query_heads: range, num_query_heads: int, num_kv_heads: int) -> range:
    """The KV heads that these query heads read. Raises ValueError unless groups are whole."""
    if num_query_heads % num_kv_heads:
        raise ValueError(f"{num_query_heads} query heads do not share {num_kv_heads} KV heads evenly")
    group = num_query_heads // num_kv_heads
    if not query_heads:
        return range(0)
    return range(query_heads.start // group, (query_heads.stop - 1) // group + 1)


def tp_shards(layout: KVLayout, num_query_heads: int, tp: int, num_pages: int) -> tuple[Shard, ...]:
    """What each rank of a TP group holds: all layers, and the KV heads that its query heads use.

    TP need not divide the heads; a KV head is held by every rank with a query head of its group, MLA's latent
    by all. Raises ValueError where a rank would be left without a query head.
    """
    if not 1 <= tp <= num_query_heads:
        raise ValueError(f"tp {tp} is not within 1 and the {num_query_heads} query heads")
    if layout.kind is KVKind.MLA:
        return (Shard(0, layout.num_layers, 0, 1, num_pages),) * tp
    held = [kv_heads_of(q, num_query_heads, layout.num_kv_heads) for q in split(num_query_heads, tp)]
    return tuple(Shard(0, layout.num_layers, heads.start, heads.stop, num_pages) for heads in held)


def fingerprint(layout: KVLayout) -> str:
    """16 hex digits, equal for two layouts exactly when `check_can_meet` passes."""
    told = ";".join(f"{name}={value}" for name, value in _must_agree(layout).items())
    return hashlib.sha256(told.encode()).hexdigest()[:16]


def check_can_meet(ours: KVLayout, theirs: KVLayout, *, peer: str = "peer") -> None:
    """Raise LayoutMismatch, printing both values, for what no copy can bridge."""
    mine, its = _must_agree(ours), _must_agree(theirs)
    faults = [f"{name}: theirs is {its[name]}, ours is {mine[name]}" for name in mine if its[name] != mine[name]]
    if faults:
        raise LayoutMismatch(f"the KV of {peer} cannot meet ours: " + "; ".join(faults))


def check_shards(layout: KVLayout, shards: tuple[Shard, ...], *, peer: str = "peer") -> None:
    """Raise LayoutMismatch where a shard is empty, reaches outside the model or is larger than offsets can say: peers
    are not trusted."""
    for rank, shard in enumerate(shards):
        fits_layers = 0 <= shard.layer_start < shard.layer_stop <= layout.num_layers
        fits_heads = 0 <= shard.head_start < shard.head_stop <= layout.num_kv_heads
        if not (fits_layers and fits_heads and shard.num_pages >= 0):
            raise LayoutMismatch(
                f"rank {rank} of {peer} says it holds {shard}, the model has {layout.num_layers} layers "
                f"and {layout.num_kv_heads} KV heads"
            )
        if (nbytes := max(1, shard.num_pages) * page_nbytes(layout, shard)) >= 2**63:
            pages = f"{shard.num_pages} pages of {layout.page_size} tokens"
            raise LayoutMismatch(f"rank {rank} of {peer} says it holds {pages}, {nbytes} bytes: no host has so many")


def _must_agree(layout: KVLayout) -> dict[str, object]:
    return {
        "kind": layout.kind.value,
        "num_layers": layout.num_layers,
        "num_kv_heads": layout.num_kv_heads,
        "head_dim": layout.head_dim,
        "v_head_dim": layout.head_dims[-1],
    }
