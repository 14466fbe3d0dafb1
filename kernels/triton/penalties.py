"""What tokens that stood already do to the logits, in OpenAI's and vLLM's order.

    z' = z / r if z > 0 else z r        where the token stood in prompt or answer (repetition r; Keskar et al. 2019)
    z'' = z' - f n - p [n > 0]          n times in the answer (frequency f, presence p)

Exact to the bit: nothing is contracted to fused multiply-adds, divisions round.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from pd.kernels.target import target_of
from pd.kernels.tuning import launch_of

# B rows of logits, N of them penalised, R rows of counts, V vocabulary


@triton.jit(do_not_specialize=["num_rows"])
def _penalise(
    logits, answer, prompt, row_of, history_of, strengths, logits_row, answer_row, prompt_row, num_vocab, num_rows,
    BLOCK: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0)
    row = tl.load(row_of + n).to(tl.int64)
    own = tl.load(history_of + n).to(tl.int64)
    repetition = tl.load(strengths + n)
    frequency = tl.load(strengths + num_rows + n)
    presence = tl.load(strengths + 2 * num_rows + n)
    v = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = v < num_vocab
    z = tl.load(logits + row * logits_row + v, mask=mask, other=0.0)
    count = tl.load(answer + own * answer_row + v, mask=mask, other=0)
    stood = (count > 0) | (tl.load(prompt + own * prompt_row + v, mask=mask, other=0) != 0)
    repeated = tl.where(z > 0, tl.div_rn(z, tl.zeros_like(z) + repetition), z * repetition)
    z = tl.where(stood, repeated, z) - frequency * count.to(tl.float32)
    tl.store(logits + row * logits_row + v, tl.where(count > 0, z - presence, z), mask=mask)


def penalise(
    logits_BV: Tensor, counts: tuple[Tensor, Tensor], *, row_of_N: Tensor, history_of_N: Tensor, strengths_3N: Tensor
) -> None:
    """Change the rows row_of_N in place, float32.

    counts: answer_RV int32, prompt_RV bool. history_of_N: the row of counts of each. strengths: repetition, frequency,
    presence of each, float32. No row stands twice.
    """
    answer_RV, prompt_RV = counts
    num_rows, num_vocab = row_of_N.shape[0], logits_BV.shape[1]
    if logits_BV.dtype != torch.float32 or answer_RV.shape[1] != num_vocab or strengths_3N.shape != (3, num_rows):
        raise ValueError(
            f"logits are {logits_BV.dtype} over {num_vocab} tokens, counts over {answer_RV.shape[1]}; "
            f"strengths {tuple(strengths_3N.shape)} for {num_rows} rows"
        )
    if num_rows == 0:
        return
    target = target_of(logits_BV)
    launch = launch_of("vocabulary", target, num_vocab)
    _penalise[(num_rows, triton.cdiv(num_vocab, launch.block_n))](
        *(logits_BV, answer_RV, prompt_RV.view(torch.uint8), row_of_N, history_of_N, strengths_3N.contiguous()),
        *(logits_BV.stride(0), answer_RV.stride(0), prompt_RV.stride(0), num_vocab, num_rows),
        BLOCK=launch.block_n,
        enable_fp_fusion=False,
        **launch.options(target),
    )


def reference(
    logits_BV: Tensor, counts: tuple[Tensor, Tensor], *, row_of_N: Tensor, history_of_N: Tensor, strengths_3N: Tensor
) -> None:
    count_NV = counts[0][history_of_N.long()]
    stood_NV = counts[1][history_of_N.long()] | (count_NV > 0)
    repetition_N1, frequency_N1, presence_N1 = strengths_3N[:, :, None]
    z_NV = logits_BV[row_of_N.long()]
    repeated_NV = torch.where(z_NV > 0, z_NV / repetition_N1, z_NV * repetition_N1)
    z_NV = torch.where(stood_NV, repeated_NV, z_NV)
    z_NV -= frequency_N1 * count_NV
    z_NV -= presence_N1 * (count_NV > 0)
    logits_BV[row_of_N.long()] = z_NV
