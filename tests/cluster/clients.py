"""Clients: they ask, listen, leave, and hold the router to its word."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from pd.runtime.core.events import Abandon, Emit, End, Event, Submit
from pd.runtime.wire.values import Finish
from tests.cluster.clock import Clock
from tests.cluster.model import Answer, expected, token_at
from tests.cluster.scenario import Ask, Profile, Scenario
from tests.cluster.trace import Violation

SLACK_S = 0.5
"""Beyond its deadline, for the tick that finds it. A router's pause comes on top."""
PATIENCE_S = 10.0
"""For an answer, when nothing fails any more: no deadline of a request or a handoff may be needed then."""
CLOCK_ERROR = 1.04
"""A host's clock may run slow by three percent."""

Hear = Callable[[Event], None]


@dataclass
class Client:
    ask: Ask
    wanted: Answer
    tokens: list[int] = field(default_factory=list)
    ending: Finish | End | None = None
    has_left: bool = False
    ended_at: float | None = None

    @property
    def is_open(self) -> bool:
        return self.ended_at is None


class Clients:
    def __init__(self, clock: Clock, scenario: Scenario) -> None:
        self.endings: Counter[str] = Counter()
        self.num_open = 0
        self.reasons: list[str] = []
        self._clock = clock
        self._scenario = scenario
        self._clients: dict[str, Client] = {}

    def ask(self, ask: Ask, router: Hear | None) -> None:
        """Submit to the router, if there is one."""
        whole = self._scenario
        wanted = expected(ask.prompt, ask.sampling, num_heads=whole.num_heads, max_model_len=whole.max_model_len)
        client = Client(ask, wanted)
        self._clients[ask.request_id] = client
        if router is None:
            self._close(client, "no router")
            return
        self.num_open += 1
        submit = Submit(ask.request_id, ask.prompt, ask.sampling, ask.deadline_s)
        router(submit)

    def leave(self, request_id: str, router: Hear | None) -> bool:
        """Whether it was still there."""
        client = self._clients.get(request_id)
        if client is None or not client.is_open:
            return False
        client.has_left = True
        self.num_open -= 1
        self._close(client, "left")
        if router is not None:
            router(Abandon(request_id, "left"))
        return True

    def lose_router(self) -> None:
        """Its process died: all connections with it."""
        for client in self._clients.values():
            if client.is_open:
                self.num_open -= 1
                self._close(client, "router died")

    def tell(self, told: Emit | End) -> str | None:
        """What the router said to a client. Returns the request whose client leaves upon it."""
        client = self._clients[told.request_id]
        if not client.is_open:
            raise Violation(f"{told.request_id} has ended, and is told {told}")
        if isinstance(told, End):
            self._check_end(client, told)
            client.ending = told
            self.num_open -= 1
            self._close(client, str(told.status))
            self.reasons.append(f"{told.status} {told.reason}")
            return None
        return self._emit(client, told)

    def check_time(self, paused_s: float) -> None:
        """Nobody waits for longer than was asked, and `paused_s`."""
        for client in self._clients.values():
            if not client.is_open:
                continue
            due = client.ask.at + client.ask.deadline_s * CLOCK_ERROR + SLACK_S + paused_s
            due = min(due, max(client.ask.at, self._scenario.settled_at) + PATIENCE_S)
            if self._clock.now > due:
                raise Violation(f"{client.ask.request_id} waits since {client.ask.at:.3f}, and it is too long")

    def check_final(self) -> None:
        for client in self._clients.values():
            if client.is_open:
                raise Violation(f"{client.ask.request_id} got no ending")

    def has_finished(self, request_id: str) -> bool:
        """Well, with its last token."""
        return isinstance(self._clients[request_id].ending, Finish)

    def took_s(self, request_id: str) -> float:
        """From its question to its ending."""
        client = self._clients[request_id]
        assert client.ended_at is not None, f"{request_id} is open"
        return client.ended_at - client.ask.at

    def ending(self, request_id: str) -> Finish | End | None:
        """None: the client left, or lost the router."""
        return self._clients[request_id].ending

    def _emit(self, client: Client, emit: Emit) -> str | None:
        ask = client.ask
        want = client.wanted
        start = len(client.tokens)
        got = tuple(token.id for token in emit.tokens)
        for offset, token in enumerate(emit.tokens):
            if token != token_at(emit.position + offset, token.id, ask.sampling.logprobs):
                raise Violation(f"{ask.request_id}: {token} at {emit.position + offset}")
        if emit.position != len(ask.prompt) + start:
            raise Violation(f"{ask.request_id}: position {emit.position}, {len(ask.prompt) + start} is next")
        if got != want.tokens[start : start + len(got)]:
            raise Violation(f"{ask.request_id}: {got} at {emit.position}, not {want.tokens[start:]}")
        client.tokens += got
        if emit.finish is not None:
            if len(client.tokens) != len(want.tokens) or emit.finish is not want.finish:
                raise Violation(f"{ask.request_id}: {emit.finish} after {client.tokens}, expected {want}")
            client.ending = emit.finish
            self.num_open -= 1
            self._close(client, "finished")
        elif ask.leave_after is not None and len(client.tokens) >= ask.leave_after:
            return ask.request_id
        return None

    def _check_end(self, client: Client, end: End) -> None:
        fits = self._fits(client.ask)
        if self._scenario.profile is Profile.CALM and fits:
            raise Violation(f"{end}, though nothing is wrong")
        if self._scenario.profile is Profile.TIGHT and end.reason.startswith("gave up"):
            raise Violation(f"{end}, though nothing is wrong but a lack of pages")
        allowed = {429, 503, 504} if fits else {400, 429, 503, 504}
        if end.status not in allowed:
            raise Violation(f"{end}; allowed are {sorted(allowed)}")
        if end.status in (429, 503) and end.retry_after_s is None:
            raise Violation(f"{end} without a time to come back")

    def _fits(self, ask: Ask) -> bool:
        """Whether every instance could hold it, prefill also when it is repeated near its end."""
        limit = min(len(ask.prompt) + ask.sampling.max_tokens, self._scenario.max_model_len)
        return all(limit <= instance.num_pages * instance.page_size for instance in self._scenario.instances)

    def _close(self, client: Client, how: str) -> None:
        client.ended_at = self._clock.now
        self.endings[how] += 1
