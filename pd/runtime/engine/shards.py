"""Which part of each tensor of a checkpoint one tensor-parallel rank holds. Pure.

Rules
1. Query heads, columns of the MLP or of each expert, and vocabulary are cut by `split`: any tp, dividing or not.
2. A rank holds the KV heads its query heads read, so KV heads repeat where tp exceeds them. A latent, and what makes
   it of the hidden state, is every rank's; what makes heads of it is cut as heads are.
3. What a rank adds to a sum over ranks it adds alone: biases of o_proj and down_proj belong to rank 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from pd.runtime.engine.expert_spec import ExpertSpec
from pd.runtime.engine.latent_spec import LatentSpec
from pd.runtime.engine.spec import ModelSpec
from pd.transfer.layout import DEFAULT_ORDER, KVKind, KVLayout, kv_heads_of, split


class Part(NamedTuple):
    """What a rank reads of a tensor of `shape`: `held` of dim `dim`."""

    shape: tuple[int, ...]
    dim: int
    held: range
    is_wide: bool = False  # kept as float32, whatever the model's dtype
    scale_block: tuple[int, int] | None = None  # rows and columns that share a scale where it is stored in float8

    @property
    def num_elements(self) -> int:
        rest = 1
        for dim, size in enumerate(self.shape):
            rest *= len(self.held) if dim == self.dim else size
        return rest

    def nbytes(self, itemsize: int) -> int:
        """`itemsize`: of the model's dtype."""
        return self.num_elements * (4 if self.is_wide else itemsize)


@dataclass(frozen=True, slots=True)
class RankShare:
    """One rank's share of a model."""

    tp: int
    rank: int
    query_heads: range
    kv_heads: range
    columns: range  # of the MLP
    expert_columns: range  # of each expert
    shared_columns: range  # of the MLP beside experts
    vocabulary: range
    vocabularies: tuple[range, ...]  # of all ranks
    kv_head_of_query: tuple[int, ...]  # for each of the rank's query heads, its KV head's index on the rank


def share_of(spec: ModelSpec, tp: int, rank: int) -> RankShare:
    query_heads = split(spec.num_query_heads, tp)[rank]
    kv_heads = kv_heads_of(query_heads, spec.num_query_heads, spec.num_kv_heads)
    group = spec.num_query_heads // spec.num_kv_heads
    vocabularies = split(spec.vocab_size, tp)
    return RankShare(
        tp=tp,
        rank=rank,
        query_heads=query_heads,
        kv_heads=kv_heads,
        columns=split(spec.intermediate_size, tp)[rank],
        expert_columns=split(spec.experts.intermediate_size, tp)[rank] if spec.experts else range(0),
        shared_columns=split(spec.experts.shared_size, tp)[rank] if spec.experts else range(0),
        vocabulary=vocabularies[rank],
        vocabularies=vocabularies,
        kv_head_of_query=tuple(head // group - kv_heads.start for head in query_heads),
    )


def layout_of(spec: ModelSpec, *, page_size: int, dtype: str, order: tuple[str, ...] = DEFAULT_ORDER) -> KVLayout:
    """The model's KV. Raises ValueError for a page size or dtype that no pool has."""
    return KVLayout(
        num_layers=spec.num_layers,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        page_size=page_size,
        dtype=dtype,
        order=order,
        kind=KVKind.GQA if spec.latent is None else KVKind.MLA,
    )


def parts(spec: ModelSpec, share: RankShare) -> dict[str, Part]:
    """Every tensor this rank reads, by its name in the checkpoint, in the order it is used."""
    embedding = Part((spec.vocab_size, spec.hidden_size), 0, share.vocabulary)
    needed = {"model.embed_tokens.weight": embedding}
    for layer in range(spec.num_layers):
        own = _norms(spec) | (_attention(spec, share) if spec.latent is None else _latent(spec, spec.latent, share))
        own |= _experts(spec.experts, spec.hidden_size, share) if spec.has_experts(layer) else _mlp(spec, share)
        needed |= {f"model.layers.{layer}.{name}": part for name, part in own.items()}
    needed["model.norm.weight"] = _whole(spec.hidden_size)
    if not spec.is_tied:
        needed["lm_head.weight"] = embedding
    if spec.scale_block is None:
        return needed
    return {
        n: part if len(part.shape) == 1 else part._replace(scale_block=spec.scale_block) for n, part in needed.items()
    }


def _norms(spec: ModelSpec) -> dict[str, Part]:
    return {f"{name}_layernorm.weight": _whole(spec.hidden_size) for name in ("input", "post_attention")}


def _attention(spec: ModelSpec, share: RankShare) -> dict[str, Part]:
    hidden = spec.hidden_size
    num_q, num_kv = spec.num_query_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    q, kv = _elements(share.query_heads, spec.head_dim), _elements(share.kv_heads, spec.head_dim)
    needed = {
        "self_attn.q_proj.weight": Part((num_q, hidden), 0, q),
        "self_attn.k_proj.weight": Part((num_kv, hidden), 0, kv),
        "self_attn.v_proj.weight": Part((num_kv, hidden), 0, kv),
        "self_attn.o_proj.weight": Part((hidden, num_q), 1, q),
    }
    if spec.has_qkv_bias:
        needed["self_attn.q_proj.bias"] = Part((num_q,), 0, q)
        needed["self_attn.k_proj.bias"] = Part((num_kv,), 0, kv)
        needed["self_attn.v_proj.bias"] = Part((num_kv,), 0, kv)
    if spec.has_output_bias:
        needed["self_attn.o_proj.bias"] = _first_only(hidden, share)
    if spec.has_qk_norm:
        needed["self_attn.q_norm.weight"] = _whole(spec.head_dim)
        needed["self_attn.k_norm.weight"] = _whole(spec.head_dim)
    return needed


def _latent(spec: ModelSpec, latent: LatentSpec, share: RankShare) -> dict[str, Part]:
    """Every rank makes the whole latents of a token, and of them its own heads' queries, keys and values."""
    hidden, num_heads, heads = spec.hidden_size, spec.num_query_heads, share.query_heads
    q = Part((num_heads * latent.query_dim, latent.query_rank or hidden), 0, _elements(heads, latent.query_dim))
    kv_dim = latent.nope_dim + latent.value_dim
    needed = {
        "self_attn.kv_a_proj_with_mqa.weight": Part((latent.size, hidden), 0, range(latent.size)),
        "self_attn.kv_a_layernorm.weight": _whole(latent.rank),
        "self_attn.kv_b_proj.weight": Part((num_heads * kv_dim, latent.rank), 0, _elements(heads, kv_dim)),
        "self_attn.o_proj.weight": Part((hidden, num_heads * latent.value_dim), 1, _elements(heads, latent.value_dim)),
    }
    if latent.query_rank is None:
        needed["self_attn.q_proj.weight"] = q
    else:
        rank = latent.query_rank
        needed["self_attn.q_a_proj.weight"] = Part((rank, hidden), 0, range(rank))
        needed["self_attn.q_a_layernorm.weight"] = _whole(rank)
        needed["self_attn.q_b_proj.weight"] = q
        if spec.has_qkv_bias:
            needed["self_attn.q_a_proj.bias"] = _whole(rank)
    if spec.has_qkv_bias:
        needed["self_attn.kv_a_proj_with_mqa.bias"] = _whole(latent.size)
    if spec.has_output_bias:
        needed["self_attn.o_proj.bias"] = _first_only(hidden, share)
    return needed


def _mlp(spec: ModelSpec, share: RankShare) -> dict[str, Part]:
    hidden, inner = spec.hidden_size, spec.intermediate_size
    needed = _gated("mlp.", hidden, inner, share.columns)
    if spec.has_mlp_bias:
        needed["mlp.gate_proj.bias"] = Part((inner,), 0, share.columns)
        needed["mlp.up_proj.bias"] = Part((inner,), 0, share.columns)
        needed["mlp.down_proj.bias"] = _first_only(hidden, share)
    return needed


def _experts(experts: ExpertSpec | None, hidden: int, share: RankShare) -> dict[str, Part]:
    assert experts is not None
    at, wide = experts.at, experts.is_router_wide
    needed = {f"{at}gate.weight": Part((experts.num_experts, hidden), 0, range(experts.num_experts), wide)}
    if experts.has_bias:
        needed[f"{at}gate.e_score_correction_bias"] = _whole(experts.num_experts)._replace(is_wide=True)
    names = experts.gate_up_down
    for expert in range(experts.num_experts):
        own = _gated(f"{at}experts.{expert}.", hidden, experts.intermediate_size, share.expert_columns, names=names)
        needed |= own
    if experts.shared_size:
        needed |= _gated(f"{at}shared_experts.", hidden, experts.shared_size, share.shared_columns)
    return needed


def _gated(
    at: str, hidden: int, inner: int, columns: range, *, names: Sequence[str] = ("gate_proj", "up_proj", "down_proj")
) -> dict[str, Part]:
    gate, up, down = names
    return {
        f"{at}{gate}.weight": Part((inner, hidden), 0, columns),
        f"{at}{up}.weight": Part((inner, hidden), 0, columns),
        f"{at}{down}.weight": Part((hidden, inner), 1, columns),
    }


def _whole(size: int) -> Part:
    return Part((size,), 0, range(size))


def _first_only(size: int, share: RankShare) -> Part:
    return Part((size,), 0, range(size if share.rank == 0 else 0))


def _elements(heads: range, head_dim: int) -> range:
    return range(heads.start * head_dim, heads.stop * head_dim)
