"""What attention kernels are told of a layer's pages and heads, and the checks that both share."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

# T rows of the step, B requests, H query heads, K kv heads, E size of a key, F of a value, P pages of the pool,
# S tokens a page, L pages of the longest request

LOG2_E = 1.4426950408889634


@dataclass(frozen=True, slots=True)
class Pages:
    """One layer's KV, views of the pool with unit stride in E and F, and which pages hold each request's tokens.

    In float8 pools (`torch.float8_e4m3fn` or its bits as uint8) a value stands for itself times the scale.
    """

    k_PKSE: Tensor
    v_PKSF: Tensor
    table_BL: Tensor  # int32; of each row what lies beyond the request's length is not read
    k_scale: float = 1.0
    v_scale: float = 1.0

    @property
    def is_e4m3(self) -> bool:
        return self.k_PKSE.dtype in (torch.float8_e4m3fn, torch.uint8)

    def variant(self, q_THE: Tensor) -> str:
        """Of the tuning table."""
        return "fp8" if self.is_e4m3 else "fp32" if q_THE.dtype is torch.float32 else ""

    def as_bits(self) -> tuple[Tensor, Tensor]:
        """K and V as a kernel takes them: float8 as bytes."""
        return as_bits(self.k_PKSE), as_bits(self.v_PKSF)


@dataclass(frozen=True, slots=True)
class Heads:
    """What attention in one layer knows before any request comes."""

    first_query_K1: Tensor  # int32: KV head k serves the query heads [first[k], first[k + 1])
    group: int  # the most query heads of one KV head
    scale: float
    window: int | None = None  # how many of the last tokens are seen; None: all

    @property
    def num_kv_heads(self) -> int:
        return self.first_query_K1.shape[0] - 1


def heads_of(
    kv_head_of_query: Sequence[int], *, scale: float, device: torch.device, window: int | None = None
) -> Heads:
    """`kv_head_of_query`: ascending from 0, any number of queries a head. Raises ValueError if it is not."""
    num_kv_heads = max(kv_head_of_query) + 1
    if list(kv_head_of_query) != sorted(kv_head_of_query) or set(kv_head_of_query) != set(range(num_kv_heads)):
        raise ValueError(f"query heads must read KV heads in order, all of them from 0 on; got {kv_head_of_query}")
    first = [list(kv_head_of_query).index(k) for k in range(num_kv_heads)] + [len(kv_head_of_query)]
    group = max(b - a for a, b in itertools.pairwise(first))
    return Heads(torch.tensor(first, dtype=torch.int32, device=device), group, scale, window)


def as_bits(x: Tensor) -> Tensor:
    return x.view(torch.uint8) if x.dtype is torch.float8_e4m3fn else x


def check_attention(q_THE: Tensor, pages: Pages, heads: Heads) -> None:
    """Raise ValueError naming both sides of what does not fit."""
    k_PKSE, v_PKSF = pages.k_PKSE, pages.v_PKSF
    faults = []
    if q_THE.shape[-1] != k_PKSE.shape[-1]:
        faults.append(f"queries have {q_THE.shape[-1]} elements, keys {k_PKSE.shape[-1]}")
    if k_PKSE.shape[:3] != v_PKSF.shape[:3]:
        faults.append(f"keys are {tuple(k_PKSE.shape)}, values {tuple(v_PKSF.shape)}")
    if k_PKSE.shape[1] != heads.num_kv_heads:
        faults.append(f"the pool has {k_PKSE.shape[1]} KV heads, the query heads read {heads.num_kv_heads}")
    if not pages.is_e4m3 and not q_THE.dtype == k_PKSE.dtype == v_PKSF.dtype:
        faults.append(f"queries are {q_THE.dtype}, keys {k_PKSE.dtype}, values {v_PKSF.dtype}")
    if pages.table_BL.dtype != torch.int32 or (pages.table_BL.numel() and pages.table_BL.stride(1) != 1):
        faults.append(f"the page table is {pages.table_BL.dtype}, strides {pages.table_BL.stride()}, not rows of int32")
    if any(x.numel() and x.stride(-1) != 1 for x in (q_THE, k_PKSE, v_PKSF)):
        faults.append("the last dim of queries, keys and values must have stride 1")
    if faults:
        raise ValueError("; ".join(faults))


def gather(pool_PKSE: Tensor, pages_L: Tensor, length: int, scale: float = 1.0) -> Tensor:
    """keys_XKE in float64: the references' view of one request's tokens."""
    if pool_PKSE.dtype is torch.uint8:
        pool_PKSE = pool_PKSE.view(torch.float8_e4m3fn)
    held = -(-length // pool_PKSE.shape[2])
    picked_LKSE = as_bits(pool_PKSE)[pages_L[:held].long()].view(pool_PKSE.dtype).to(torch.float64)
    return picked_LKSE.transpose(1, 2).flatten(0, 1)[:length] * scale


def attend_dense(q_THE: Tensor, keys_XKE: Tensor, values_XKF: Tensor, *, first: int, heads: Heads) -> Tensor:
    """out_THF in float64 of queries at positions first, first + 1, …: softmax(q k^T scale) v over what each sees."""
    bounds = heads.first_query_K1.tolist()
    of_query = [k for k in range(heads.num_kv_heads) for _ in range(bounds[k], bounds[k + 1])]
    keys_XHE, values_XHF = keys_XKE[:, of_query], values_XKF[:, of_query]
    positions_T1 = torch.arange(first, first + len(q_THE), device=q_THE.device)[:, None]
    tokens_X = torch.arange(len(keys_XKE), device=q_THE.device)
    seen_TX = tokens_X <= positions_T1
    if heads.window is not None:
        seen_TX &= tokens_X > positions_T1 - heads.window
    scores_HTX = torch.einsum("the,xhe->htx", q_THE.double() * heads.scale, keys_XHE.double())
    weights_HTX = scores_HTX.masked_fill(~seen_TX, -torch.inf).softmax(-1).nan_to_num(0.0)
    return torch.einsum("htx,xhf->thf", weights_HTX, values_XHF.double())
