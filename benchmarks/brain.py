"""The leader's own time for a decode step at many running requests: `python -m benchmarks.brain [--running 256]`.

One turn is what a leader does between two steps in steady state: hear StepDone, tell the router the tokens, plan and
launch the next step, hear a Tick. The codec's share (decoding StepDone, encoding Tokens and the plan) is told apart.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time

from pd.runtime.config import StepConfig
from pd.runtime.core.events import ROUTER, Effect, Launch, Peer, Received, Send, Tick
from pd.runtime.core.instance import BrainSettings, InstanceBrain
from pd.runtime.wire.codec import decode, encode
from pd.runtime.wire.messages import Hello, Landed, Peers, Reserve
from pd.runtime.wire.plans import StepDone, StepPlan
from pd.runtime.wire.values import WIRE_VERSION, Handle, ModelCard, Role, Sampling, Token
from pd.transfer.layout import KVLayout, Shard

PROMPT_TOKENS = 500
PAGE_SIZE = 16
STEPS = 1000


def decode_brain(num_running: int) -> InstanceBrain:
    """A brain whose `num_running` requests have all landed."""
    num_pages = num_running * (PROMPT_TOKENS + 2 * STEPS) // PAGE_SIZE + num_running
    layout = KVLayout(num_layers=2, num_kv_heads=2, head_dim=8, page_size=PAGE_SIZE, dtype="bfloat16")
    card = ModelCard("model", "print", vocab_size=100_000, max_model_len=8192)
    shards = (Shard(0, 2, 0, 2, num_pages),)
    hello = Hello("d", Role.DECODE, "1", WIRE_VERSION, card, layout, shards, "memory", (b"",), "", num_running)
    settings = BrainSettings(
        page_size=PAGE_SIZE,
        num_pages=num_pages,
        num_ranks=1,
        step=StepConfig(max_running=num_running),
        max_model_len=card.max_model_len,
    )
    brain = InstanceBrain(settings, hello)
    peer = Hello("p", Role.PREFILL, "1", WIRE_VERSION, card, layout, shards, "memory", (b"",), "", num_running)
    brain.on(Received(Peer(ROUTER, ""), Peers((peer,))), 0.0)
    sampling = Sampling(max_tokens=2 * STEPS, stop_token_ids=(1, 2))
    for number in range(num_running):
        handle = Handle(f"request-{number:06}", 1)
        tokens = tuple(range(number, number + PROMPT_TOKENS))
        brain.on(Received(Peer(ROUTER, ""), Reserve(handle, tokens, PROMPT_TOKENS, sampling, "p", "1", 60.0)), 0.0)
        brain.on(Received(Peer("p", "1"), Landed(handle, PROMPT_TOKENS, Token(7))), 0.0)
    return brain


def run(num_running: int) -> None:
    brain = decode_brain(num_running)
    rank = Peer("0", "")
    # The first two plans were launched while requests landed, so the third is the first full one.
    number, sizes = 1, [1, 1]
    brain_s, codec_s, nbytes = [], [], 0
    for turn in range(STEPS):
        frame = encode(StepDone(number, tuple(Token(100 + slot) for slot in range(sizes.pop(0))), 0.01))
        start = time.perf_counter()
        done = decode(frame)
        decoded = time.perf_counter()
        effects: list[Effect] = brain.on(Received(rank, done), turn * 0.01) + brain.on(Tick(), turn * 0.01)
        thought = time.perf_counter()
        frames = [encode(each.message if isinstance(each, Send) else each.plan) for each in effects if is_sent(each)]
        end = time.perf_counter()
        plans = [each.plan for each in effects if isinstance(each, Launch)]
        assert [type(plan) for plan in plans] == [StepPlan]
        sizes.append(len(plans[0].chunks))
        number += 1
        if turn >= 10:
            brain_s.append(thought - decoded)
            codec_s.append(end - thought + decoded - start)
            nbytes = max(map(len, frames))
    assert brain.load().num_running == num_running
    print(  # noqa: T201
        f"{num_running} running: brain {report(brain_s)}; codec {report(codec_s)}; largest message {nbytes} bytes"
    )


def is_sent(effect: Effect) -> bool:
    return isinstance(effect, Send | Launch)


def report(seconds: list[float]) -> str:
    ordered = sorted(seconds)
    return f"median {statistics.median(ordered) * 1e6:.0f} us, p99 {ordered[len(ordered) * 99 // 100] * 1e6:.0f} us"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--running", type=int, nargs="*", default=[1, 16, 64, 256])
    arguments = parser.parse_args()
    gc.freeze()
    for num_running in arguments.running:
        run(num_running)


if __name__ == "__main__":
    main()
