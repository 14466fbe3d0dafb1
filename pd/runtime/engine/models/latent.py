"""Multi-head latent attention of a layer, absorbed: pages keep one latent a token, from which no key is ever made.

    c = norm(latent of x)     k = rotated part of x, one for all heads       a page keeps c and k
    q = queries of x, or of a latent of their own; each head has a plain part and a rotated one
    score = (up_k.T q_plain) . c + q_rotated . k        where up_k c would be the head's key: that is put into the query
    out = o(up_v (sum of weights * c))                  and up_v, which makes values, is applied to the sum

The same numbers as with keys and values made first (DeepSeek-V2, 2024, section 2.1; transformers'
modeling_deepseek_v2.py and _v3.py do that), but for rounding: in 16 bits queries and sums of latents are rounded once
more, keys and values once less.

Checkpoints rotate neighbours, (0, 1), (2, 3), …; we rotate element d with d + D. Both queries and keys are made in our
order by putting the rows of their weights into it, and a product of two does not know its elements' order.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from pd.runtime.engine.inputs import StepInputs
from pd.runtime.engine.latent_spec import LatentSpec
from pd.runtime.engine.layers import Linear, make_head_linear, make_linear
from pd.runtime.engine.operators import Operators
from pd.runtime.engine.shards import RankShare
from pd.runtime.engine.spec import ModelSpec
from pd.runtime.engine.weights import Reader

# T tokens of the step, I hidden, H query heads of this rank, R latent elements, E those and the rotated ones,
# Q elements of a query, N of its plain part, V of a value

NORM_EPS = 1e-6
"""Of latents: both models leave it at the class's default, whatever config.json says of the other norms."""


@dataclass(frozen=True, slots=True)
class Latent:
    """One rank's part of one layer's attention. The parts of all ranks are to be summed."""

    spec: LatentSpec
    down: Linear  # of x: the queries, or their latent; the latent; the rotated key
    query_norm: Tensor | None
    query: Linear | None  # of their latent, where they have one
    norm_R: Tensor
    absorb: Linear  # of a head's plain query: one that is compared with latents
    value: Linear  # of a head's sum of latents
    output: Linear
    num_heads: int

    def write(
        self,
        x_TI: Tensor,
        ops: Operators,
        *,
        turns: tuple[Tensor, Tensor],
        pool: tuple[Tensor, Tensor],
        inputs: StepInputs,
    ) -> Tensor:
        """Project, rotate, and put latents and rotated keys into their pages. Returns q_THE, compared with those."""
        spec, rank = self.spec, self.spec.rank
        made = self.down(x_TI)
        first, latent_TR, key = made.split_with_sizes((made.shape[1] - spec.size, rank, spec.rope_dim), dim=1)
        if self.query is not None and self.query_norm is not None:
            first = self.query(ops.rms_norm(first, self.query_norm, NORM_EPS))
        q_THQ = first.view(len(first), self.num_heads, spec.query_dim)
        plain_THN, rotated = q_THQ.split_with_sizes((spec.nope_dim, spec.rope_dim), dim=2)
        latent_TR = ops.rms_norm(latent_TR, self.norm_R, NORM_EPS)
        kept = pool[0][..., rank:], pool[0][..., :rank]
        places = {"pages_T": inputs.pages_T, "offsets_T": inputs.offsets_T}
        ops.rope_and_write((rotated, key[:, None], latent_TR[:, None]), turns, kept, **places)
        return torch.cat((self.absorb(plain_THN), rotated), dim=2)

    def attend(self, q_THE: Tensor, ops: Operators, *, pool: tuple[Tensor, Tensor], inputs: StepInputs) -> Tensor:
        """What `write` returned to this rank's part of out_TI."""
        seen_THR = ops.attention(q_THE, pool, inputs, window=None)
        return self.output(self.value(seen_THR).flatten(1))


def read_latent_attention(spec: ModelSpec, share: RankShare, reader: Reader, layer: int) -> Latent:
    latent, at, num_heads = spec.latent, f"model.layers.{layer}.self_attn.", len(share.query_heads)
    assert latent is not None

    def halved(name: str, plain: int) -> Tensor:
        """A weight, or a bias, whose rows are `plain` ones and then a rotated part, again and again."""
        given = reader.read(f"{at}{name}")
        return _in_halves(given, plain, latent.rope_dim) if latent.is_interleaved else given

    key_name = "kv_a_proj_with_mqa"
    if latent.query_rank is None:
        first, query_norm, query = halved("q_proj.weight", latent.nope_dim), None, None
    else:
        first, query_norm = reader.read(f"{at}q_a_proj.weight"), reader.read(f"{at}q_a_layernorm.weight")
        query = make_linear(halved("q_b_proj.weight", latent.nope_dim))
    bias = None
    if spec.has_qkv_bias:
        of_first = reader.find([f"{at}q_a_proj.bias"])
        of_key = halved(f"{key_name}.bias", latent.rank)
        bias = torch.cat((of_key.new_zeros(len(first)) if of_first is None else of_first, of_key))
    both_HVR = reader.read(f"{at}kv_b_proj.weight").view(num_heads, -1, latent.rank)
    key_HNR, value_HVR = both_HVR.split_with_sizes((latent.nope_dim, latent.value_dim), dim=1)
    return Latent(
        spec=latent,
        down=make_linear(torch.cat((first, halved(f"{key_name}.weight", latent.rank))), bias),
        query_norm=query_norm,
        query=query,
        norm_R=reader.read(f"{at}kv_a_layernorm.weight"),
        absorb=make_head_linear(key_HNR.transpose(1, 2)),
        value=make_head_linear(value_HVR),
        output=make_linear(reader.read(f"{at}o_proj.weight"), reader.find([f"{at}o_proj.bias"])),
        num_heads=num_heads,
    )


def _in_halves(rows: Tensor, plain: int, rotated: int) -> Tensor:
    """Of each `plain` + `rotated` rows the last: those of even place first, then the odd ones."""
    order = [*range(plain), *range(plain, plain + rotated, 2), *range(plain + 1, plain + rotated, 2)]
    return rows.view(-1, plain + rotated, *rows.shape[1:])[:, order].flatten(0, 1)
