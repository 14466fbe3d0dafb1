"""What passes between the parts of a brain: steps out, ranks' answers in, peers that come and go, deadlines. Pure."""

from __future__ import annotations

from pd.runtime.core.events import Effect, Exit, Order, Peer, Stamp
from pd.runtime.core.lives import Lives, life_of
from pd.runtime.core.parts import Parts
from pd.runtime.core.ranks import Tally
from pd.runtime.core.settings import BrainSettings
from pd.runtime.wire.messages import AnyMessage, Hello
from pd.runtime.wire.plans import PeerUnreachable, Severed, StepDone, Transfer, WriteDone
from pd.runtime.wire.values import Handle, Stage


class Work:
    """Moves `parts`. Each method takes what happened and returns what is wanted done."""

    def __init__(self, settings: BrainSettings, parts: Parts) -> None:
        self._settings = settings
        self._parts = parts
        self._tally = Tally(settings.num_ranks)
        self._lives = Lives(settings.deadlines.vanished_s)

    def plan(self, now: float) -> list[Effect]:
        """Launch what can be launched."""
        effects: list[Effect] = []
        while self._parts.flight.has_room and self._parts.has_work:
            step = self._parts.flight.draft()
            if self._parts.decode is not None:
                effects += self._parts.decode.fill(step, lambda: self._give_way(now))
            if self._parts.prefill is not None:
                effects += self._parts.prefill.fill(step, now)
            launch = self._parts.flight.launch(step, now)
            if launch is None:
                break
            effects.append(launch)
            if step.ahead:  # behind it: ranks begin to compute before they look where that goes
                effects.append(Order(Transfer(tuple(step.ahead))))
        return effects

    def hear_rank(self, rank: int, message: AnyMessage, *, now: float) -> list[Effect] | None:
        """Take a rank's answer; it counts when all ranks have given theirs. None if nobody waits for it."""
        match message:
            case StepDone() if self._parts.flight.is_waiting_for(message.step):
                step_done = self._tally.step_done(rank, message)
                return self._step_done(step_done, now) if step_done else []
            case WriteDone() if self._parts.prefill is not None and self._parts.prefill.outboxes.is_open(message.job):
                write_done = self._tally.write_done(rank, message)
                return self._parts.prefill.write_done(write_done, now) if write_done else []
            case WriteDone() if self._parts.prefill and self._parts.prefill.outboxes.proofs.is_open(message.job):
                if (proved := self._tally.write_done(rank, message)) is not None:
                    self._parts.prefill.outboxes.proofs.end(proved)
                return []
            case WriteDone() if self._parts.offers is not None and self._parts.offers.is_waiting_for(message.job):
                digested = self._tally.write_done(rank, message)
                return self._parts.offers.digested(digested, now=now) if digested else []
            case WriteDone() if self._parts.inboxes is not None and self._parts.inboxes.reads.is_open(message.job):
                read_done = self._tally.write_done(rank, message)
                assert self._parts.reads is not None
                return self._parts.reads.end(read_done, now=now) if read_done else []
            case Severed() if self._parts.links.is_asked(Peer(message.peer, message.epoch)):
                severed = self._tally.severed(rank, message)
                return self._severed(severed, now) if severed else []
            case PeerUnreachable():
                return self._unreachable(message, now)
            case _:
                return None

    def meet(self, peers: tuple[Hello, ...], now: float) -> list[Effect]:
        """The router's whole list of the other role's instances."""
        new, lost = self._lives.update(peers, now)
        effects = self._lose(lost, now)
        for hello in new:
            self._parts.links.meet(hello, now)
            if self._parts.prefill is not None:
                self._parts.prefill.outboxes.doubts.meet(life_of(hello))
        return effects + self._attach(now)

    def cancel(self, handle: Handle, reason: str, *, now: float) -> list[Effect] | None:
        """Give up an attempt, wherever it is. None if nothing of it is here."""
        if self._parts.decode is not None and self._parts.decode.cancel(handle):
            return []
        for part in (self._parts.inboxes, self._parts.prefill):
            effects = part.cancel(handle, reason, now=now) if part is not None else None
            if effects is not None:
                return effects
        return None

    def clear_queue(self, reason: str, now: float) -> list[Effect]:
        """Fail what has not begun; the router places it elsewhere."""
        effects: list[Effect] = []
        if self._parts.prefill is not None:
            for handle in list(self._parts.prefill.prompts.waiting):
                effects += self._parts.prefill.fail(handle, Stage.QUEUE, reason=reason, now=now)
        return effects

    def sweep(self, now: float) -> list[Effect]:
        """Look at all deadlines."""
        effects = self._lose(self._lives.sweep(now), now)
        for part in (self._parts.inboxes, self._parts.prefill):
            effects += part.sweep(now) if part is not None else []
        effects += self._attach(now)
        if self._parts.links.is_isolated and self._parts.is_done():
            effects.append(Exit("every peer was cut off from here; a new life can reach them", failed=True))
        launched_at, step_s = self._parts.flight.oldest_launch(), self._settings.deadlines.step_s
        if launched_at is not None and now >= launched_at + step_s:
            effects.append(Exit(f"a step is not done after {step_s:g} s: a rank hangs", failed=True))
        return effects

    def _step_done(self, done: StepDone, now: float) -> list[Effect]:
        effects: list[Effect] = []
        for step, answer in self._parts.flight.finish(done):
            num_decodes = len(step.decodes)
            if self._parts.decode is not None and num_decodes:
                effects += self._parts.decode.report(step, answer.tokens[:num_decodes])
            if self._parts.prefill is not None and step.prompts:
                effects += self._parts.prefill.computed(step, answer.tokens[num_decodes:], now=now)
        return effects

    def _lose(self, lives: list[Peer], now: float) -> list[Effect]:
        effects: list[Effect] = []
        for life in lives:
            self._parts.links.part(life)
            effects.append(Stamp(life.name, "lost", f"epoch {life.epoch}"))
            effects += self._parts.links.cut(life)  # open jobs fail, and the ranks keep nothing of it
            for part in (self._parts.inboxes, self._parts.prefill):
                effects += part.lose(life, now) if part is not None else []
        return effects

    def _severed(self, answer: Severed, now: float) -> list[Effect]:
        """All ranks have answered. A writer needs no more than its jobs' own ends."""
        self._parts.links.answered(Peer(answer.peer, answer.epoch))
        return self._parts.inboxes.severed(answer, now) if self._parts.inboxes is not None else []

    def _attach(self, now: float) -> list[Effect]:
        prefill, inboxes = self._parts.prefill, self._parts.inboxes

        def has_open_jobs(peer: str) -> bool:
            is_writing = prefill is not None and prefill.outboxes.has_open_jobs(peer)
            return is_writing or (inboxes is not None and inboxes.reads.has_open(peer))

        return self._parts.links.attach(has_open_jobs, now)

    def _unreachable(self, message: PeerUnreachable, now: float) -> list[Effect]:
        """A rank cannot reach that life. Promises to it stand: membership and deadlines tell what becomes of them."""
        life, reason, links = Peer(message.peer, message.epoch), message.reason, self._parts.links
        effects = links.bar(life, reason) if message.is_final else links.break_off(life, reason, now=now)
        if effects and self._parts.prefill is not None:
            effects += self._parts.prefill.unreachable(life, reason, now=now)
        return effects

    def _give_way(self, now: float) -> list[Effect] | None:
        request = self._parts.prefill.prompts.youngest() if self._parts.prefill is not None else None
        if self._parts.prefill is None or request is None:
            return None
        reason = "preempted: no page left for an older request"
        return self._parts.prefill.fail(request.handle, Stage.DECODE, reason=reason, now=now)
