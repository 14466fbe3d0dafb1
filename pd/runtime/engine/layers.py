"""A decoder layer's parts that hold weights. Chosen once, when the weights are read; plain functions afterwards."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from pd.runtime.engine import cpu_build, cpu_ops

# T tokens of the step, N outputs, I inputs, V this rank's vocabulary

Linear = Callable[[Tensor], Tensor]
"""x_TI -> out_TN."""


def make_linear(weight_NI: Tensor, bias_N: Tensor | None = None) -> Linear:
    """x @ weight.T + bias, by the fastest form this machine has for this weight.

    On CPU the C++ op where it was built: a row's bits are then the same in any batch, which no BLAS gives (so a
    request's answer does not depend on its neighbours), and on Zen 3 it takes 1/1 to 1/3.5 of MKL's time in float32,
    1/1.6 to 1/2.3 of torch's in bf16. Else bf16 takes oneDNN with the weight packed once (2x of F.linear with
    avx512_bf16: that repacks on each call), or float32 GEMMs. float32 is never computed in less.
    """
    match linear_kind(weight_NI):
        case "C++" | "widened":
            packed = cpu_ops.pack(weight_NI)
            return lambda x_TI: cpu_ops.linear(x_TI, packed, bias_N)
        case "oneDNN":
            return _onednn_linear(weight_NI, bias_N)
        case _:
            return lambda x_TI: F.linear(x_TI, weight_NI, bias_N)


def linear_kind(like: Tensor) -> str:
    """What `make_linear` takes for a weight of this device and dtype; a word for the start-up line."""
    if like.device.type != "cpu" or like.dtype not in (torch.float32, torch.bfloat16):
        return "torch"
    if cpu_build.load().module is not None:
        return "C++"
    if like.dtype == torch.float32:
        return "torch"
    return "oneDNN" if cpu_build.has_bf16_gemm() else "widened"


def _onednn_linear(weight_NI: Tensor, bias_N: Tensor | None) -> Linear:
    packed = torch.ops.mkldnn._reorder_linear_weight(weight_NI.to_mkldnn())
    pointwise = torch.ops.mkldnn._linear_pointwise
    return lambda x_TI: pointwise(x_TI, packed, bias_N, "none", [], "")


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
