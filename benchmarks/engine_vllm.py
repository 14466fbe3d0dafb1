"""vLLM's side of `benchmarks.engine --vllm PYTHON`: runs in vLLM's environment, prints one line of JSON.

Arguments: checkpoint, dtype, tokens of the prefill, of the context before decode, steps, rounds. Seconds of one
512-token prompt until its first token, and seconds a decode step at batch 1 and 16: the difference of a long and a
one-token answer over the steps between, the best of the rounds. Without prefix cache, each prompt new all the same.
"""

from __future__ import annotations

import json
import random
import sys
import time

from vllm import LLM, SamplingParams


def main() -> None:
    checkpoint, dtype, *numbers = sys.argv[1:]
    prompt, context, steps, rounds = map(int, numbers)
    llm = LLM(
        checkpoint,
        dtype=dtype,
        max_model_len=2048,
        max_num_seqs=16,
        enable_prefix_caching=False,
        disable_log_stats=True,
    )

    def seconds(batch: int, num_tokens: int, answer: int) -> float:
        prompts = [
            {"prompt_token_ids": [random.randrange(100, 40000) for _ in range(num_tokens)]} for _ in range(batch)
        ]
        sampling = SamplingParams(temperature=0.0, max_tokens=answer, min_tokens=answer, ignore_eos=True)
        start = time.perf_counter()
        llm.generate(prompts, sampling, use_tqdm=False)
        return time.perf_counter() - start

    def step(batch: int) -> float:
        short = min(seconds(batch, context, 1) for _ in range(rounds))
        long = min(seconds(batch, context, steps + 1) for _ in range(rounds))
        return (long - short) / steps

    seconds(1, prompt, 2)
    took = {"prefill": min(seconds(1, prompt, 1) for _ in range(rounds)), "1": step(1), "16": step(16)}
    sys.stdout.write(f"\n{json.dumps(took)}\n")


if __name__ == "__main__":
    main()
