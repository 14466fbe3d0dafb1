"""Builders for the router's tests: instances that say hello, requests, and what came out."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TypeVar

from pd.runtime.config import RouterConfig
from pd.runtime.core.dispatch import Deadlines
from pd.runtime.core.events import Abandon, Effect, Emit, End, Event, Peer, Received, Send, Submit, Tick
from pd.runtime.core.router import RouterBrain
from pd.runtime.wire.messages import AnyMessage, Beat, FirstToken, Hello, Prefill, Progress, Reserve, Reserved, Tokens
from pd.runtime.wire.values import WIRE_VERSION, Finish, Handle, Load, Message, ModelCard, Role, Sampling, Ticket, Token
from pd.transfer.layout import KVLayout, Shard

LAYOUT = KVLayout(num_layers=2, num_kv_heads=2, head_dim=8, page_size=4, dtype="float32")
CARD = ModelCard("tiny", "f00d", vocab_size=97, max_model_len=256)


def hello(name: str, role: Role, *, epoch: str = "1", **changes: object) -> Hello:
    shard = Shard(0, 2, 0, 2, num_pages=64)
    fields: dict[str, object] = {
        "worker": name,
        "role": role,
        "epoch": epoch,
        "wire_version": WIRE_VERSION,
        "model": CARD,
        "layout": LAYOUT,
        "shards": (shard,),
        "transfer": "memory",
        "endpoints": (b"there",),
        "peer_address": "tcp://there",
        "max_running": 8,
    }
    return Hello(**(fields | changes))  # type: ignore[arg-type]


def load(**changes: int) -> Load:
    fields = {"num_running": 0, "num_waiting": 0, "num_free_pages": 64, "num_pages": 64, "waiting_tokens": 0}
    return Load(**(fields | changes))


@dataclass
class Bench:
    """A router brain with its clock, and everything it ever did. `check` runs after every event."""

    config: RouterConfig = field(default_factory=RouterConfig)
    deadlines: Deadlines = field(default_factory=Deadlines)
    now: float = 1000.0
    effects: list[Effect] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.brain = RouterBrain(self.config, "r1", deadlines=self.deadlines)
        self.lives: dict[str, Peer] = {}

    def on(self, event: Event) -> list[Effect]:
        effects = self.brain.on(event, self.now)
        self.brain.check()
        self.effects += effects
        return effects

    def join(self, *hellos: Hello) -> list[Effect]:
        effects = []
        for each in hellos:
            self.lives[each.worker] = Peer(each.worker, each.epoch)
            effects += self.hear(each.worker, each)
        return effects

    def hear(self, name: str, message: AnyMessage, *, epoch: str | None = None) -> list[Effect]:
        sender = self.lives[name] if epoch is None else Peer(name, epoch)
        return self.on(Received(sender, message))

    def wait(self, seconds: float, *, beating: Iterable[str] | None = None) -> list[Effect]:
        """Let time pass in ticks; all instances beat, or those named."""
        effects = []
        for _ in range(round(seconds * 10)):
            self.now += 0.1
            for name in list(self.lives) if beating is None else beating:
                effects += self.hear(name, Beat(load()))
            effects += self.on(Tick())
        return effects

    def submit(
        self,
        request_id: str,
        tokens: tuple[int, ...] = (5, 6, 7),
        *,
        deadline_s: float = 60.0,
        **sampling: object,
    ) -> list[Effect]:
        fields: dict[str, object] = {"max_tokens": 4, "temperature": 0.0}
        chosen = Sampling(**(fields | sampling))  # type: ignore[arg-type]
        return self.on(Submit(request_id, tokens, chosen, deadline_s))

    def abandon(self, request_id: str) -> list[Effect]:
        return self.on(Abandon(request_id, "left"))

    def first(self, name: str, handle: Handle, position: int, token: int, finish: Finish | None = None) -> list[Effect]:
        return self.hear(name, FirstToken(handle, position, Token(token), finish, cached_tokens=0))

    def tokens(
        self, name: str, handle: Handle, position: int, *tokens: int, finish: Finish | None = None
    ) -> list[Effect]:
        progress = Progress(handle, position, tuple(Token(token) for token in tokens), finish)
        return self.hear(name, Tokens((progress,)))

    def reserved(self, name: str, handle: Handle) -> list[Effect]:
        return self.hear(name, Reserved(handle, Ticket(name, self.lives[name].epoch, (1, 2), 0, "1")))

    def answer_of(self, request_id: str) -> list[int]:
        """Token ids that went to the client."""
        emits = [e for e in self.effects if isinstance(e, Emit) and e.request_id == request_id]
        return [token.id for emit in emits for token in emit.tokens]

    def endings_of(self, request_id: str) -> list[Emit | End]:
        return [
            effect
            for effect in self.effects
            if (isinstance(effect, End) or (isinstance(effect, Emit) and effect.finish))
            and effect.request_id == request_id
        ]


def pair_bench(**changes: object) -> Bench:
    """One prefill instance p0 and one decode instance d0 that have joined."""
    bench = Bench(**changes)  # type: ignore[arg-type]
    bench.join(hello("p0", Role.PREFILL), hello("d0", Role.DECODE))
    return bench


M = TypeVar("M", bound=Message)


def sent(effects: list[Effect], kind: type[M]) -> list[tuple[str, M]]:
    return [(e.to, e.message) for e in effects if isinstance(e, Send) and isinstance(e.message, kind)]


def only_reserve(effects: list[Effect]) -> tuple[str, Reserve]:
    [found] = sent(effects, Reserve)
    return found


def only_prefill(effects: list[Effect]) -> tuple[str, Prefill]:
    [found] = sent(effects, Prefill)
    return found


def decoding(bench: Bench, request_id: str, **sampling: object) -> Handle:
    """A request whose first token (70, at position 3) is out."""
    _, reserve = only_reserve(bench.submit(request_id, **sampling))
    bench.reserved("d0", reserve.handle)
    bench.first("p0", reserve.handle, 3, 70)
    return reserve.handle
