"""The brain of one prefill, decode or colocated instance: events in, effects out. Pure.

Rules
1. After each event, steps are planned while fewer than two are in flight.
2. A message of an old life, of an old attempt, or not for this role is dropped with a stamp, never with a fault.
3. Whatever a part waits for has a deadline, looked at in `Tick`.
4. A Stop or Cancel for what was never heard of is remembered: when it comes after all, it is not begun.
5. Every message may be lost: docs/protocol.md says of each who says it again, or who finds out.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import assert_never

from pd.runtime.core.attempts import Arrival, Attempts
from pd.runtime.core.entry import Fault, refuse
from pd.runtime.core.events import (
    ROUTER,
    Abandon,
    Drain,
    Effect,
    Event,
    Exit,
    HungUp,
    Peer,
    Received,
    Send,
    Stamp,
    Submit,
    Tick,
)
from pd.runtime.core.greeter import Greeter
from pd.runtime.core.parts import Parts
from pd.runtime.core.settings import BrainSettings, Deadlines
from pd.runtime.core.wants import Wants
from pd.runtime.core.work import Work
from pd.runtime.wire.messages import (
    Ahead,
    AnyMessage,
    Bye,
    Cancel,
    Cancelled,
    Deliver,
    DrainInstance,
    Fenced,
    Heard,
    Hello,
    Landed,
    Peers,
    Prefill,
    Ready,
    Refusal,
    Refused,
    Released,
    Renew,
    Renewed,
    Reserve,
    Stop,
    Wanted,
    Welcome,
    WhoAreYou,
)
from pd.runtime.wire.values import Handle, Load, Stage

__all__ = ["BrainSettings", "Deadlines", "InstanceBrain"]


class InstanceBrain:
    """`hello` says who this is (role, worker, epoch), and is sent to the router as it stands."""

    def __init__(self, settings: BrainSettings, hello: Hello) -> None:
        self._settings = settings
        self._me = Peer(hello.worker, hello.epoch)
        self._parts = Parts(settings, hello.role, self._me)
        self._work = Work(settings, self._parts)
        self._wants = Wants(self._parts, self._work)
        self._attempts = Attempts()
        self._greeter = Greeter(hello, settings.deadlines)
        self._draining: str | None = None  # why
        self._has_exited = False
        self._sweep_at = -math.inf

    def on(self, event: Event, now: float) -> list[Effect]:
        """Hear one event. `now`: seconds of this host's monotonic clock, never going back."""
        effects: list[Effect]
        match event:
            case Received(sender=sender, message=message):
                effects = self._receive(sender, message, now=now)
            case Tick():
                effects = self._tick(now)
            case Drain(reason=reason):
                effects = self._drain(reason, now)
            case Submit() | Abandon() | HungUp():
                effects = [self._unexpected(type(event).__name__, "this process")]
            case _:
                assert_never(event)
        effects += self._work.plan(now)
        self._wants.note(effects)
        return self._exit_once(effects)

    def load(self) -> Load:
        return self._parts.load()

    def is_idle(self) -> bool:
        """Nothing is held: no request, no handoff, and all pages free or only in the prefix cache."""
        return self._parts.is_idle()

    def check(self, reachable: Iterable[int] = ()) -> None:
        """Raise AssertionError with the invariant that is broken. Slow: for tests and simulations.
        `reachable`: pages that a peer's write may still reach."""
        self._parts.check(reachable)

    def _receive(self, sender: Peer, message: AnyMessage, *, now: float) -> list[Effect]:
        effects: list[Effect] | None
        if sender.name == ROUTER:
            effects = self._hear_router(message, now)
        elif sender.epoch:
            effects = self._hear_peer(sender, message, now=now)
        else:
            is_rank = sender.name.isdecimal() and int(sender.name) < self._settings.num_ranks
            effects = self._work.hear_rank(int(sender.name), message, now=now) if is_rank else None
        if effects is None:
            return [self._unexpected(type(message).__name__, sender.name)]
        return effects

    def _hear_router(self, message: AnyMessage, now: float) -> list[Effect] | None:
        match message:
            case Welcome():
                return self._greeter.welcome()
            case WhoAreYou():
                introduction = self._greeter.introduce(now)
                return introduction if self._draining is None else [*introduction, Send(ROUTER, Bye(self._draining))]
            case Refusal(reason=reason, epoch=epoch):
                return [Exit(reason, failed=True, refused=True)] if epoch in ("", self._me.epoch) else None
            case Peers(peers=peers):
                return self._work.meet(peers, now)
            case DrainInstance(worker=worker, reason=reason):
                return self._drain(reason, now) if worker == self._me.name else None
            case Reserve():
                return self._reserve(message, now)
            case Prefill():
                return self._submit(message, now)
            case Deliver(handle=handle, ticket=ticket) if self._parts.offers is not None:
                return self._parts.offers.deliver(handle, ticket, now=now)
            case Cancel(handle=handle, reason=reason):
                effects = self._work.cancel(handle, reason, now=now)
                if effects is None:
                    self._attempts.stop(handle)
                stamp = Stamp(str(handle), "cancelled", reason)
                return [*(effects or []), Send(ROUTER, Cancelled(handle)), stamp]
            case Wanted():
                return self._wants.hear(message, now)
            case _:
                return None

    def _hear_peer(self, sender: Peer, message: AnyMessage, *, now: float) -> list[Effect] | None:
        parts = self._parts
        prefill, offers, inboxes, reads = parts.prefill, parts.offers, parts.inboxes, parts.reads
        effects: list[Effect] | None
        match message:
            case Stop(handle=handle) if prefill is not None:
                effects = prefill.stop(sender, handle, now=now)
                if effects is None:  # nothing of it is open, and nothing will be
                    self._attempts.stop(handle)
                    effects = [Send(sender.name, Fenced(handle, "nothing of it is open"))]
                return effects
            case Heard(handle=handle) if offers is not None:
                return offers.heard(sender, handle, now=now)
            case Renew() if offers is not None:
                return offers.renew(sender, message, now=now)
            case Released(handle=handle) if offers is not None:
                return offers.released(sender, handle, now=now)
            case Ahead() if reads is not None:
                return reads.ahead(sender, message, now=now)
            case Ready() if reads is not None:
                return reads.begin(sender, message, now=now)
            case Renewed(handle=handle) if reads is not None:
                effects = reads.renewed(sender, message, now=now)
            case Landed(handle=handle) if inboxes is not None:
                effects = inboxes.landed(sender, message, now=now)
            case Fenced(handle=handle) if inboxes is not None:
                effects = inboxes.fenced(sender, handle, now=now)
            case _:
                return None
        if effects is None:
            effects = [self._stale(handle, message)]
        if not isinstance(message, Renewed):  # the last word of a handoff
            effects.append(Send(sender.name, Heard(handle)))
        return effects

    def _reserve(self, message: Reserve, now: float) -> list[Effect] | None:
        inboxes = self._parts.inboxes
        if inboxes is None:
            return None
        effects = self._supersede(message.handle, now)
        if self._attempts.begin(message.handle) is not Arrival.NEW:
            return [*effects, self._stale(message.handle, message)]
        if self._draining is not None:
            retry_after_s = self._settings.deadlines.retry_after_s
            return [*effects, Send(ROUTER, Refused(message.handle, self._draining, retry_after_s))]
        return effects + inboxes.reserve(message, now)

    def _submit(self, message: Prefill, now: float) -> list[Effect] | None:
        prefill = self._parts.prefill
        if prefill is None:
            return None
        effects = self._supersede(message.handle, now)
        arrival = self._attempts.begin(message.handle)
        match arrival:
            case Arrival.STALE:
                return [*effects, self._stale(message.handle, message)]
            case Arrival.STOPPED:
                return effects + refuse(message, Fault(Stage.QUEUE, "it was stopped before it came", True))
            case Arrival.NEW if self._draining is not None:
                return effects + refuse(message, Fault(Stage.QUEUE, self._draining, True))
            case Arrival.NEW:
                return effects + prefill.submit(message, now)
            case _:
                assert_never(arrival)

    def _supersede(self, handle: Handle, now: float) -> list[Effect]:
        """The router has given up the attempt before this one."""
        earlier = self._attempts.earlier(handle)
        effects = self._work.cancel(earlier, f"attempt {handle.attempt} follows", now=now) if earlier else None
        return effects or []

    def _tick(self, now: float) -> list[Effect]:
        effects = self._greeter.tick(self._parts.load, now, is_draining=self._draining is not None)
        if now >= self._sweep_at:
            self._sweep_at = now + self._settings.deadlines.sweep_s
            effects += self._work.sweep(now)
        return effects

    def _drain(self, reason: str, now: float) -> list[Effect]:
        if self._draining is not None:
            return []
        self._draining = f"{self._me.name} is draining: {reason}"
        return [Send(ROUTER, Bye(reason)), *self._work.clear_queue(self._draining, now)]

    def _exit_once(self, effects: list[Effect]) -> list[Effect]:
        if self._draining is not None and not self._has_exited and self._parts.is_done():
            effects.append(Exit(self._draining, failed=False))
        if not any(isinstance(effect, Exit) for effect in effects):
            return effects
        kept = [effect for effect in effects if not self._has_exited or not isinstance(effect, Exit)]
        self._has_exited = True
        return kept

    def _unexpected(self, what: str, sender: str) -> Stamp:
        return Stamp(self._me.name, "unexpected", f"{what} from {sender}")

    def _stale(self, handle: Handle, message: AnyMessage) -> Stamp:
        return Stamp(str(handle), "stale", type(message).__name__)
