"""Kernels on a GPU beside what that GPU can do: `python -m benchmarks.kernels [--only …] [--checkpoint DIR]`.

Every figure is a share of a rate measured in the same run: of a large copy's bandwidth where bytes decide, of a large
matrix product's where multiply-adds do; prefill attention also beside scaled_dot_product_attention on the same work,
and a whole decode step over the time its weights' bytes take. The best of several turns counts. Times are of the
device, by events; between runs a buffer larger than the last-level cache is written.

A figure below its goal ends with `!`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from pd.bench.steps import Steps
from pd.kernels.floors import floors
from pd.kernels.kv_write import rope_and_write
from pd.kernels.paged import Pages, heads_of
from pd.kernels.paged_decode import paged_decode
from pd.kernels.paged_prefill import paged_prefill
from pd.kernels.race import argmax, race
from pd.runtime.config import DeviceConfig

BF16 = torch.bfloat16
TURNS, CACHE_NBYTES = 5, 512 << 20
BATCHES, CONTEXT = (1, 8, 64), 1024  # of the decode step
PAGE, NUM_LAYERS = 16, 4  # layers of the pool: enough that a page is strided as in a real one


def seconds(work: Callable[[], object], flush: Tensor, *, turns: int = TURNS) -> float:
    """Least device time of `work`, with a cold last-level cache."""
    work()
    best = float("inf")
    for _ in range(turns):
        flush.zero_()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        work()
        end.record()
        end.synchronize()
        best = min(best, begin.elapsed_time(end) / 1000)
    return best


class Device:
    """The GPU and its measured rates."""

    def __init__(self) -> None:
        self.flush = torch.empty(CACHE_NBYTES, dtype=torch.uint8, device="cuda")
        pair = torch.zeros(2, 2 << 30, dtype=torch.uint8, device="cuda")
        self.copy_rate = pair.numel() / seconds(lambda: pair[1].copy_(pair[0]), self.flush)
        x = torch.randn(8192, 8192, device="cuda", dtype=BF16)
        self.gemm_rate = 2 * 8192**3 / seconds(lambda: x @ x, self.flush)
        self.num_multiprocessors = torch.cuda.get_device_properties(0).multi_processor_count

    def describe(self) -> str:
        name = torch.cuda.get_device_name(0)
        return f"{name}: copy {self.copy_rate / 1e12:.2f} TB/s, bf16 product {self.gemm_rate / 1e12:.0f} TFLOP/s"


def say(text: str, share: float, took: float, *, is_missed: bool = False) -> None:
    sys.stdout.write(f"{text:58} {share:6.2f} {took * 1e6:10.1f} us{' !' if is_missed else ''}\n")
    sys.stdout.flush()


def pools(num_pages: int, num_kv: int, size: int) -> tuple[Tensor, Tensor]:
    """One layer of a pool in the house's order."""
    own = 2 * PAGE * size
    flat = torch.randn(num_pages * num_kv * NUM_LAYERS * own, device="cuda", dtype=BF16)
    strides = (num_kv * NUM_LAYERS * own, NUM_LAYERS * own, size, 1)
    shape = (num_pages, num_kv, PAGE, size)
    return flat.as_strided(shape, strides, own), flat.as_strided(shape, strides, own + PAGE * size)


def tables(batch: int, context: int) -> Tensor:
    held = -(-context // PAGE)
    return torch.randperm(batch * held, device="cuda").view(batch, held).to(torch.int32)


def decode(device: Device) -> None:
    """Bytes of K and V read, over the copy bandwidth."""
    for num_kv, group, size in ((8, 4, 128), (8, 8, 128), (8, 4, 64)):
        for batch, context in ((1, 8192), (1, 131072), (16, 4096), (64, 8192), (128, 16384)):
            k, v = pools(batch * -(-context // PAGE), num_kv, size)
            heads = heads_of([h // group for h in range(num_kv * group)], scale=size**-0.5, device=k.device)
            q = torch.randn(batch, num_kv * group, size, device="cuda", dtype=BF16)
            lengths = torch.full((batch,), context, dtype=torch.int32, device="cuda")
            pages = Pages(k, v, tables(batch, context))
            took = seconds(lambda q=q, p=pages, n=lengths, h=heads: paged_decode(q, p, n, h), device.flush)
            share = 2 * batch * context * num_kv * size * 2 / took / device.copy_rate
            # The goal holds from 8k tokens a multiprocessor on, those of all KV heads counted.
            is_large = batch * context * num_kv >= 8192 * device.num_multiprocessors
            name = f"decode {num_kv}x{group} heads of {size}, batch {batch}, context {context}"
            say(name, share, took, is_missed=is_large and share < 0.85)


def write(device: Device) -> None:
    """Bytes read and written, over the copy bandwidth."""
    for num_tokens in (64, 2048, 16384):
        k_pool, v_pool = pools(num_tokens // PAGE + 1, 8, 128)
        qkv = torch.randn(num_tokens, 48, 128, device="cuda", dtype=BF16)
        parts = qkv.split_with_sizes((32, 8, 8), dim=1)
        angles = torch.rand(num_tokens, 64, device="cuda"), torch.rand(num_tokens, 64, device="cuda")
        at = torch.randperm(num_tokens, device="cuda")
        places = {"pages_T": at // PAGE, "offsets_T": at % PAGE}
        out = k_pool, v_pool
        took = seconds(lambda p=parts, a=angles, o=out, w=places: rope_and_write(p, a, o, **w), device.flush)
        nbytes = 2 * qkv.nbytes + 2 * angles[0].nbytes
        say(f"rope and KV write, {num_tokens} tokens", nbytes / took / device.copy_rate, took)


def prefill(device: Device) -> None:
    """Multiply-adds over the product's rate, and beside SDPA's flash attention on contiguous keys."""
    for num_kv, group, size in ((8, 4, 128), (8, 1, 64)):
        for batch, length in ((16, 1024), (4, 4096), (1, 16384)):
            num_heads = num_kv * group
            k, v = pools(batch * length // PAGE, num_kv, size)
            heads = heads_of([h // group for h in range(num_heads)], scale=size**-0.5, device=k.device)
            q = torch.randn(batch * length, num_heads, size, device="cuda", dtype=BF16)
            spans = tuple(
                torch.tensor(values, dtype=torch.int32, device="cuda")
                for values in ([length * b for b in range(batch + 1)], [length] * batch)
            )
            pages = Pages(k, v, tables(batch, length))
            ours = seconds(lambda q=q, p=pages, s=spans, h=heads: paged_prefill(q, p, s, h), device.flush)
            q_BHTE = q.view(batch, length, num_heads, size).transpose(1, 2)
            k_BKTE = torch.randn(batch, num_kv, length, size, device="cuda", dtype=BF16)
            theirs = seconds(lambda q=q_BHTE, k=k_BKTE: flash(q, k), device.flush)
            flops = 2 * 2 * batch * num_heads * size * length**2 / 2
            name = f"prefill {num_kv}x{group} heads of {size}, {batch} x {length}"
            say(f"{name}, of products", flops / ours / device.gemm_rate, ours)
            say(f"{name}, beside SDPA", theirs / ours, theirs, is_missed=theirs / ours < 0.9)


def flash(q_BHTE: Tensor, k_BKTE: Tensor) -> Tensor:
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        return F.scaled_dot_product_attention(q_BHTE, k_BKTE, k_BKTE, is_causal=True, enable_gqa=True)


def sampling(device: Device) -> None:
    """Bytes of the logits read once, over the copy bandwidth."""
    for batch in (1, 64):
        logits = torch.randn(batch, 128256, device="cuda") * 3
        seeds = torch.arange(batch, device="cuda")
        none = torch.full((batch,), -torch.inf, device="cuda")
        filters = torch.zeros(batch, device="cuda"), torch.full((batch,), 50, dtype=torch.int32, device="cuda")
        top_p = torch.full((batch,), 0.9, device="cuda")
        works: dict[str, Callable[[], object]] = {
            "argmax": lambda z=logits: argmax(z),
            "the draw": lambda z=logits, f=none, s=seeds: race(z, f, s, s),
            "top_k and top_p": lambda z=logits, f=filters, p=top_p: floors(z, *f, p),
            "torch.sort instead": lambda z=logits: z.sort(descending=True),
        }
        for name, work in works.items():
            took = seconds(work, device.flush)
            say(f"{name}, {batch} rows of 128256", logits.nbytes / took / device.copy_rate, took)


def model_step(device: Device, checkpoint: Path | None) -> None:
    """A whole decode step over the time that reading the weights takes, with and without graphs."""
    if checkpoint is None:
        sys.stdout.write("decode step: give --checkpoint DIR of a model to measure\n")
        return
    nbytes = sum(file.stat().st_size for file in checkpoint.glob("*.safetensors"))
    for graphs in (True, False):
        config = DeviceConfig(device="cuda", kernels="triton", graphs=graphs)
        steps = Steps(checkpoint, dtype="bfloat16", batch=max(BATCHES), length=CONTEXT + 64, device=config)
        for batch in BATCHES:
            steps.prefill(batch, CONTEXT)
            took = min(steps.decode(batch, CONTEXT, 32)[8:])
            steps.retire(batch)
            name = f"decode step, batch {batch}, {'graphs' if graphs else 'no graphs'}, times the floor"
            over = took * device.copy_rate / nbytes
            say(name, over, took, is_missed=graphs and over > 1.15)
        steps.close()
        del steps
        torch.cuda.empty_cache()


PARTS = {"decode": decode, "write": write, "prefill": prefill, "sampling": sampling}


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.kernels", description=__doc__.splitlines()[0])
    parser.add_argument("--only", default=",".join((*PARTS, "step")), help=f"some of {', '.join(PARTS)}, step")
    parser.add_argument("--checkpoint", type=Path, help="a model's directory, for the decode step")
    options = parser.parse_args(argv)
    if not torch.cuda.is_available():
        sys.stderr.write(f"error: torch {torch.__version__} sees no GPU\n\nhint: these figures are of one\n")
        return 2
    torch.manual_seed(0)
    device = Device()
    sys.stdout.write(f"{device.describe()}\n{'':58}  share       time\n")
    wanted = options.only.split(",")
    for name, part in PARTS.items():
        if name in wanted:
            part(device)
    if "step" in wanted:
        model_step(device, options.checkpoint)
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
