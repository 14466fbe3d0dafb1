"""One rank's steps beside their floors and beside transformers: `python -m benchmarks.engine [--threads N]`.

Decode's floor is the weights' bytes over the memory read bandwidth, prefill's the multiply-adds over the GEMM peak,
both measured in the same run. transformers' `generate` has the same checkpoint, dtype and threads. Everything takes
turns and the best of all turns counts, since other processes share the machine.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch
from transformers import AutoModelForCausalLM, LogitsProcessor, LogitsProcessorList

from pd.bench.steps import Steps
from pd.runtime.checkpoint import resolve

PROMPT = 512  # tokens
CONTEXT = 256  # tokens before the first decode step
STEPS = 24
ROUNDS = 3


def ours_decode(ours: Steps, batch: int) -> float:
    """Seconds a step, the best of STEPS."""
    ours.prefill(batch, CONTEXT)
    seconds = min(ours.decode(batch, CONTEXT, STEPS))
    ours.retire(batch)
    return seconds


def ours_prefill(ours: Steps) -> float:
    (seconds,) = ours.prefill(1, PROMPT)
    ours.retire(1)
    return seconds


class Stamps(LogitsProcessor):
    """When each token's logits were there."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.times.append(time.perf_counter())
        return scores


def theirs_decode(model: torch.nn.Module, batch: int) -> float:
    """Seconds a step of `generate`, the best of STEPS."""
    stamps = Stamps()
    generate(model, torch.randint(100, 40000, (batch, CONTEXT)), STEPS + 1, stamps)
    return min(after - before for before, after in itertools.pairwise(stamps.times))


def theirs_prefill(model: torch.nn.Module) -> float:
    """Seconds until the logits of a prompt's last token, by `generate`."""
    stamps, start = Stamps(), time.perf_counter()
    generate(model, torch.randint(100, 40000, (1, PROMPT)), 1, stamps)
    return stamps.times[0] - start


def generate(model: torch.nn.Module, ids: torch.Tensor, num_tokens: int, stamps: Stamps) -> None:
    with torch.inference_mode():
        model.generate(  # type: ignore[operator]
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=num_tokens,
            min_new_tokens=num_tokens,
            do_sample=False,
            pad_token_id=0,
            logits_processor=LogitsProcessorList([stamps]),
        )


def read_bandwidth() -> float:
    """Bytes/s of summing memory that no cache holds."""
    memory = torch.ones(64 << 20, dtype=torch.float32)
    return memory.nbytes / best(lambda: memory.sum())


def gemm_peak(dtype: torch.dtype) -> float:
    """Multiply-adds/s of the better of float32 and `dtype`: what is free to choose is no excuse."""
    peaks = []
    for kind in {dtype, torch.float32}:
        a, b = torch.randn(1024, 1024).to(kind), torch.randn(1024, 1024).to(kind)
        peaks.append(1024**3 / best(lambda a=a, b=b: a @ b))
    return max(peaks)


def best(call: Callable[[], object], rounds: int = 8) -> float:
    seconds = []
    for _ in range(rounds):
        start = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - start)
    return min(seconds)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="each takes a minute where bf16 is emulated")
    parser.add_argument("--alone", action="store_true", help="without transformers, whose bf16 may take minutes")
    parser.add_argument("--vllm", metavar="PYTHON", help="of an environment with vLLM's CPU build: measured last")
    asked = parser.parse_args()
    torch.set_num_threads(asked.threads)
    checkpoint, dtype = resolve(asked.model), getattr(torch, asked.dtype)
    ours = Steps(checkpoint, dtype=asked.dtype, batch=16, length=PROMPT + STEPS + 1, threads=asked.threads)
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=dtype)
    model.generation_config.eos_token_id = None
    weights = sum(p.numel() for p in model.parameters())
    calls: dict[str, Callable[[], float]] = {
        "read": lambda: 1 / read_bandwidth(),
        "gemm": lambda: 1 / gemm_peak(dtype),
        "ours prefill": lambda: ours_prefill(ours),
        "ours 1": lambda: ours_decode(ours, 1),
        "ours 16": lambda: ours_decode(ours, 16),
    }
    if not asked.alone:
        calls |= {
            "transformers prefill": lambda: theirs_prefill(model),
            "transformers 1": lambda: theirs_decode(model, 1),
            "transformers 16": lambda: theirs_decode(model, 16),
        }
    took: dict[str, float] = {}
    for _ in range(asked.rounds):
        for name, call in calls.items():
            took[name] = min(took.get(name, float("inf")), call())
    if asked.vllm:
        theirs = vllm(asked.vllm, checkpoint, asked.dtype, asked.rounds)
        took |= {f"vLLM {key}": seconds for key, seconds in theirs.items()}
    embedding = model.get_input_embeddings().weight.numel()
    decode_floor = weights * dtype.itemsize * took["read"]
    floors = {"1": decode_floor, "16": decode_floor, "prefill": (weights - embedding) * PROMPT * took["gemm"]}
    say(took, floors, f"{checkpoint.name} {asked.dtype}, {asked.threads} threads; ours: {ours.engine.notes.start_up}")
    return 0


def vllm(python: str, checkpoint: Path, dtype: str, rounds: int) -> dict[str, float]:
    """The same three figures of vLLM, in its own process and environment (benchmarks/README.md)."""
    script = Path(__file__).with_name("engine_vllm.py")
    command = [python, "-P", str(script), str(checkpoint), dtype, str(PROMPT), str(CONTEXT), str(STEPS), str(rounds)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    answer = next(line for line in done.stdout.splitlines() if line.startswith("{"))  # its log may go on after it
    return json.loads(answer)  # type: ignore[no-any-return]


def say(took: dict[str, float], floors: dict[str, float], title: str) -> None:
    out = sys.stdout.write
    out(f"{title}\nmemory read {1e-9 / took['read']:.1f} GB/s, GEMM {2e-9 / took['gemm']:.0f} GFLOP/s\n")
    peers = [peer for peer in ("transformers", "vLLM") if f"{peer} 1" in took]
    head = "".join(f"{peer:>14}{'ratio':>8}" for peer in peers)
    out(f"{'':22}{'ours':>12}{'x floor':>10}{head}\n")
    for label, key in (("decode, batch 1", "1"), ("decode, batch 16", "16"), ("prefill 512", "prefill")):
        mine = took[f"ours {key}"]
        others = "".join(f"{s * 1e3:11.1f} ms{s / mine:8.2f}" for s in (took[f"{peer} {key}"] for peer in peers))
        out(f"{label:22}{mine * 1e3:9.1f} ms{mine / floors[key]:10.2f}{others}\n")


if __name__ == "__main__":
    raise SystemExit(main())
