"""An instance's brain with obedient ranks beside it, for tests: plain builders and a pool whose KV is a hash chain.

A cell of the pool holds the hash of all tokens up to its own, so a page that is wrong, late or used twice is seen
when the next token is computed. The sampled token is a function of that hash: the whole answer is a function of the
prompt alone, whatever the schedule.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

from pd.runtime.config import StepConfig
from pd.runtime.core.events import (
    ROUTER,
    Drain,
    Effect,
    Event,
    Launch,
    Order,
    Peer,
    Received,
    Send,
    Tick,
)
from pd.runtime.core.instance import BrainSettings, InstanceBrain
from pd.runtime.wire.messages import AnyMessage, Fenced, Heard, Hello, Landed, Peers, Prefill, Reserve, Tokens
from pd.runtime.wire.plans import SlotInit, StepDone, StepKind, StepPlan, Transfer, WriteDone, WriteJob
from pd.runtime.wire.values import WIRE_VERSION, Finish, Handle, ModelCard, Role, Sampling, Ticket, Token
from pd.transfer.layout import KVLayout, Shard

PAGE = 4
VOCAB = 29
EPOCH = "1"
_ROUTER = Peer(ROUTER, "")
M = TypeVar("M")


def hello(name: str, role: Role, *, epoch: str = EPOCH, page_size: int = PAGE) -> Hello:
    layout = KVLayout(num_layers=2, num_kv_heads=2, head_dim=8, page_size=page_size, dtype="float32")
    card = ModelCard("tiny", "f00d", VOCAB, 64)
    shards = (Shard(0, 2, 0, 2, num_pages=64),)
    return Hello(name, role, epoch, WIRE_VERSION, card, layout, shards, "memory", (b"there",), "tcp://there", 8)


def chains(tokens: tuple[int, ...]) -> list[int]:
    """The KV of each position."""
    found, last = [], 0
    for token in tokens:
        last = hash((last, token))
        found.append(last)
    return found


def sample(tokens: tuple[int, ...]) -> int:
    return chains(tokens)[-1] % VOCAB


def answer(request: Reserve | Prefill, max_model_len: int) -> tuple[tuple[int, ...], Finish]:
    """All tokens after `request.tokens`, and how it ends."""
    tokens = request.tokens
    limit = min(request.num_prompt + request.sampling.max_tokens, max_model_len)
    while True:
        tokens += (sample(tokens),)
        if tokens[-1] in request.sampling.stop_token_ids:
            return tokens[len(request.tokens) :], Finish.STOP
        if len(tokens) >= limit:
            return tokens[len(request.tokens) :], Finish.LENGTH


@dataclass
class _Slot:
    tokens: tuple[int, ...]
    pages: list[int]
    planned: int | None = None  # positions before it are in launched plans


@dataclass
class Ranks:
    """Run plans in order; raise AssertionError for a plan that no rank could obey."""

    page_size: int
    cells: dict[tuple[int, int], int] = field(default_factory=dict)
    slots: dict[int, _Slot] = field(default_factory=dict)

    def run(self, plan: StepPlan) -> tuple[Token, ...]:
        for slot in plan.retire:
            del self.slots[slot]
        for init in plan.admits:
            self._admit(init)
        tokens = []
        for chunk in plan.chunks:
            slot = self.slots[chunk.slot]
            slot.pages += chunk.pages
            assert chunk.start == (slot.planned or chunk.start), f"{chunk} does not follow {slot.planned}"
            slot.planned = chunk.stop
            self.compute(slot.tokens, slot.pages, start=chunk.start, stop=chunk.stop)
            assert not chunk.sample or chunk.stop == len(slot.tokens), "the sampled token is not the next"
            if chunk.sample:
                tokens.append(Token(sample(slot.tokens)))
                slot.tokens += (tokens[-1].id,)
        is_decode = all(chunk.stop - chunk.start == 1 and chunk.sample for chunk in plan.chunks)
        assert plan.kind is not StepKind.DECODE or is_decode
        assert (plan.kind is StepKind.IDLE) == (not plan.chunks)
        return tuple(tokens)

    def compute(self, tokens: tuple[int, ...], pages: list[int], *, start: int, stop: int) -> None:
        expected = chains(tokens)
        for position in range(start):
            found = self.cells.get(self.cell(pages, position))
            assert found == expected[position], f"position {position} of {tokens} is not what was computed"
        for position in range(start, stop):
            self.cells[self.cell(pages, position)] = expected[position]

    def receive(self, tokens: tuple[int, ...], ticket: Ticket) -> None:
        """What a peer writes: all but the prefix that is held here."""
        expected, held = chains(tokens), ticket.held_tokens
        for position in range(held, len(tokens)):
            self.cells[self.cell(ticket.pages, position - held)] = expected[position]

    def cell(self, pages: list[int] | tuple[int, ...], position: int) -> tuple[int, int]:
        return pages[position // self.page_size], position % self.page_size

    def _admit(self, init: SlotInit) -> None:
        assert init.slot not in self.slots, f"slot {init.slot} is taken"
        self.slots[init.slot] = _Slot(init.tokens, list(init.pages))


class Instance:
    """A brain, checked after each event, and what it wants done, by kind."""

    def __init__(
        self,
        role: Role,
        *,
        name: str = "me",
        epoch: str = EPOCH,
        num_pages: int = 64,
        num_ranks: int = 1,
        max_running: int = 8,
        max_prefill_tokens: int = 8,
        max_waiting: int = 16,
        max_model_len: int = 64,
        stream_layers: int | None = None,
    ) -> None:
        step = StepConfig(max_running=max_running, max_prefill_tokens=max_prefill_tokens, max_waiting=max_waiting)
        self.settings = BrainSettings(
            page_size=PAGE,
            num_pages=num_pages,
            num_ranks=num_ranks,
            step=step,
            max_model_len=max_model_len,
            stream_layers=stream_layers,
        )
        self.hello = hello(name, role, epoch=epoch)
        self.me = Peer(name, epoch)
        self.brain = InstanceBrain(self.settings, self.hello)
        self.ranks = Ranks(PAGE)
        self.now = 0.0
        self.effects: list[Effect] = []
        self.flying: list[StepPlan] = []
        self.jobs: list[WriteJob] = []  # begun, as their step is done or they had none to wait for, and not ended
        self.watch: Callable[[list[Effect]], None] = lambda effects: None
        self.are_peers_deaf = False  # else they say Heard at once, whichever life is meant
        self.lives: set[Peer] = set()  # met so far

    def on(self, event: Event) -> list[Effect]:
        effects = self.brain.on(event, self.now)
        self.brain.check()
        self.effects += effects
        self.flying += [effect.plan for effect in effects if isinstance(effect, Launch)]
        assert len(self.flying) <= 2, "more than two steps in flight"
        for order in said(effects, Transfer):
            self.jobs += [job for job in order.jobs if job.start < job.stop and not order.is_read]
        self.watch(effects)
        for effect in effects:
            if isinstance(effect, Send) and isinstance(effect.message, Landed | Fenced) and not self.are_peers_deaf:
                for life in [life for life in self.lives if life.name == effect.to]:
                    self.on(Received(life, Heard(effect.message.handle)))
        return effects

    def router(self, message: AnyMessage) -> list[Effect]:
        return self.on(Received(_ROUTER, message))

    def peer(self, sender: Peer, message: AnyMessage) -> list[Effect]:
        return self.on(Received(sender, message))

    def rank(self, message: AnyMessage, rank: int = 0) -> list[Effect]:
        if isinstance(message, WriteDone):
            self.jobs = [job for job in self.jobs if job.job != message.job]
        return self.on(Received(Peer(str(rank), ""), message))

    def meet(self, *peers: Hello) -> list[Effect]:
        self.lives |= {Peer(each.worker, each.epoch) for each in peers}
        return self.router(Peers(peers))

    def wait(self, seconds: float) -> list[Effect]:
        """Let time pass, with a tick each 100 ms."""
        effects: list[Effect] = []
        end = self.now + seconds
        while self.now < end:
            self.now = min(end, self.now + 0.1)
            effects += self.on(Tick())
        return effects

    def drain(self) -> list[Effect]:
        return self.on(Drain("test"))

    def step(self) -> list[Effect]:
        """The oldest step in flight is done on all ranks; its writes can begin."""
        plan = self.flying.pop(0)
        tokens = self.ranks.run(plan)
        self.jobs += plan.writes
        effects: list[Effect] = []
        for rank in range(self.settings.num_ranks):
            effects += self.rank(StepDone(plan.step, tokens if rank == 0 else (), 0.01), rank)
        return effects

    def end_job(self, job: WriteJob, error: str | None = None) -> list[Effect]:
        self.jobs.remove(job)
        effects: list[Effect] = []
        for rank in range(self.settings.num_ranks):
            effects += self.rank(WriteDone(job.job, error, 100, 0.01), rank)
        return effects

    def settle(self) -> list[Effect]:
        """Steps and writes go on until nothing is left to do."""
        effects: list[Effect] = []
        while self.flying or self.jobs:
            effects += self.step() if self.flying else self.end_job(self.jobs[0])
        return effects


def said(effects: list[Effect], kind: type[M]) -> list[M]:
    """Messages of that kind among the effects, sent, ordered or launched."""
    messages: list[object] = []
    for effect in effects:
        match effect:
            case Send(message=message) | Order(message=message):
                messages.append(message)
            case Launch(plan=plan):
                messages.append(plan)
            case _:
                messages.append(effect)
    return [message for message in messages if isinstance(message, kind)]


def streamed(effects: list[Effect], handle: Handle) -> tuple[tuple[int, ...], Finish | None]:
    """The tokens that `Tokens` messages brought for `handle`, checked for gaps, and how it ended."""
    ids: list[int] = []
    finish, position = None, None
    for message in said(effects, Tokens):
        for progress in message.progress:
            if progress.handle != handle:
                continue
            assert finish is None, f"{handle} goes on after its end"
            assert position in (None, progress.position), f"{handle} is at {progress.position}, not {position}"
            position = progress.position + len(progress.tokens)
            ids += [token.id for token in progress.tokens]
            finish = progress.finish
    return tuple(ids), finish


def prefill_for(
    request: str, num_tokens: int, *, ticket: Ticket | None = None, attempt: int = 1, **sampling: object
) -> Prefill:
    tokens = tuple((7 * i + len(request)) % VOCAB for i in range(num_tokens))
    chosen = Sampling(**({"max_tokens": 8} | sampling))  # type: ignore[arg-type]
    return Prefill(Handle(request, attempt), tokens, num_tokens, chosen, ticket, 30.0)


def reserve_for(
    request: str, num_tokens: int, *, life: Peer, attempt: int = 1, deadline_s: float = 30.0, **sampling: object
) -> Reserve:
    like = prefill_for(request, num_tokens, attempt=attempt, **sampling)
    return Reserve(like.handle, like.tokens, like.num_prompt, like.sampling, life.name, life.epoch, deadline_s)


def ticket_of(peer: Hello, num_tokens: int, *, first_page: int = 0, prefill_epoch: str = EPOCH) -> Ticket:
    size = peer.layout.page_size
    pages = tuple(range(first_page, first_page - (-num_tokens // size)))
    return Ticket(peer.worker, peer.epoch, pages, prefill_epoch=prefill_epoch)
