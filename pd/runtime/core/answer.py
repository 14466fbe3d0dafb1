"""One request as the router sees it: where its attempt is, and which tokens of the answer are out. Pure.

Rules
1. State moves by MOVES, in `Answer.move`, and nowhere else.
2. Each position goes to the client once, in order. What comes early is held; what comes twice is dropped.
"""

from __future__ import annotations

import enum
from typing import NamedTuple

from pd.runtime.core.events import Submit, Timings
from pd.runtime.core.member import Member
from pd.runtime.core.placement import Wish
from pd.runtime.wire.values import Finish, Handle, Sampling, Stage, Token

MAX_HELD = 1024
"""Tokens held while an earlier one is missing. More are dropped; the attempt is then repeated."""


class State(enum.Enum):
    QUEUED = "queued"  # no pair could take it yet
    RESERVING = "reserving"  # decode was asked for pages
    PREFILLING = "prefilling"  # until the first token
    HANDING = "handing"  # the first token is out, and only now decode was asked for pages
    DECODING = "decoding"  # from the first token on, the handoff included
    ENDED = "ended"


class Move(enum.Enum):
    RESERVE = enum.auto()
    PREFILL = enum.auto()
    FIRST_TOKEN = enum.auto()
    DELIVER = enum.auto()  # decode has pages, and prefill was told which
    REPEAT = enum.auto()  # the attempt came to nothing; the next waits for a pair
    END = enum.auto()


S, M = State, Move
MOVES: dict[tuple[State, Move], State] = {
    (S.QUEUED, M.RESERVE): S.RESERVING,
    (S.QUEUED, M.PREFILL): S.PREFILLING,  # colocated, or one token is all
    (S.RESERVING, M.PREFILL): S.PREFILLING,
    (S.PREFILLING, M.FIRST_TOKEN): S.DECODING,
    (S.DECODING, M.RESERVE): S.HANDING,
    (S.HANDING, M.DELIVER): S.DECODING,
    (S.HANDING, M.REPEAT): S.QUEUED,
    (S.HANDING, M.END): S.ENDED,
    (S.RESERVING, M.REPEAT): S.QUEUED,
    (S.PREFILLING, M.REPEAT): S.QUEUED,
    (S.DECODING, M.REPEAT): S.QUEUED,
    (S.QUEUED, M.END): S.ENDED,
    (S.RESERVING, M.END): S.ENDED,
    (S.PREFILLING, M.END): S.ENDED,
    (S.DECODING, M.END): S.ENDED,
}


class Piece(NamedTuple):
    """Tokens that may go to the client now."""

    position: int
    tokens: tuple[Token, ...]
    finish: Finish | None


class Course:
    """When an attempt's marks were passed. Owned by its answer."""

    __slots__ = ("_first_at", "_landed_at", "_prefill_s", "_received_at")

    def __init__(self, received_at: float) -> None:
        self._received_at = received_at
        self.begin()

    def begin(self) -> None:
        """A new attempt."""
        self._prefill_s = 0.0
        self._first_at: float | None = None
        self._landed_at: float | None = None

    def first(self, now: float, prefill_s: float) -> None:
        """The first token came, and prefill says how long it computed."""
        self._first_at, self._prefill_s = now, min(prefill_s, now - self._received_at)

    def decoded(self, now: float) -> None:
        """Decode reported tokens; only the first time counts."""
        if self._landed_at is None:
            self._landed_at = now

    def timings(self, now: float) -> Timings:
        """Said when the answer ends."""
        first_at = now if self._first_at is None else self._first_at
        handoff_s = 0.0 if self._landed_at is None else max(0.0, self._landed_at - first_at)
        return Timings(first_at - self._received_at - self._prefill_s, self._prefill_s, handoff_s)


class Answer:
    """Owned by the router brain from Submit to its one ending."""

    __slots__ = (
        "asked",
        "attempt",
        "avoid",
        "course",
        "decode",
        "due_at",
        "ends_at",
        "finish",
        "finish_at",
        "held",
        "is_computed",
        "known",
        "last_reason",
        "limit",
        "num_failures",
        "num_prompt",
        "order",
        "prefill",
        "queued_at",
        "ready_at",
        "request_id",
        "sampling",
        "started_at",
        "state",
        "unfit",
    )

    def __init__(self, submit: Submit, *, order: int, now: float) -> None:
        self.request_id = submit.request_id
        self.sampling: Sampling = submit.sampling
        self.num_prompt = len(submit.tokens)
        self.known = list(submit.tokens)  # the prompt, then every token that went to the client
        self.limit = self.num_prompt + submit.sampling.max_tokens  # where positions end
        self.order = order  # of arrival: who waits longer is served first
        self.ends_at = now + submit.deadline_s
        self.state = State.QUEUED
        self.due_at = self.ends_at  # when the state has lasted too long
        self.course = Course(now)
        self.queued_at = now
        self.ready_at = now  # not placed before: an attempt that failed again and again waits a little
        self.attempt = -1
        self.num_failures = 0
        self.last_reason = ""
        self.avoid: str | None = None
        self.unfit: set[str] = set()
        # ---- of the current attempt
        self.prefill: Member | None = None  # who computes; let go when decode's first token comes
        self.decode: Member | None = None  # who decodes; prefill itself when colocated
        self.asked: list[Member] = []  # of these two, who was given the attempt and is not known to be done with it
        self.started_at = self.num_prompt  # position of the attempt's first token: it was given so many
        self.is_computed = False
        self.held: dict[int, Token] = {}
        self.finish: Finish | None = None
        self.finish_at: int | None = None  # the position after the last token

    @property
    def handle(self) -> Handle:
        return Handle(self.request_id, self.attempt)

    @property
    def is_apart(self) -> bool:
        """Two instances serve this attempt, and the first still has to hand it off."""
        return self.prefill is not None and self.decode is not None and self.prefill is not self.decode

    @property
    def num_left(self) -> int:
        return self.limit - len(self.known)

    @property
    def look_at(self) -> float:
        """When the next of its deadlines may pass."""
        return min(self.due_at, self.ends_at)

    @property
    def wish(self) -> Wish:
        return Wish(self.known, self.num_left > 1, self.unfit, self.avoid)

    @property
    def stage(self) -> Stage:
        """Where the request is, in a person's word."""
        match self.state:
            case State.RESERVING | State.HANDING:
                return Stage.RESERVE
            case State.PREFILLING:
                return Stage.PREFILL
            case State.DECODING:
                return Stage.DECODE if self.prefill is None or self.prefill is self.decode else Stage.TRANSFER
            case State.QUEUED | State.ENDED:
                return Stage.QUEUE

    def move(self, move: Move) -> None:
        self.state = MOVES[self.state, move]

    def begin(self, prefill: Member, decode: Member | None) -> None:
        """A new attempt: a new handle, nothing held of the last. The members count it until let go."""
        self.attempt += 1
        self.started_at = len(self.known)
        self.held.clear()
        self.finish = self.finish_at = None
        self.course.begin()
        self.prefill = prefill
        self.decode = decode
        self.asked = []
        self.is_computed = False
        prefill.assign(self.started_at, pending=True)
        if decode is not None and decode is not prefill:
            decode.assign(self.started_at, pending=False)

    def rest(self, now: float, seconds: float) -> None:
        """Wait anew, and not begin before `seconds` have passed."""
        self.queued_at = now
        self.ready_at = now + seconds

    def computed(self) -> None:
        """The first token is here: prefill has nothing left to compute."""
        if self.prefill is not None and not self.is_computed:
            self.is_computed = True
            self.prefill.computed(self.started_at)

    def landed(self) -> None:
        """Decode has everything: let prefill go."""
        if self.prefill is not None and self.prefill is not self.decode:
            self.computed()
            self.prefill.release(self.started_at)
            self.asked.remove(self.prefill)
            self.prefill = None

    def let_go(self) -> list[Member]:
        """End the attempt. Returns who may still hold something of it, and must be told."""
        self.computed()
        for member in dict.fromkeys((self.prefill, self.decode)):
            if member is not None:
                member.release(self.started_at)
        asked, self.asked = self.asked, []
        self.prefill = self.decode = None
        return asked

    def accept(self, position: int, tokens: tuple[Token, ...], finish: Finish | None) -> Piece | None:
        """Take what an instance reports, and return what thereby may go to the client."""
        if finish is not None:
            self.finish, self.finish_at = finish, position + len(tokens)
        start = len(self.known)
        if position > start:
            self._hold(position, tokens)
            return None
        if position < start:
            tokens = tokens[start - position :]
        if self.held:
            tokens = self._followed(start, tokens)
        if len(tokens) > self.limit - start:
            tokens = tokens[: self.limit - start]
        for token in tokens:
            self.known.append(token.id)
        stop = start + len(tokens)
        if self.finish_at is not None and stop >= self.finish_at:
            return Piece(start, tokens, self.finish)
        if stop >= self.limit:
            return Piece(start, tokens, Finish.LENGTH)
        return Piece(start, tokens, None) if tokens else None

    def _hold(self, position: int, tokens: tuple[Token, ...]) -> None:
        for offset, token in enumerate(tokens):
            if len(self.held) >= MAX_HELD:
                return
            self.held.setdefault(position + offset, token)

    def _followed(self, start: int, tokens: tuple[Token, ...]) -> tuple[Token, ...]:
        """These tokens and the held ones that follow them without a gap."""
        run = list(tokens)
        while (token := self.held.pop(start + len(run), None)) is not None:
            run.append(token)
        for position in [position for position in self.held if position < start + len(run)]:
            del self.held[position]
        return tuple(run)


def is_handed(answer: Answer, member: Member) -> bool:
    """`member`, which was asked, need not have the attempt any more: its first token is out, and another decodes."""
    return answer.state is State.DECODING and member is not answer.decode
