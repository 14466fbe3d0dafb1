"""Which part of each tensor of a checkpoint one tensor-parallel rank holds. Pure.

Rules
1. Query heads, columns of the MLP or of each expert, and vocabulary are cut by `split`: any tp, dividing or not.
2. A rank holds the KV heads its query heads read, so KV heads repeat where tp exceeds them.
3. What a rank adds to a sum over ranks it adds alone: biases of o_proj and down_proj belong to rank 0.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from pd.runtime.engine.spec import ModelSpec
from pd.transfer.layout import kv_heads_of, split


class Part(NamedTuple):
    """What a rank reads of a tensor of `shape`: `held` of dim `dim`."""

    shape: tuple[int, ...]
    dim: int
    held: range

    @property
    def num_elements(self) -> int:
        rest = 1
        for dim, size in enumerate(self.shape):
            rest *= len(self.held) if dim == self.dim else size
        return rest


@dataclass(frozen=True, slots=True)
class RankShare:
    """One rank's share of a model."""

    tp: int
    rank: int
    query_heads: range
    kv_heads: range
    columns: range  # of the MLP
    expert_columns: range  # of each expert
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
        vocabulary=vocabularies[rank],
        vocabularies=vocabularies,
        kv_head_of_query=tuple(head // group - kv_heads.start for head in query_heads),
    )


def parts(spec: ModelSpec, share: RankShare) -> dict[str, Part]:
    """Every tensor this rank reads, by its name in the checkpoint, in the order it is used."""
    embedding = Part((spec.vocab_size, spec.hidden_size), 0, share.vocabulary)
    needed = {"model.embed_tokens.weight": embedding}
    for layer in range(spec.num_layers):
        own = _attention(spec, share) | (_experts(spec, share) if spec.has_experts(layer) else _mlp(spec, share))
        needed |= {f"model.layers.{layer}.{name}": part for name, part in own.items()}
    needed["model.norm.weight"] = _whole(spec.hidden_size)
    if not spec.is_tied:
        needed["lm_head.weight"] = embedding
    return needed


def _attention(spec: ModelSpec, share: RankShare) -> dict[str, Part]:
    """And both norms of the layer."""
    hidden = spec.hidden_size
    num_q, num_kv = spec.num_query_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    q, kv = _elements(share.query_heads, spec.head_dim), _elements(share.kv_heads, spec.head_dim)
    needed = {
        "input_layernorm.weight": _whole(hidden),
        "self_attn.q_proj.weight": Part((num_q, hidden), 0, q),
        "self_attn.k_proj.weight": Part((num_kv, hidden), 0, kv),
        "self_attn.v_proj.weight": Part((num_kv, hidden), 0, kv),
        "self_attn.o_proj.weight": Part((hidden, num_q), 1, q),
        "post_attention_layernorm.weight": _whole(hidden),
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


def _mlp(spec: ModelSpec, share: RankShare) -> dict[str, Part]:
    hidden, inner = spec.hidden_size, spec.intermediate_size
    needed = _gated("mlp.", hidden, inner, share.columns)
    if spec.has_mlp_bias:
        needed["mlp.gate_proj.bias"] = Part((inner,), 0, share.columns)
        needed["mlp.up_proj.bias"] = Part((inner,), 0, share.columns)
        needed["mlp.down_proj.bias"] = _first_only(hidden, share)
    return needed


def _experts(spec: ModelSpec, share: RankShare) -> dict[str, Part]:
    assert spec.experts is not None
    hidden, inner, num_experts = spec.hidden_size, spec.experts.intermediate_size, spec.experts.num_experts
    needed = {"mlp.gate.weight": Part((num_experts, hidden), 0, range(num_experts))}
    for expert in range(num_experts):
        needed |= _gated(f"mlp.experts.{expert}.", hidden, inner, share.expert_columns)
    return needed


def _gated(at: str, hidden: int, inner: int, columns: range) -> dict[str, Part]:
    return {
        f"{at}gate_proj.weight": Part((inner, hidden), 0, columns),
        f"{at}up_proj.weight": Part((inner, hidden), 0, columns),
        f"{at}down_proj.weight": Part((hidden, inner), 1, columns),
    }


def _whole(size: int) -> Part:
    return Part((size,), 0, range(size))


def _first_only(size: int, share: RankShare) -> Part:
    return Part((size,), 0, range(size if share.rank == 0 else 0))


def _elements(heads: range, head_dim: int) -> range:
    return range(heads.start * head_dim, heads.stop * head_dim)
