"""A request's life as log lines and metrics. Reads events and effects; decides nothing.

Metric names follow the field's: TTFT, ITL, E2E, tokens in and out. One registry a router,
handed in, never the global one.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from pd.runtime.core.events import Emit, End, Stamp, Submit
from pd.runtime.wire.values import Finish, Load, Ticket

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
_COUNTED = ("repeated", "joined", "draining", "suspect", "left", "lost", "refused", "differs", "nonsense", "corrupted")
_LOUD = frozenset(
    {
        "joined",
        "left",
        "lost",
        "refused",
        "unreachable",
        "barred",
        "draining",
        "nonsense",
        "unexpected",
        "unused",
        "differs",
        "corrupted",
    }
)
"""Stamps about instances that a person wants to see; those of single requests are INFO all the same."""

_ROUTINE = frozenset(
    {"placed", "reserved", "queued", "admitted", "first_token", "offered", "drained", "landed", "finished"}
)
"""Stamps of a request that goes well, ten lines with its ending: DEBUG, which `--log instances` leaves out."""
_FINISHES = frozenset(finish.value for finish in Finish)


def log_stamp(log: logging.Logger, stamp: Stamp, *, me: str = "") -> None:
    """One line an event of a request's life, the subject first; `me` is named by the log already."""
    is_routine = stamp.what in _ROUTINE or (stamp.what == "ended" and stamp.detail in _FINISHES)
    level = logging.WARNING if stamp.what in _LOUD else logging.DEBUG if is_routine else logging.INFO
    if not log.isEnabledFor(level):
        return
    words = (stamp.subject if stamp.subject != me else "", stamp.what, stamp.detail)
    log.log(level, "%s", " ".join(word for word in words if word))


class TokenMetrics(Collector):
    """What is counted at every token. Plain additions, made into metrics when they are asked for: prometheus_client's
    own counter and histogram take ten times as long."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._num_tokens = 0
        self._num_gaps = [0] * (len(_SECONDS) + 1)  # by the first bound that is not below
        self._gaps_s = 0.0
        registry.register(self)

    def tokens(self, num: int) -> None:
        self._num_tokens += num

    def gap(self, seconds: float) -> None:
        """From one Emit of a request to the next."""
        self._num_gaps[bisect_left(_SECONDS, seconds)] += 1
        self._gaps_s += seconds

    def collect(self) -> Iterator[Metric]:
        yield CounterMetricFamily("pd_answer_tokens", "Answer tokens sent to clients", value=self._num_tokens)
        bounds = [*map(str, _SECONDS), "+Inf"]
        buckets = list(zip(bounds, itertools.accumulate(self._num_gaps), strict=True))
        yield HistogramMetricFamily("pd_itl_seconds", "Token to next token", buckets=buckets, sum_value=self._gaps_s)


@dataclass(slots=True)
class _Life:
    received: float  # seconds of the router's monotonic clock
    last_token: float | None = None


class RouterMetrics:
    """What the router counts about requests and instances."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._lives: dict[str, _Life] = {}
        self._ttft = Histogram("pd_ttft_seconds", "Request to first token", buckets=_SECONDS, registry=registry)
        self._e2e = Histogram("pd_e2e_seconds", "Request to last token", buckets=_SECONDS, registry=registry)
        self._prompt = Counter("pd_prompt_tokens", "Prompt tokens received", registry=registry)
        self._cached = Counter("pd_cached_tokens", "Prompt tokens found in a prefix cache", registry=registry)
        self._held = Counter("pd_held_tokens", "Prompt tokens whose KV decode held: not sent", registry=registry)
        self._streamed = TokenMetrics(registry)
        self._ended = Counter("pd_requests", "Requests by their ending", ["ending"], registry=registry)
        self._open = Gauge("pd_requests_open", "Requests without an ending yet", registry=registry)
        self._running = Gauge("pd_instance_running", "Requests with a slot", ["instance"], registry=registry)
        self._waiting = Gauge("pd_instance_waiting", "Requests queued", ["instance"], registry=registry)
        self._pages = Gauge("pd_instance_pages", "Pages of the pool", ["instance"], registry=registry)
        self._events = Counter(
            "pd_router_events", "Attempts repeated, and what befell instances", ["what"], registry=registry
        )
        self._dropped = Gauge("pd_link_dropped", "Messages dropped at the router's link", registry=registry)
        self._refused = Gauge("pd_link_refused", "Connections to the router's link that it refused", registry=registry)
        for what in _COUNTED:
            self._events.labels(what)
        self._free = Gauge("pd_instance_free_pages", "Pages nobody holds", ["instance"], registry=registry)

    def submitted(self, submit: Submit, now: float) -> None:
        self._lives[submit.request_id] = _Life(now)
        self._prompt.inc(len(submit.tokens))
        self._open.set(len(self._lives))

    def emitted(self, emit: Emit, now: float) -> None:
        life = self._lives.get(emit.request_id)
        if life is None:
            return
        self._streamed.tokens(len(emit.tokens))
        if emit.cached_tokens:
            self._cached.inc(emit.cached_tokens)
        if life.last_token is None:
            self._ttft.observe(now - life.received)
        else:
            self._streamed.gap(now - life.last_token)
        life.last_token = now
        if emit.finish is not None:
            self._e2e.observe(now - life.received)
            self._end(emit.request_id, emit.finish.value)

    def failed(self, end: End) -> None:
        self._end(end.request_id, f"error_{end.status}")

    def abandoned(self, request_id: str, ending: str) -> None:
        self._end(request_id, ending)

    def reserved(self, ticket: Ticket) -> None:
        self._held.inc(ticket.held_tokens)

    def beat(self, instance: str, load: Load) -> None:
        self._running.labels(instance).set(load.num_running)
        self._waiting.labels(instance).set(load.num_waiting)
        self._pages.labels(instance).set(load.num_pages)
        self._free.labels(instance).set(load.num_free_pages)

    def stamped(self, what: str) -> None:
        if what in _COUNTED:
            self._events.labels(what).inc()

    def linked(self, *, num_dropped: int, num_refused: int) -> None:
        """Of the link to the instances, since this router's start."""
        self._dropped.set(num_dropped)
        self._refused.set(num_refused)

    def left(self, instance: str) -> None:
        """Say nothing more of it: names come and go."""
        for gauge in (self._running, self._waiting, self._pages, self._free):
            with contextlib.suppress(KeyError):
                gauge.remove(instance)

    def _end(self, request_id: str, ending: str) -> None:
        if self._lives.pop(request_id, None) is not None:
            self._ended.labels(ending).inc()
            self._open.set(len(self._lives))
