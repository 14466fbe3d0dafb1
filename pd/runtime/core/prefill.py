"""Requests whose prompt is computed here: entry, first tokens, and the handoff that follows. Pure.

Rules
1. What can never fit is refused at entry, so nobody starves behind it.
2. Whatever ends an attempt here is said to the router once, and to the peer (Fenced) as soon as no write is open.
3. Waiting and transferring have their own clocks: the request's deadline ends with the first token.
"""

from __future__ import annotations

from pd.runtime.core.decode import DecodePart
from pd.runtime.core.entry import Fault, misfit, refuse, ticket_fault
from pd.runtime.core.events import ROUTER, Effect, Peer, Send, Stamp
from pd.runtime.core.lives import Links
from pd.runtime.core.outbox import Outbox, Outboxes, offering
from pd.runtime.core.prompts import Prompts
from pd.runtime.core.request import Phase, Request, limit_of
from pd.runtime.core.settings import BrainSettings
from pd.runtime.core.step import Step
from pd.runtime.wire.messages import Failed, Fenced, FirstToken, Prefill
from pd.runtime.wire.plans import WriteDone
from pd.runtime.wire.values import Handle, Stage, Token
from pd.transfer.handoff import Event, OutboxState


class PrefillPart:
    """With `onward` (a colocated instance) requests go on to decode there; else they are handed off by ticket."""

    def __init__(
        self,
        settings: BrainSettings,
        me: Peer,
        *,
        prompts: Prompts,
        outboxes: Outboxes,
        links: Links,
        onward: DecodePart | None,
    ) -> None:
        self._settings = settings
        self._me = me
        self._onward = onward
        self.prompts = prompts
        self.outboxes = outboxes
        self._links = links
        self._stream_layers = settings.stream_layers  # until it was said to be of no use

    def submit(self, message: Prefill, now: float) -> list[Effect]:
        """Queue a request, or fail it at once saying why."""
        limit = limit_of(message.num_prompt, message.sampling, self._settings.max_model_len)
        fault = self._fault(message, limit)
        if fault is not None:
            return refuse(message, fault)
        request = Request(
            message.handle,
            message.tokens,
            message.num_prompt,
            message.sampling,
            limit,
            Phase.WAITING,
            deadline=now + message.deadline_s,
        )
        self.prompts.waiting[message.handle] = request
        if message.ticket is not None or message.hands_off:
            outbox = self.outboxes.open(request)
            if message.ticket is not None:
                self.outboxes.assign(outbox, message.ticket)
        effects: list[Effect] = [Stamp(str(message.handle), "queued", f"{len(message.tokens)} tokens")]
        if self._stream_layers is not None and (why := _why_not_streamed(message)) is not None:
            detail = f"--stream-layers {self._stream_layers}, as the router has {why}"
            effects.append(Stamp(self._me.name, "unused", detail))
            self._stream_layers = None
        return effects

    def cancel(self, handle: Handle, reason: str, *, now: float) -> list[Effect] | None:
        """The router wants it no more. None if nothing of it is here."""
        if self.prompts.find(handle) is None and self.outboxes.find(handle) is None:
            return None
        return self._end(handle, Event.STOP, reason=reason, now=now)

    def stop(self, sender: Peer, handle: Handle, *, now: float) -> list[Effect] | None:
        """The peer wants no more writes. None if there is no such handoff."""
        if handle in self.outboxes.doubts:
            return self.outboxes.prove(sender, now=now)  # it asks again, and severs us in the end
        outbox = self.outboxes.find(handle)
        if outbox is None:
            return None
        if outbox.life not in (sender, None):
            return [Stamp(str(handle), "stale", f"Stop from {sender.name}, epoch {sender.epoch}")]
        if outbox.is_said:
            return self.outboxes.move(outbox, Event.REMIND, now=now)
        effects = self.fail(handle, Stage.TRANSFER, reason=f"{sender.name} stopped it", now=now)
        if outbox.life is None:  # its ticket is under way, or was lost: it will not be obeyed
            effects.append(Send(sender.name, Fenced(handle, "it was stopped before its ticket came")))
        return effects

    def fill(self, step: Step, now: float) -> list[Effect]:
        """Plan chunks, and the writes of what they complete."""
        effects: list[Effect] = []
        for request, is_new in self.prompts.plan(step):
            outbox = self.outboxes.find(request.handle)
            if is_new:
                request.begun_at = now
                effects.append(Stamp(str(request.handle), "admitted", f"{request.num_cached} tokens cached"))
            if outbox is not None:
                if is_new:
                    effects += self.outboxes.move(outbox, Event.START, now=now)
                    effects += self.outboxes.tell(outbox, stop=request.num_cached, now=now)
                    step.ahead += self.outboxes.write(outbox, stop=request.num_cached)
                step.writes += self.outboxes.write(outbox, stop=request.num_computed)
        return effects

    def computed(self, step: Step, tokens: tuple[Token, ...], *, now: float) -> list[Effect]:
        """`step` is done. `tokens` are those of its `firsts`."""
        self.prompts.cache(step)
        effects: list[Effect] = []
        for request, stop in step.prompts:
            outbox = self.outboxes.find(request.handle)
            if outbox is not None and request.phase is not Phase.ENDED and stop < len(request.tokens):
                effects += self.outboxes.tell(outbox, stop=stop, now=now)
        for request, token in zip(step.firsts, tokens, strict=True):
            if request.phase is not Phase.ENDED:
                effects += self._first(request, token, now=now)
        return effects

    def write_done(self, done: WriteDone, now: float) -> list[Effect]:
        """Every rank has ended this job."""
        outbox = self.outboxes.end_job(done, now)
        assert outbox.life is not None, "a job has a peer"
        if done.error is None:
            self.outboxes.doubts.trust(outbox.life, done.job)
            return self.outboxes.settle(outbox, now)
        if done.may_land:
            self.outboxes.doubts.add(outbox.request.handle, outbox.life, self.outboxes.last_job)
        event = Event.DOUBT if done.may_land else Event.STOP
        reason = f"write to {outbox.life.name} failed: {done.error}"
        return self.fail(outbox.request.handle, Stage.TRANSFER, reason=reason, now=now, event=event)

    def lose(self, life: Peer, now: float) -> list[Effect]:
        """That life of a decode instance is over."""
        reason = f"decode instance {life.name} is lost"
        return self._fail_all(life, Event.PEER_LOST, reason=reason, now=now)

    def unreachable(self, life: Peer, reason: str, *, now: float) -> list[Effect]:
        """The transfer to that life is broken."""
        return self._fail_all(life, Event.STOP, reason=reason, now=now)

    def sweep(self, now: float) -> list[Effect]:
        """Look at all deadlines."""
        effects = self.outboxes.proofs.sweep(now)
        prompts = self.prompts
        for stage, queue in ((Stage.QUEUE, prompts.waiting), (Stage.PREFILL, prompts.computing)):
            for handle in [each.handle for each in queue.values() if now >= each.deadline]:
                reason = "no first token by its deadline"
                effects += self.fail(handle, stage, reason=reason, now=now, event=Event.TIMEOUT)
        for outbox in self.outboxes:
            if outbox.deadline is not None and now >= outbox.deadline:
                effects += self._overdue(outbox, now)
            elif now >= outbox.remind_at:
                effects += self.outboxes.move(outbox, Event.REMIND, now=now)
        return effects

    def fail(self, handle: Handle, stage: Stage, *, reason: str, now: float, event: Event = Event.STOP) -> list[Effect]:
        """End an attempt by a fault that another attempt may not meet. The router is told, if it was not before."""
        outbox = self.outboxes.find(handle)
        is_told = outbox is not None and outbox.is_over
        effects: list[Effect] = []
        if not is_told:
            effects.append(Send(ROUTER, Failed(handle, stage, reason, retryable=True)))
            effects.append(Stamp(str(handle), "failed", reason))
        return effects + self._end(handle, event, reason=reason, now=now)

    def _fault(self, message: Prefill, limit: int) -> Fault | None:
        fault = misfit(message, limit, settings=self._settings, decodes=self._onward is not None)
        if fault is None and message.ticket is not None:
            num_tokens, page_size = len(message.tokens), self._settings.page_size
            fault = ticket_fault(message.ticket, num_tokens, me=self._me, links=self._links, page_size=page_size)
        if fault is None and self.prompts.is_full:
            fault = Fault(Stage.QUEUE, f"{len(self.prompts.waiting)} requests wait already", True)
        return fault

    def _first(self, request: Request, token: Token, *, now: float) -> list[Effect]:
        """The prompt is computed and its token known: tell it at once, then hand off, or decode on."""
        handle, position = request.handle, request.num_tokens
        finish = request.take(token.id)
        cached = min(request.num_cached, request.num_prompt)
        effects: list[Effect] = [
            Send(ROUTER, FirstToken(handle, position, token, finish, cached, now - request.begun_at)),
            Stamp(str(handle), "first_token"),
        ]
        if self._onward is not None:
            return effects + (self._onward.finish(request, finish) if finish else [])
        outbox = self.outboxes.find(handle)
        if finish is not None or outbox is None:
            return effects + self._end(handle, Event.STOP, reason="the first token was the last", now=now)
        outbox.first = token
        event = Event.COMPUTED
        if outbox.ticket is None:
            event = Event.HOLD
        elif outbox.ticket.is_pull:
            event = offering(outbox.ticket)
        return effects + self._end(handle, event, reason="", now=now)

    def _overdue(self, outbox: Outbox, now: float) -> list[Effect]:
        handle, state = outbox.request.handle, outbox.state
        peer = outbox.life.name if outbox.life is not None else "decode"
        match state:
            case OutboxState.HOLDING:
                reason = f"no ticket came within {self._settings.deadlines.holding_s:g} s"
            case OutboxState.DIGESTING:
                reason = f"its digest was not made within {self._settings.deadlines.draining_s:g} s"
            case OutboxState.OFFERED:
                reason = f"{peer} did not renew its lease of {self._settings.deadlines.lease_s:g} s"
            case _:
                reason = f"no write to {peer} ended in time"
        if not outbox.is_over:
            return self.fail(handle, Stage.TRANSFER, reason=reason, now=now, event=Event.TIMEOUT)
        effects = self.outboxes.move(outbox, Event.TIMEOUT, now=now)  # frees what was withdrawn, or orders to sever
        if state in (OutboxState.STOPPING, OutboxState.ABANDONED) and outbox.life is not None:
            effects += self.unreachable(outbox.life, reason, now=now)
        return effects

    def _fail_all(self, life: Peer, event: Event, *, reason: str, now: float) -> list[Effect]:
        effects: list[Effect] = []
        for outbox in self.outboxes:
            if outbox.life == life:
                handle = outbox.request.handle
                effects += self.fail(handle, Stage.TRANSFER, reason=reason, now=now, event=event)
        return effects

    def _end(self, handle: Handle, event: Event, *, reason: str, now: float) -> list[Effect]:
        """Nothing more is computed for it. Its pages go when the handoff lets them, if there is one."""
        request, outbox = self.prompts.find(handle), self.outboxes.find(handle)
        if request is not None:
            self.prompts.end(request, releases=outbox is None)
        if outbox is not None:
            outbox.reason = outbox.reason or reason
            return self.outboxes.move(outbox, event, now=now)
        return []


def _why_not_streamed(message: Prefill) -> str | None:
    """Why no KV of it can go by groups of layers, in the router's options."""
    if message.ticket is not None and message.ticket.is_pull:
        return "--direction pull: decode reads the KV"
    return "--reserve late: KV goes when all is computed" if message.hands_off else None
