"""A decoder layer's parts that hold weights. Chosen once, when the weights are read; plain functions afterwards."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from pd.runtime.engine import cpu_ops

# T tokens of the step, H heads, N outputs, I inputs, V this rank's vocabulary

Linear = Callable[[Tensor], Tensor]
"""x_TI -> out_TN; one for each head: x_THI -> out_THN."""

Gated = tuple[Linear, Linear]
"""An MLP: gate and up as one, and down."""


def make_linear(weight_NI: Tensor, bias_N: Tensor | None = None) -> Linear:
    """x @ weight.T + bias, in the form that `cpu_ops.pack` takes this weight for.

    In C++ a row's bits are the same in any batch, which no BLAS gives, so that a request's answer does not depend on
    its neighbours; and on one Zen 3 core it takes 1/1 to 1/3.5 of MKL's time in float32, 1/1.6 to 1/2.3 of torch's in
    bf16 (512 rows to 1 row; 576 -> 960, 3072, 49152).
    """
    packed = cpu_ops.pack(weight_NI)
    return lambda x_TI: cpu_ops.linear(x_TI, packed, bias_N)


def make_head_linear(weight_HNI: Tensor) -> Linear:
    """x[h] @ weight[h].T of every head h. On a CPU a head at a time, for the sake of `make_linear`'s bits."""
    if not weight_HNI.is_cpu:
        weight_HIN = weight_HNI.transpose(1, 2).contiguous()
        return lambda x_THI: torch.bmm(x_THI.transpose(0, 1), weight_HIN).transpose(0, 1)
    heads = [make_linear(weight_NI.contiguous()) for weight_NI in weight_HNI]
    return lambda x_THI: torch.stack([linear(x_THI[:, h]) for h, linear in enumerate(heads)], dim=1)


@dataclass(frozen=True, slots=True)
class Embedding:
    """This rank's rows of the embedding. The sum over ranks is the whole lookup."""

    weight_VI: Tensor
    start: int
    is_whole: bool

    def __call__(self, tokens_T: Tensor) -> Tensor:
        """Rows of the tokens this rank holds, zeros for the others'."""
        if self.is_whole:
            return F.embedding(tokens_T, self.weight_VI)
        own_T = tokens_T - self.start
        is_other_T = (own_T < 0) | (own_T >= self.weight_VI.shape[0])
        return F.embedding(own_T.masked_fill(is_other_T, 0), self.weight_VI).masked_fill_(is_other_T[:, None], 0)
