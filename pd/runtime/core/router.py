"""The router's brain: has pairs of instances serve requests, and hands on their tokens in order. Pure.

Rules
1. Messages of a life that membership does not know go no further than `_receive`; those of an attempt that is
   over go no further than `Dispatch.find`. An instance that still works for such an attempt hears it with the next
   Wanted.
2. Every request gets exactly one ending: an Emit with `finish`, an End, or its own Abandon.
"""

from __future__ import annotations

from collections import Counter
from typing import assert_never

from pd.runtime.config import RouterConfig
from pd.runtime.core.answer import Answer, State, is_handed
from pd.runtime.core.dispatch import RETRY_AFTER_S, Deadlines, Dispatch
from pd.runtime.core.events import (
    Abandon,
    Drain,
    Effect,
    End,
    Event,
    Exit,
    HungUp,
    Peer,
    Received,
    Stamp,
    Submit,
    Tick,
)
from pd.runtime.core.member import Member, Sign, missing_roles, why_none_meet
from pd.runtime.core.membership import Changes, Membership, hang_up
from pd.runtime.wire.messages import (
    AnyMessage,
    Beat,
    Bye,
    Cancelled,
    DrainInstance,
    Failed,
    FirstToken,
    Hello,
    Missing,
    Refused,
    Reserved,
    Tokens,
)
from pd.runtime.wire.values import Handle, ModelCard, Role, Stage


class RouterBrain:
    def __init__(self, config: RouterConfig, epoch: str, *, deadlines: Deadlines | None = None) -> None:
        """`epoch` names this life in `state`. Deadlines default to those of Deadlines()."""
        self._config = config
        self._epoch = epoch
        limits = deadlines or Deadlines()
        self._effects: list[Effect] = []
        self._members = Membership(beat_timeout_s=limits.beat_timeout_s, dead_after_s=limits.dead_after_s)
        self._dispatch = Dispatch(config, limits, self._members, self._effects)
        self._num_submitted = 0
        self._draining: str | None = None

    def on(self, event: Event, now: float) -> list[Effect]:
        match event:
            case Received(sender, message):
                self._receive(sender, message, now)
            case Submit():
                self._submit(event, now)
            case Tick():
                self._apply(self._members.tick(now), now)
                self._dispatch.tick(now)
            case Abandon(request_id, reason):
                answer = self._dispatch.answers.get(request_id)
                if answer is not None:
                    self._dispatch.end(answer, reason, now)
            case HungUp(peer) if peer is not None:
                self._apply(hang_up(self._members, peer), now)
            case HungUp():
                self._dispatch.lists.say(self._dispatch.answers.values())
            case Drain(reason):
                self._draining = reason
            case _:
                assert_never(event)
        if self._draining is not None and self.is_idle():
            self._effects.append(Exit(f"drained: {self._draining}", failed=False))
        effects = self._effects.copy()
        self._effects.clear()
        return effects

    def missing(self) -> tuple[Role, ...]:
        """Roles without an instance that takes work; empty when the cluster can serve."""
        return missing_roles(self._members)

    def why_none_meet(self) -> str | None:
        """Why no two of the living instances can serve together, as one of each two has said; None: some may."""
        return why_none_meet(self._members)

    def card(self) -> ModelCard | None:
        """The model served, with the smallest limit of the living; None before the first Hello."""
        return self._members.card()

    def state(self) -> dict[str, object]:
        """JSON-able: what a person asks at three in the morning."""
        states = Counter(answer.state for answer in self._dispatch.answers.values())
        return {
            "epoch": self._epoch,
            "missing": [role.value for role in self.missing()],
            "instances": [member.state() for member in self._members],
            "requests": {state.value: states[state] for state in State if state is not State.ENDED},
            "num_submitted": self._num_submitted,
        }

    def is_idle(self) -> bool:
        """Whether no request is open."""
        return not self._dispatch.answers

    def check(self) -> None:
        """Raise AssertionError for what only a bug can break. For tests: it looks at everything."""
        self._members.check()
        self._dispatch.check()
        answers = self._dispatch.answers.values()
        for member in self._members:
            held = [answer for answer in answers if member in (answer.prefill, answer.decode)]
            pending = [a for a in held if member is a.prefill and not a.is_computed]
            assert member.num_assigned == len(held), f"{member.name} counts {member.num_assigned}, has {len(held)}"
            assert member.held_tokens == sum(answer.started_at for answer in held), member.name
            assert member.pending_tokens == sum(answer.started_at for answer in pending), member.name

    def _submit(self, submit: Submit, now: float) -> None:
        assert submit.request_id not in self._dispatch.answers, f"request id {submit.request_id} is in use"
        self._num_submitted += 1
        num_waiting = len(self._dispatch.waiting)
        refused: tuple[int, str] | None = None
        if not submit.tokens or submit.sampling.max_tokens < 1:
            refused = 400, "a request needs a prompt, and max_tokens of at least 1"
        elif self._draining is not None:
            refused = 503, f"the router ends: {self._draining}"
        elif missing := self.missing():
            refused = 503, f"no {' and no '.join(role.value for role in missing)} instance is ready"
        elif submit.sampling.max_tokens > 1 and (why := self.why_none_meet()) is not None:
            refused = 503, why
        elif num_waiting >= self._config.max_queue:
            refused = 429, f"{num_waiting} requests wait already, and no more may"
        if refused is None:
            self._dispatch.queue(Answer(submit, order=self._num_submitted, now=now), now)
        else:
            status, reason = refused
            retry_after_s = None if status == 400 else RETRY_AFTER_S
            self._effects.append(End(submit.request_id, status, reason, retry_after_s))

    def _receive(self, sender: Peer, message: AnyMessage, now: float) -> None:
        member = self._members.find(sender, now)
        if isinstance(message, Hello):
            self._apply(self._members.greet(sender, message, now), now)
            self._dispatch.pump(now)
            return
        if isinstance(message, DrainInstance):
            self._effects += self._members.drain(sender, message)
            return
        if member is None:
            self._effects += self._members.ask(sender, now)
            return
        match message:
            case Tokens():
                self._tokens(member, message, now)
            case FirstToken():
                self._first_token(member, message, now)
            case Reserved(handle, ticket):
                answer = self._dispatch.find(member, handle)
                if answer is not None and answer.state in (State.RESERVING, State.HANDING):
                    self._dispatch.instruct(answer, ticket, now)
            case Refused(handle):
                answer = self._dispatch.find(member, handle)
                if answer is not None and (answer.state is not State.DECODING or member is answer.prefill):
                    self._dispatch.refuse(answer, member, message, now)
            case Failed():
                self._failed(member, message, now)
            case Cancelled(handle):
                answer = self._dispatch.find(member, handle)
                if answer is not None:
                    self._dispatch.fail(answer, member, answer.stage, reason="cancelled there", now=now)
            case Missing(handles):
                self._missing(member, handles, now)
            case Beat(load, is_draining):
                self._effects += self._members.beat(member, load, now)
                if is_draining and member.move(Sign.BYE):
                    self._effects.append(Stamp(member.name, "draining", "it says so with its beats"))
            case Bye(reason, is_gone):
                if is_gone:
                    self._dispatch.let_go_of_drained(member)
                    self._apply(self._members.leave(member, reason, now), now)
                elif member.move(Sign.BYE):
                    self._effects.append(Stamp(member.name, "draining", reason))
            case _:
                self._effects.append(Stamp(member.name, "nonsense", type(message).__name__))

    def _first_token(self, member: Member, message: FirstToken, now: float) -> None:
        answer = self._streaming(member, message.handle)
        if answer is None:
            return
        answer.course.first(now, message.prefill_s)
        piece = answer.accept(message.position, (message.token,), message.finish)
        self._dispatch.emit(answer, piece, member, cached_tokens=message.cached_tokens, now=now)

    def _tokens(self, member: Member, message: Tokens, now: float) -> None:
        for progress in message.progress:
            answer = self._streaming(member, progress.handle)
            if answer is None:
                continue
            if answer.state is State.DECODING:
                if answer.prefill is not answer.decode:
                    answer.course.decoded(now)
                answer.landed()
            piece = answer.accept(progress.position, progress.tokens, progress.finish)
            self._dispatch.emit(answer, piece, member, cached_tokens=None, now=now)

    def _streaming(self, member: Member, handle: Handle) -> Answer | None:
        """The answer that tokens of this attempt belong to."""
        answer = self._dispatch.find(member, handle)
        return answer if answer is not None and answer.state is not State.RESERVING else None

    def _failed(self, member: Member, message: Failed, now: float) -> None:
        answer = self._dispatch.find(member, message.handle)
        if answer is None:
            return
        stage, reason = message.stage, message.reason
        if stage is Stage.VERIFY:
            self._effects.append(Stamp(str(message.handle), "corrupted", f"{member.name}: {reason}"))
        has_begun = stage not in (Stage.QUEUE, Stage.RESERVE) or answer.state is State.DECODING
        if not has_begun:  # no failed attempt, but an instance without room
            after_s = RETRY_AFTER_S if message.retryable else None
            self._dispatch.refuse(answer, member, Refused(message.handle, reason, after_s), now)
        elif message.retryable:
            self._dispatch.fail(answer, member, stage, reason=reason, now=now)
        else:
            why = f"{member.name} failed in stage {stage.value}: {reason}"
            self._dispatch.end(answer, why, now, status=500, knows=member)

    def _missing(self, member: Member, handles: tuple[Handle, ...], now: float) -> None:
        """`member` does not have what is wanted of it."""
        for handle in handles:
            answer = self._dispatch.find(member, handle)
            if answer is not None and member in answer.asked and not is_handed(answer, member):
                reason = "it is not there: a message was lost"
                self._dispatch.fail(answer, member, answer.stage, reason=reason, now=now)

    def _apply(self, changes: Changes, now: float) -> None:
        self._effects += changes.effects
        for member, reason in changes.losses:
            for answer in list(self._dispatch.answers.values()):
                if member in (answer.prefill, answer.decode):
                    self._dispatch.fail(answer, member, answer.stage, reason=reason, now=now)
