"""The router brain's own time a token and a request: `python -m benchmarks.router_brain [--running 256]`.

Steady state: decode says one Tokens a step for all running requests; each becomes an Emit. The codec's share
(reading that message) is told apart, and beside both stands what the rest of this interpreter costs at the least:
the same loop that only makes the Emits.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time

from pd.runtime.config import RouterConfig
from pd.runtime.core.events import Emit, Peer, Received, Send, Submit, Tick
from pd.runtime.core.router import RouterBrain
from pd.runtime.wire.codec import decode, encode
from pd.runtime.wire.messages import FirstToken, Hello, Prefill, Progress, Reserve, Reserved, Tokens
from pd.runtime.wire.values import WIRE_VERSION, Handle, ModelCard, Role, Sampling, Ticket, Token
from pd.transfer.layout import KVLayout, Shard

PROMPT_TOKENS = 500
STEPS = 400
DECODE, PREFILL = Peer("d0", "1"), Peer("p0", "1")


def joined(max_running: int) -> RouterBrain:
    brain = RouterBrain(RouterConfig(max_queue=20_000), "r")
    layout = KVLayout(num_layers=2, num_kv_heads=2, head_dim=8, page_size=16, dtype="bfloat16")
    card = ModelCard("model", "print", vocab_size=100_000, max_model_len=100_000)
    shards = (Shard(0, 2, 0, 2, 1_000_000),)
    for peer, role in ((PREFILL, Role.PREFILL), (DECODE, Role.DECODE)):
        hello = Hello(*peer[:1], role, peer.epoch, WIRE_VERSION, card, layout, shards, "m", (b"",), "", max_running)
        brain.on(Received(peer, hello), 0.0)
    return brain


def start(brain: RouterBrain, request_id: str) -> Handle:
    """Bring a request to where decode streams. The router's whole work for a request but its tokens and its end."""
    submit = Submit(request_id, tuple(range(PROMPT_TOKENS)), Sampling(max_tokens=90_000), 600.0)
    handle, sent = Handle(request_id, 0), brain.on(submit, 0.0)
    assert any(isinstance(effect, Send) and isinstance(effect.message, Reserve) for effect in sent)
    sent = brain.on(Received(DECODE, Reserved(handle, Ticket("d0", "1", tuple(range(32))))), 0.0)
    assert any(isinstance(effect, Send) and isinstance(effect.message, Prefill) for effect in sent)
    first = FirstToken(handle, PROMPT_TOKENS, Token(7), None, 0)
    brain.on(Received(PREFILL, first), 0.0)
    return handle


def step_message(handles: list[Handle], step: int) -> Tokens:
    position = PROMPT_TOKENS + 1 + step
    return Tokens(tuple(Progress(handle, position, (Token(step + 8),)) for handle in handles))


def measure(num_running: int) -> None:
    brain = joined(num_running)
    began = time.thread_time()
    handles = [start(brain, f"request-{number:06}") for number in range(num_running)]
    request_us = (time.thread_time() - began) / num_running * 1e6
    brain_us, codec_us, floor_us = [], [], []
    for step in range(STEPS):
        frame = encode(step_message(handles, step))
        t0 = time.thread_time()
        message = decode(frame)
        t1 = time.thread_time()
        effects = brain.on(Received(DECODE, message), 1.0)
        t2 = time.thread_time()
        assert isinstance(message, Tokens)
        floor = [Emit(each.handle.request_id, each.position, each.tokens, each.finish) for each in message.progress]
        t3 = time.thread_time()
        assert len(effects) == len(floor) == num_running
        codec_us.append((t1 - t0) / num_running * 1e6)
        brain_us.append((t2 - t1) / num_running * 1e6)
        floor_us.append((t3 - t2) / num_running * 1e6)
    ticks = [_timed(brain, 1.0) for _ in range(200)]
    brain_, codec, floor_ = (statistics.median(times) for times in (brain_us, codec_us, floor_us))
    print(  # noqa: T201
        f"{num_running:6} running: {brain_:.2f} us a token in the brain ({brain_ / floor_:.1f}x of making the Emits), "
        f"{codec:.2f} us to read it; {request_us:.0f} us a request; {statistics.median(ticks):.0f} us a tick"
    )


def _timed(brain: RouterBrain, now: float) -> float:
    began = time.thread_time()
    brain.on(Tick(), now)
    return (time.thread_time() - began) * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--running", type=int, nargs="*", default=[1, 16, 256, 10_000])
    gc.disable()
    for num_running in parser.parse_args().running:
        measure(num_running)


if __name__ == "__main__":
    main()
