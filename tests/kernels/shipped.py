"""The launches that are compiled for every target: name -> a call on CPU tensors, of the sizes of models people serve.

Pools are larger than 2 GiB, as in production: AMD's loads differ from those of a small one. Nothing touches them.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from pd.kernels import (
    floors,
    grammar_mask,
    grouped_gemm,
    kv_reshard,
    kv_write,
    mla,
    moe_route,
    moe_sort,
    paged_decode,
    paged_prefill,
    penalties,
    race,
    rms_norm,
    silu_mul,
)
from pd.kernels.moe_route import Routing
from pd.kernels.paged import Heads, Pages, heads_of

BF16, FP32, U8 = torch.bfloat16, torch.float32, torch.uint8
CPU = torch.device("cpu")
VOCAB = 128256
BATCHES = ((4, 512), (1, 1), (16, 513))
"""(requests, pages of the longest): a launch is made for each, and all of them must be one compilation."""


def ints(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.zeros(shape, dtype=dtype)


def pools(num_kv: int, key: int, value: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """32 layers in the house's order, of 3 GiB."""
    own = 16 * (key + value)
    page = num_kv * 32 * own
    num_pages = (3 << 30) // dtype.itemsize // page
    flat = torch.empty(num_pages * page, dtype=dtype)
    k = flat.as_strided((num_pages, num_kv, 16, key), (page, 32 * own, key, 1))
    return k, flat.as_strided((num_pages, num_kv, 16, value), (page, 32 * own, value, 1), 16 * key)


def pages_of(num_kv: int, key: int, value: int, dtype: torch.dtype) -> list[Pages]:
    """Of each batch."""
    kv = pools(num_kv, key, value, dtype)
    return [Pages(*kv, ints(*batch)) for batch in BATCHES]


def heads(num_kv: int, group: int, key: int, window: int | None = None) -> Heads:
    return heads_of([k for k in range(num_kv) for _ in range(group)], scale=key**-0.5, device=CPU, window=window)


def decode(
    group: int, size: tuple[int, int] = (128, 128), *, splits: int = 16, tokens: int = 1, **other: object
) -> Callable[[], object]:
    q_dtype, kv_dtype = other.get("q", BF16), other.get("kv", BF16)

    def launch() -> None:
        own = heads(8, group, size[0], other.get("window"))
        for pages in pages_of(8, *size, kv_dtype):
            batch = len(pages.table_BL)
            q = torch.empty(batch * tokens, 8 * group, size[0], dtype=q_dtype)
            paged_decode.paged_decode(q, pages, ints(batch), own, num_splits=splits)

    return launch


def prefill(group: int, size: tuple[int, int] = (128, 128), **other: object) -> Callable[[], object]:
    q_dtype, kv_dtype = other.get("q", BF16), other.get("kv", BF16)

    def launch() -> None:
        own = heads(8, group, size[0], other.get("window"))
        for pages in pages_of(8, *size, kv_dtype):
            batch = len(pages.table_BL)
            q = torch.empty(128 * batch + 1, 8 * group, size[0], dtype=q_dtype)
            paged_prefill.paged_prefill(q, pages, (ints(batch + 1), ints(batch)), own)

    return launch


def rope(kv_dtype: torch.dtype) -> Callable[[], object]:
    def launch() -> None:
        qkv = torch.empty(4, 48, 128, dtype=BF16).split_with_sizes((32, 8, 8), dim=1)
        angles = torch.empty(4, 64), torch.empty(4, 64)
        places = {"pages_T": ints(4, dtype=torch.int64), "offsets_T": ints(4, dtype=torch.int64)}
        kv_write.rope_and_write(qkv, angles, pools(8, 128, 128, kv_dtype), **places)

    return launch


def norm(size: int, *, has_residual: bool) -> Callable[[], object]:
    def launch() -> None:
        x = torch.empty(4, size, dtype=BF16)
        rms_norm.rms_norm(x, torch.empty(size, dtype=BF16), 1e-5, torch.empty_like(x) if has_residual else None)

    return launch


def sample() -> None:
    counts = ints(8, VOCAB), torch.empty(8, VOCAB, dtype=torch.bool)
    for num_rows, _ in BATCHES:
        logits, index = torch.empty(num_rows, VOCAB), ints(num_rows, dtype=torch.int64)
        strengths = torch.empty(3, num_rows)
        penalties.penalise(logits, counts, row_of_N=index, history_of_N=index, strengths_3N=strengths)
        grammar_mask.grammar_mask(logits, ints(2, VOCAB // 32), ints(num_rows))
        floor = floors.floors(logits, torch.ones(num_rows), ints(num_rows), torch.ones(num_rows))
        race.race(logits, floor, index, index)


def latent_pool(dtype: torch.dtype) -> Tensor:
    """DeepSeek-V3's, of 3 GiB."""
    return torch.empty((3 << 30) // dtype.itemsize // (16 * 576), 1, 16, 576, dtype=dtype)


def latents(*, splits: int | None, dtype: torch.dtype = BF16, kv_dtype: torch.dtype = BF16) -> Callable[[], object]:
    """DeepSeek-V3's 128 heads; splits None: prefill."""

    def launch() -> None:
        kv = latent_pool(kv_dtype)
        for batch, width in BATCHES:
            pages = Pages(kv, kv[..., :512], ints(batch, width))
            if splits is None:
                q = torch.empty(16 * batch, 128, 576, dtype=dtype)
                mla.mla_prefill(q, pages, (ints(batch + 1), ints(batch)), scale=0.1)
            else:
                q = torch.empty(batch, 128, 576, dtype=dtype)
                mla.mla_decode(q, pages, ints(batch), scale=0.1, num_splits=splits)

    return launch


def write_latents(dtype: torch.dtype) -> Callable[[], object]:
    """As the engine does it: the rotated key behind its latent, and 128 heads' queries turned where they stand."""

    def launch() -> None:
        kv, q = latent_pool(dtype), torch.empty(4, 128, 192, dtype=BF16)[..., 128:]
        made = torch.empty(4, 1, 576 + 1536, dtype=BF16)
        angles = torch.empty(4, 32), torch.empty(4, 32)
        places = {"pages_T": ints(4, dtype=torch.int64), "offsets_T": ints(4, dtype=torch.int64)}
        pools = kv[..., 512:], kv[..., :512]
        kv_write.rope_and_write((q, made[..., -64:], torch.empty(4, 1, 512, dtype=BF16)), angles, pools, **places)

    return launch


def experts(pairs_an_expert: int) -> Callable[[], object]:
    """8 of 256, hidden 7168, inner 2048."""

    def launch() -> None:
        routing = Routing(8, is_sigmoid=True, num_groups=8, num_groups_chosen=4)
        w = torch.empty(256, 4096, 7168, dtype=BF16)
        for num_tokens in (32 * pairs_an_expert, 32 * pairs_an_expert - 1):
            weights, ids = moe_route.route(torch.empty(num_tokens, 256), routing, torch.empty(256))
            x, num_pairs = torch.empty(num_tokens, 7168, dtype=BF16), 8 * num_tokens
            tiles = moe_sort.sort_pairs(ids, 256, grouped_gemm.tile_rows(num_pairs, 256, x))
            grouped_gemm.combine(grouped_gemm.grouped_gemm(x, w, tiles, num_pairs=num_pairs, share=8), weights)

    return launch


def move(dtype: torch.dtype) -> Callable[[], object]:
    """bf16 pages to a staging buffer, the heads of one of two ranks."""

    def launch() -> object:
        k, _ = pools(8, 128, 128, BF16)
        src = k.as_strided((len(k), 4, 32, 16, 128), (k.stride(0), k.stride(1), 2 * 16 * 128, 128, 1))
        return kv_reshard.reshard(src, torch.empty(8, 4, 32, 16, 128, dtype=dtype), ints(8, 4), unit=16)

    return launch


SHIPPED: dict[str, Callable[[], object]] = {
    "decode 128, group 4": decode(4),
    "decode 64, group 8, fp8 KV, one split": decode(8, (64, 64), kv=U8, splits=1),
    "prefill 128, group 4": prefill(4),
    "prefill 64, group 3, window": prefill(3, (64, 64), window=4096),
    "rope and write": rope(BF16),
    "rope and write, fp8 KV": rope(U8),
    "norm 4096 and residual": norm(4096, has_residual=True),
    "gate": lambda: silu_mul.silu_mul(torch.empty(4, 28672, dtype=BF16)),
    "sample": sample,
    "MLA decode, 128 heads": latents(splits=16),
    "experts, 8 of 256, few tokens": experts(1),
    "move to bf16": move(BF16),
}

WIDE: dict[str, Callable[[], object]] = {
    "MLA prefill, 128 heads": latents(splits=None),
    "MLA decode, 128 heads, one split": latents(splits=1),
    "MLA decode, 128 heads, fp8 KV": latents(splits=16, kv_dtype=U8),
    "MLA prefill, 128 heads, fp8 KV": latents(splits=None, kv_dtype=U8),
    "MLA decode, 128 heads, fp32": latents(splits=16, dtype=FP32, kv_dtype=FP32),
    "MLA prefill, 128 heads, fp32": latents(splits=None, dtype=FP32, kv_dtype=FP32),
    "write latents": write_latents(BF16),
    "write latents, fp8 KV": write_latents(U8),
    "argmax bf16": lambda: race.argmax(torch.empty(4, VOCAB, dtype=BF16)),
    **{f"decode {d}, group {g}": decode(g, (d, d)) for d in (64, 80, 96, 256) for g in (1, 8)},
    **{f"decode 128, group {g}": decode(g) for g in (1, 8, 16)},
    "decode 192/128": decode(1, (192, 128)),
    "decode 128, group 4, 4 tokens": decode(4, tokens=4),
    "decode 128, group 4, window": decode(4, window=4096),
    "decode 128, group 4, fp32": decode(4, q=FP32, kv=FP32),
    "decode 128, group 4, fp8 KV": decode(4, kv=U8),
    **{f"decode {d}, group 4, fp32": decode(4, (d, d), q=FP32, kv=FP32) for d in (64, 256)},
    "decode 256, group 4, fp8 KV": decode(4, (256, 256), kv=U8),
    **{f"prefill {d}, group {g}": prefill(g, (d, d)) for d in (64, 80, 96, 256) for g in (1, 8)},
    **{f"prefill 128, group {g}": prefill(g) for g in (1, 8, 16)},
    "prefill 192/128": prefill(1, (192, 128)),
    "prefill 128, group 4, window": prefill(4, window=4096),
    "prefill 128, group 4, fp32": prefill(4, q=FP32, kv=FP32),
    "prefill 128, group 4, fp8 KV": prefill(4, kv=U8),
    **{f"prefill {d}, group 4, fp32": prefill(4, (d, d), q=FP32, kv=FP32) for d in (64, 256)},
    **{f"prefill {d}, group 4, fp8 KV": prefill(4, (d, d), kv=U8) for d in (64, 256)},
    **{f"experts, {n} pairs each": experts(n) for n in (64, 512)},
    "move to fp8": move(U8),
    "spans": lambda: kv_reshard.copy_spans(torch.empty(4096, dtype=U8), torch.empty(4096, dtype=U8), [(0, 64, 1024)]),
    **{f"norm {size}": norm(size, has_residual=False) for size in (128, 8192)},
}
