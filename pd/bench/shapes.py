"""The KV of well-known models, by name or by sizes, and how many descriptors a request of theirs takes. Pure.

Sizes are those of the published config.json files.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from pd.transfer.layout import KVKind, KVLayout, tp_shards
from pd.transfer.plan import routes_between

PAGE_SIZE = 16
_KEYS = ("layers", "heads", "kv-heads", "head-dim")
_LARGEST = 1 << 16


@dataclass(frozen=True, slots=True)
class ModelShape:
    name: str
    num_query_heads: int
    layout: KVLayout


def _gqa(name: str, *, layers: int, heads: int, kv_heads: int, head_dim: int) -> ModelShape:
    layout = KVLayout(layers, kv_heads, head_dim, PAGE_SIZE, "bfloat16")
    return ModelShape(name, heads, layout)


SHAPES = {
    shape.name: shape
    for shape in (
        _gqa("smollm2-135m", layers=30, heads=9, kv_heads=3, head_dim=64),
        _gqa("llama-3-8b", layers=32, heads=32, kv_heads=8, head_dim=128),
        _gqa("llama-3-70b", layers=80, heads=64, kv_heads=8, head_dim=128),
        _gqa("qwen3-32b", layers=64, heads=64, kv_heads=8, head_dim=128),
        ModelShape("deepseek-v3", 128, KVLayout(61, 1, 576, PAGE_SIZE, "bfloat16", kind=KVKind.MLA)),
    )
}


def read_shape(text: str) -> ModelShape:
    """A name of SHAPES, or `layers=32,heads=32,kv-heads=8,head-dim=128`. Raises ValueError."""
    if text in SHAPES:
        return SHAPES[text]
    pairs = [piece.partition("=") for piece in text.split(",")]
    given = {key.strip(): value.strip() for key, _, value in pairs}
    if set(given) != set(_KEYS) or not all(value.isdecimal() and int(value) for value in given.values()):
        known = ", ".join(SHAPES)
        raise ValueError(f"a model shape is one of {known}, or {','.join(f'{key}=N' for key in _KEYS)}; not {text!r}")
    layers, heads, kv_heads, head_dim = sizes = tuple(int(given[key]) for key in _KEYS)
    if max(sizes) > _LARGEST:
        raise ValueError(f"{max(sizes)} is more than any model has: at most {_LARGEST}")
    if heads % kv_heads:
        raise ValueError(f"{heads} heads do not share {kv_heads} kv-heads evenly")
    return _gqa(text, layers=layers, heads=heads, kv_heads=kv_heads, head_dim=head_dim)


def count_descriptors(
    shape: ModelShape, *, prefill_tp: int, decode_tp: int, num_tokens: int, order: tuple[str, ...] | None = None
) -> int:
    """Over all rank pairs, for one request whose pages lie scattered on both sides, so that no two merge: then each
    page costs the same, and two are enough to count. `num_tokens` fill their pages."""
    layout = shape.layout if order is None else replace(shape.layout, order=order)
    src = tp_shards(layout, shape.num_query_heads, prefill_tp, 3)
    dst = tp_shards(layout, shape.num_query_heads, decode_tp, 3)
    routes = routes_between(layout, src, layout, dst)
    of_two = sum(len(route.spans([0, 2], [2, 0], 0, 2 * layout.page_size)) for route in routes)
    return of_two * num_tokens // (2 * layout.page_size)


TP_PAIRS = ((1, 1), (8, 8), (4, 8), (8, 4), (2, 8), (8, 2), (3, 2))
TOKEN_OUTER = ("layer", "kv", "page", "token", "head", "dim")
"""How most keep KV: a tensor a layer, and in a page the tokens outside the heads."""


def descriptor_table(num_tokens: int = 2048) -> Iterator[str]:
    """Markdown lines; docs/transfer.md holds them, and a test that they are these."""
    yield "| prefill TP → decode TP | " + " | ".join(f"{p} → {d}" for p, d in TP_PAIRS) + " |"
    yield "|---|" + "---:|" * len(TP_PAIRS)
    for name in ("llama-3-8b", "llama-3-70b", "qwen3-32b", "deepseek-v3"):
        for label, order in ((name, None), ("… tokens outside heads", TOKEN_OUTER)):
            counts = [
                count_descriptors(SHAPES[name], prefill_tp=p, decode_tp=d, num_tokens=num_tokens, order=order)
                for p, d in TP_PAIRS
            ]
            yield f"| {label} | " + " | ".join(f"{count:,}" for count in counts) + " |"
