"""The loads that a router is put under, and what a side did under each, over all turns."""

from __future__ import annotations

from dataclasses import dataclass, field

from pd.bench.compare.shape import Running
from pd.bench.load.asks import Ask, Conversation, Prompt
from pd.bench.load.drive import Drive, Traffic
from pd.bench.load.goals import Goals
from pd.bench.load.http import Server
from pd.bench.load.metrics import Summary, summarize
from pd.bench.load.outcome import Outcome
from pd.bench.options import RouterOptions
from pd.bench.routing.cpu import cpu_s
from pd.bench.routing.servers import FORM, IDS, TEXT
from pd.runtime.config import ConfigError

WARM, IDLE, REQUESTS, STREAMS = "warm", "idle", "requests", "streams"
CONCURRENCY = 64
IDLE_RATE = 20.0  # requests/s at which nothing waits
_IDLE_REQUESTS = 60
_WARM_REQUESTS = 50
_TIMEOUT_S = 60.0
"""Of an answer, which a working router gives in milliseconds and a stream's length."""


@dataclass(slots=True)
class Tally:
    """One load's answers, seconds and CPU time; of several turns together."""

    outcomes: list[Outcome] = field(default_factory=list)
    seconds: float = 0.0
    cpu_s: float = 0.0  # of the server's processes

    def add(self, other: Tally) -> None:
        self.outcomes += other.outcomes
        self.seconds += other.seconds
        self.cpu_s += other.cpu_s

    def summary(self) -> Summary:
        return summarize(self.outcomes, Goals(), seconds=self.seconds)


@dataclass(slots=True, eq=False)
class Side:
    """A server that is measured. Owned by the command."""

    name: str
    server: Running
    found: dict[str, Tally] = field(default_factory=dict)
    fault: ConfigError | None = None  # why it is measured no further

    async def turn(self, what: str, traffic: Traffic) -> Tally | None:
        """Measure it under a load once more. None, and a fault, if it ended or answers nothing at all."""
        tally = await _measure(self.server, traffic)
        self.fault = self.server.fault() or _silence(self.name, tally)
        if self.fault is not None:
            return None
        if what != WARM:
            self.found.setdefault(what, Tally()).add(tally)
        return tally


def loads(options: RouterOptions) -> dict[str, Traffic]:
    """In their order. The first is not told."""
    length = _TIMEOUT_S + options.tokens * options.step_ms / 1e3
    prompt = TEXT if options.vs else IDS
    warm, idle, requests = (_asks(prompt, num, 1) for num in (_WARM_REQUESTS, _IDLE_REQUESTS, options.requests))
    streams = _asks(prompt, options.streams, options.tokens)
    idle = [(place / IDLE_RATE, one) for place, (_, one) in enumerate(idle)]
    return {
        WARM: Traffic(arrivals=warm, concurrency=8, timeout_s=_TIMEOUT_S),
        IDLE: Traffic(arrivals=idle, timeout_s=_TIMEOUT_S),
        REQUESTS: Traffic(arrivals=requests, concurrency=CONCURRENCY, timeout_s=_TIMEOUT_S),
        STREAMS: Traffic(arrivals=streams, concurrency=options.streams, timeout_s=length),
    }


def _asks(prompt: Prompt, num: int, num_tokens: int) -> list[tuple[float, Conversation]]:
    return [(0.0, Conversation((Ask(prompt, num_tokens),)))] * num


async def _measure(server: Running, traffic: Traffic) -> Tally:
    client, before = Server(server.url), cpu_s(server.pid)
    drive = Drive(client, FORM, traffic)
    try:
        seconds = await drive.run()
    finally:
        client.close()
    return Tally(drive.live.outcomes, seconds, cpu_s(server.pid) - before)


def _silence(name: str, tally: Tally) -> ConfigError | None:
    """Nothing came through: there is no figure to tell."""
    if any(outcome.error is None for outcome in tally.outcomes):
        return None
    first = tally.outcomes[0]
    return ConfigError(f"{name} answered none of {len(tally.outcomes)} requests: {first.error}: {first.detail}")
