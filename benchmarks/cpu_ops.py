"""The CPU ops beside their floors and beside plain PyTorch: `python -m benchmarks.cpu_ops [--threads N]`.

Every figure is a ratio within one run: x floor = time / (bytes read / memory read bandwidth), or / (multiply-adds /
GEMM peak), whichever is larger; x torch = PyTorch's time / ours. Weights and KV are rotated through more memory than
the caches hold, candidates take turns, and the best of all turns counts, since other processes share the machine.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Sequence

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch
import torch.nn.functional as F
from torch import Tensor

from pd.runtime.engine import cpu_attention, cpu_ops, noise
from pd.runtime.engine.cpu_attention import Heads

COLD_BYTES = 96 << 20
"""Rotated through: three times a 32 MB last-level cache."""
PIECE_BYTES = 2 << 20
BUDGET_S = 0.6
"""Of each candidate, turns included."""


def clock() -> float:
    """Seconds; of this thread's own running where it works alone, so that other processes count less."""
    return time.thread_time() if torch.get_num_threads() == 1 else time.perf_counter()


def best_seconds(candidates: dict[str, Callable[[int], object]]) -> dict[str, float]:
    """The shortest time of one call of each; call number i is told i. Candidates take turns of some 20 ms.

    A short call is timed several at once, 100 us at least: the clock of a thread's own time is coarse here and there.
    """
    best = dict.fromkeys(candidates, float("inf"))
    together = dict.fromkeys(candidates, 1)
    for name, call in candidates.items():
        call(0)
        start = time.perf_counter()
        call(1)
        together[name] = max(1, int(1e-4 / (time.perf_counter() - start)))
    stop = time.perf_counter() + BUDGET_S * len(candidates)
    count = 0
    while time.perf_counter() < stop:
        for name, call in candidates.items():
            turn = time.perf_counter() + 0.02
            while time.perf_counter() < turn:
                start = clock()
                for i in range(together[name]):
                    call(count + i)
                best[name] = min(best[name], (clock() - start) / together[name])
                count += together[name]
    return best


class Floors:
    """What this machine reads and multiplies at best on the threads given, measured now."""

    def __init__(self) -> None:
        # In pieces as long as the ops' own calls, so that as many of them run undisturbed.
        pieces = torch.ones(COLD_BYTES // 4).view(-1, PIECE_BYTES // 4)
        half = PIECE_BYTES // 8
        square = torch.randn(384, 384)
        times = best_seconds(
            {
                "sum": lambda i: pieces[i % len(pieces)].sum(),
                "max": lambda i: pieces[i % len(pieces)].amax(),
                "dot": lambda i: pieces[i % len(pieces), :half].dot(pieces[i % len(pieces), half:]),
                "gemm": lambda _: square @ square,
            }
        )
        self.bytes_per_s = PIECE_BYTES / min(times["sum"], times["max"], times["dot"])
        self.flops = 2 * 384**3 / times["gemm"]
        say(f"memory read {self.bytes_per_s / 1e9:.1f} GB/s, float32 GEMM {self.flops / 1e9:.0f} GFLOP/s")

    def seconds(self, nbytes: float, flops: float = 0.0) -> float:
        return max(nbytes / self.bytes_per_s, flops / self.flops)


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def row(name: str, times: dict[str, float], floor_s: float) -> None:
    ours = times.pop("ours")
    others = "  ".join(f"{other} {seconds / ours:6.2f}x" for other, seconds in times.items())
    say(f"{name:<34} {ours * 1e6:9.1f} us  {ours / floor_s:6.2f}x floor   {others}")


def bench_linear(floors: Floors, dtype: torch.dtype) -> None:
    say(f"\nlinear, {dtype}: others' time / ours")
    for num_outputs, num_inputs in ((960, 576), (576, 576), (3072, 576), (576, 1536), (49152, 576)):
        nbytes = num_outputs * num_inputs * dtype.itemsize
        copies = max(1, COLD_BYTES // nbytes)
        weights = [torch.randn(num_outputs, num_inputs).to(dtype) for _ in range(copies)]
        wide = [weight.float() for weight in weights] if dtype == torch.bfloat16 else weights
        packed = [cpu_ops.pack(weight) for weight in weights]
        for num_rows in (1, 2, 4, 8, 16, 32, 512):
            if num_rows * num_outputs > 3_000_000:
                continue
            times = bench_one_linear(torch.randn(num_rows, num_inputs).to(dtype), weights, wide, packed)
            floor_s = floors.seconds(nbytes, 2 * num_rows * num_outputs * num_inputs)
            row(f"  {num_inputs} -> {num_outputs}, {num_rows} rows", times, floor_s)


def bench_one_linear(
    x: Tensor, weights: list[Tensor], wide: list[Tensor], packed: list[cpu_ops.Packed]
) -> dict[str, float]:
    copies = len(weights)
    candidates: dict[str, Callable[[int], object]] = {
        "ours": lambda i: cpu_ops.linear(x, packed[i % copies]),
        "F.linear": lambda i: F.linear(x, weights[i % copies]),
    }
    if x.dtype == torch.bfloat16:
        x_wide = x.float()
        candidates["F.linear float32"] = lambda i: F.linear(x_wide, wide[i % copies])
    return best_seconds(candidates)


def bench_decode(floors: Floors, dtype: torch.dtype) -> None:
    say(f"\npaged decode, {dtype}, page 16, head size 64")
    for heads, kv_heads in ((9, 3), (32, 8)):
        of_query = torch.arange(heads, dtype=torch.int32) // (heads // kv_heads)
        for batch, context in ((1, 512), (1, 4096), (16, 512), (16, 2048)):
            page_bytes = kv_heads * 2 * 16 * 64 * dtype.itemsize
            pages_each = context // 16
            layers = max(1, COLD_BYTES // (batch * pages_each * page_bytes))
            pool = torch.randn(batch * pages_each, kv_heads, layers, 2, 16, 64).to(dtype)
            table = torch.randperm(batch * pages_each).to(torch.int32).view(batch, pages_each)
            lengths = torch.full((batch,), context, dtype=torch.int32)
            q = torch.randn(batch, heads, 64).to(dtype)
            attention = Heads(of_query, 0.125)

            def call(op: Callable[..., Tensor], i: int) -> Tensor:
                layer = i % layers  # noqa: B023
                pools = (pool[:, :, layer, 0], pool[:, :, layer, 1])  # noqa: B023
                return op(q, pools, table_BL=table, lengths_B=lengths, heads=attention)  # noqa: B023

            times = best_seconds(
                {
                    "ours": lambda i: call(cpu_attention.paged_decode, i),
                    "gather + SDPA": lambda i: call(cpu_attention.paged_decode_reference, i),
                }
            )
            row(f"  {heads}/{kv_heads}, {batch} x {context}", times, floors.seconds(batch * pages_each * page_bytes))


def bench_prefill(floors: Floors, dtype: torch.dtype) -> None:
    say(f"\npaged prefill of a whole prompt, {dtype}, 9/3 heads of 64, page 16")
    heads = Heads(torch.arange(9, dtype=torch.int32) // 3, 0.125)
    for length in (128, 512, 2048):
        pool = torch.randn(length // 16, 3, 1, 2, 16, 64).to(dtype)
        pools = (pool[:, :, 0, 0], pool[:, :, 0, 1])
        table = torch.randperm(length // 16).to(torch.int32)[None]
        chunks = torch.tensor([0, length], dtype=torch.int32), torch.tensor([length], dtype=torch.int32), table
        q = torch.randn(length, 9, 64).to(dtype)

        def gathered(pools: tuple[Tensor, Tensor], table: Tensor, q: Tensor) -> Tensor:
            keys, values = (part[table[0].long()].transpose(0, 1).flatten(1, 2)[None] for part in pools)
            return F.scaled_dot_product_attention(
                q.transpose(0, 1)[None], keys, values, is_causal=True, enable_gqa=True
            )

        times = best_seconds(
            {
                "ours": lambda _, a=(q, pools, chunks): cpu_attention.paged_prefill(*a, heads=heads),  # type: ignore[misc]
                "gather + SDPA": lambda _, a=(pools, table, q): gathered(*a),  # type: ignore[misc]
            }
        )
        row(f"  {length} tokens", times, floors.seconds(0, 2 * 9 * 64 * length * (length + 1)))


def bench_small(floors: Floors, dtype: torch.dtype) -> None:
    say(f"\nsmall ops of a 576-wide layer, {dtype}")
    for num_rows in (1, 16, 512):
        x, residual = torch.randn(2, num_rows, 576).to(dtype)
        weight = torch.ones(576, dtype=dtype)
        gate_up = torch.randn(num_rows, 3072).to(dtype)
        qkv = torch.randn(num_rows, 15, 64).to(dtype)
        parts = (qkv[:, :9], qkv[:, 9:12], qkv[:, 12:])
        angle = torch.randn(num_rows, 32)
        pool = torch.zeros(num_rows // 16 + 1, 3, 1, 2, 16, 64, dtype=dtype)
        angles, pools = (angle.cos(), angle.sin()), (pool[:, :, 0, 0], pool[:, :, 0, 1])
        places = {"pages_T": torch.arange(num_rows) // 16, "offsets_T": torch.arange(num_rows) % 16}
        pairs: dict[str, tuple[Callable[[int], object], Callable[[int], object], int]] = {
            "rms_norm + residual": (
                lambda _: cpu_ops.rms_norm(x, weight, 1e-5, residual),  # noqa: B023
                lambda _: cpu_ops.rms_norm_reference(x, weight, 1e-5, residual),  # noqa: B023
                4 * 576,
            ),
            "silu_mul": (
                lambda _: cpu_ops.silu_mul(gate_up),  # noqa: B023
                lambda _: cpu_ops.silu_mul_reference(gate_up),  # noqa: B023
                3072 + 1536,
            ),
            "rope_and_write": (
                lambda _: cpu_ops.rope_and_write(parts, angles, pools, **places),  # noqa: B023
                lambda _: cpu_ops.rope_and_write_reference(parts, angles, pools, **places),  # noqa: B023
                2 * 960,
            ),
        }
        for name, (ours, plain, elements) in pairs.items():
            times = best_seconds({"ours": ours, "plain": plain})
            row(f"  {name}, {num_rows} rows", times, floors.seconds(num_rows * elements * dtype.itemsize))


def bench_choice(floors: Floors) -> None:
    say("\nchoosing among 49,152, 16 rows")
    flat, steep = torch.randn(16, 49152), torch.randn(16, 49152) * 5
    half = flat.bfloat16()
    floor, seed, position = torch.full((16,), -torch.inf), torch.arange(16), torch.arange(16)
    nbytes = flat.numel() * 4
    for name, logits in (("race, flat", flat), ("race, steep", steep)):
        times = best_seconds(
            {
                "ours": lambda _: cpu_ops.race(logits, floor, seed, position),  # noqa: B023
                "plain": lambda _: noise.race(logits, floor, seed, position),  # noqa: B023
            }
        )
        row(f"  {name}", times, floors.seconds(nbytes))
    for name, logits in (("argmax float32", flat), ("argmax bfloat16", half)):
        times = best_seconds(
            {
                "ours": lambda _: cpu_ops.argmax(logits),  # noqa: B023
                "torch": lambda _: logits.argmax(-1),  # noqa: B023
            }
        )
        row(f"  {name}", times, floors.seconds(logits.numel() * logits.element_size()))


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--only", choices=("linear", "decode", "small", "choice"))
    args = parser.parse_args(argv)
    torch.set_num_threads(args.threads)
    say(f"{cpu_ops.describe()}, {args.threads} threads, load {os.getloadavg()[0]:.1f}")
    floors = Floors()
    for dtype in (torch.bfloat16, torch.float32):
        if args.only in (None, "linear"):
            bench_linear(floors, dtype)
        if args.only in (None, "decode"):
            bench_decode(floors, dtype)
        bench_prefill(floors, dtype)
        if args.only in (None, "small"):
            bench_small(floors, dtype)
    if args.only in (None, "choice"):
        bench_choice(floors)


if __name__ == "__main__":
    main()
