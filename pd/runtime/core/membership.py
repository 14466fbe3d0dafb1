"""Who lives: Hello, Beat and Bye of the instances, and who is told of whom. Pure.

Rules
1. An instance is a name; a life of it is a (name, epoch). A new epoch of a name ends the old life at once.
2. A silent instance, or one that hung up, is first SUSPECT: its requests are taken back, nothing new is sent; its
   peers keep it.
   Silent for longer it is gone: its peers cut it off, which they cannot undo, so that life may not come back.
3. Whenever the instances of one role change, those of the other role are told the whole list.
4. Silence is counted while this process listens: a pause of our own is nobody's silence.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from typing import NamedTuple

from pd.runtime.core.events import Effect, Peer, Send, Stamp
from pd.runtime.core.member import OTHER, STANDINGS, Member, Sign, Standing, is_isolated, mismatch, unlike
from pd.runtime.wire.messages import DrainInstance, DrainReport, Hello, Peers, Refusal, Welcome, WhoAreYou
from pd.runtime.wire.values import Load, ModelCard, Role

PAUSE_S = 1.0
"""A longer gap between two ticks is our own pause: the shell promises ten a second."""
ASK_EVERY_S = 1.0
"""How often one stranger is asked who it is."""
TELL_EVERY_S = 5.0
"""Peers is said again this often: a lost one must not keep two instances apart for good."""
MAX_ENDED = 4096
"""Ended lives remembered, so that a late message of theirs is known as such."""


class Loss(NamedTuple):
    """Requests on this life must go elsewhere."""

    member: Member
    reason: str


class Changes(NamedTuple):
    effects: list[Effect]
    losses: list[Loss]


class Membership:
    def __init__(self, *, beat_timeout_s: float, dead_after_s: float) -> None:
        self._beat_timeout_s = beat_timeout_s
        self._dead_after_s = dead_after_s
        self._members: dict[str, Member] = {}
        self._ended: OrderedDict[Peer, str] = OrderedDict()  # life -> why it ended
        self._asked_at: dict[Peer, float] = {}
        self._ticked_at: float | None = None
        self._card: ModelCard | None = None

    def __iter__(self) -> Iterator[Member]:
        return iter(self._members.values())

    def find(self, sender: Peer, now: float) -> Member | None:
        """The living life that speaks; it is thereby heard. None for strangers and old lives."""
        member = self._members.get(sender.name)
        if member is None or member.peer.epoch != sender.epoch:
            return None
        member.heard_at = now
        if member.standing is Standing.SUSPECT:
            member.move(Sign.HEARD)
        return member

    def ask(self, stranger: Peer, now: float) -> list[Effect]:
        """Answer a message of nobody we know; an ended life is asked only if no other life has its name."""
        if stranger.name in self._members and stranger in self._ended:
            return []
        if now - self._asked_at.get(stranger, -ASK_EVERY_S) < ASK_EVERY_S:
            return []
        self._asked_at[stranger] = now
        return [Send(stranger.name, WhoAreYou())]

    def greet(self, sender: Peer, hello: Hello, now: float) -> Changes:
        """Take a Hello, or refuse it saying why. A repeated one is welcomed again and changes nothing."""
        known = self._members.get(sender.name)
        if known is not None and known.peer != sender and sender in self._ended:
            return Changes([], [])  # late, of a life that another has replaced
        if hello.role in OTHER and sender in self._ended:
            fault: str | None = ended(self._ended[sender])
        else:
            fault = mismatch(sender, hello, (member.hello for member in self))
        if fault is not None:
            refusal = Send(sender.name, Refusal(fault, sender.epoch))
            return Changes([refusal, Stamp(sender.name, "refused", fault)], [])
        self._asked_at.pop(sender, None)
        if known is not None and known.peer == sender:
            return self._welcome_again(known, hello, now)
        losses = []
        if known is not None:
            reason = f"{sender.name} was restarted: epoch {known.peer.epoch}, now {sender.epoch}"
            losses.append(self._end(known, Sign.REPLACED, reason))
        member = Member(hello, now)
        self._members[sender.name] = member
        self._ended.pop(sender, None)
        effects: list[Effect] = [Send(member.name, Welcome()), Stamp(member.name, "joined", hello.role.value)]
        if difference := unlike(hello, (other.hello for other in self)):
            effects.append(Stamp(member.name, "differs", difference))
        effects += self._tell(member, now)
        return Changes(effects + self._tell_others(member, now), losses)

    def drain(self, operator: Peer, order: DrainInstance) -> list[Effect]:
        """Pass an operator's order on, and say how far it is; or why it cannot be."""
        member = self._members.get(order.worker)
        if member is not None:
            alive = [other for other in self if other.standing is Standing.ALIVE and other is not member]
            num_others = sum(other.role in (member.role, Role.COLOCATED) for other in alive)
            report = DrainReport(order.worker, member.num_assigned, num_others, is_gone=False)
            return [Send(member.name, order), Send(operator.name, report)]
        if any(life.name == order.worker for life in self._ended):
            return [Send(operator.name, DrainReport(order.worker, 0, 0, is_gone=True))]
        names = ", ".join(sorted(self._members)) or "none"
        return [Send(operator.name, Refusal(f"no instance is named {order.worker}; there are: {names}"))]

    def beat(self, member: Member, load: Load, now: float) -> list[Effect]:
        member.report(load)
        return self._tell(member, now) if now - member.told_at >= TELL_EVERY_S else []

    def leave(self, member: Member, reason: str, now: float) -> Changes:
        """It said itself that it has ended: nothing is waited for."""
        losses = [self._end(member, Sign.DEAD, f"{member.name} has left: {reason}")]
        return Changes([Stamp(member.name, "left", reason), *self._tell_others(member, now)], losses)

    def tick(self, now: float) -> Changes:
        changes = Changes([], [])
        gap = 0.0 if self._ticked_at is None else now - self._ticked_at
        self._ticked_at = now
        for member in list(self._members.values()):
            if gap > PAUSE_S:
                member.heard_at += gap
            verdict = self._verdict(member, now)
            if verdict is not None:
                self._apply(member, *verdict, changes=changes, now=now)
        if self._asked_at:
            self._asked_at = {who: at for who, at in self._asked_at.items() if now - at < ASK_EVERY_S}
        return changes

    def card(self) -> ModelCard | None:
        """What all agree on, with the smallest limit of the living; of the last that lived if none does."""
        cards = [member.hello.model for member in self]
        if cards:
            self._card = min(cards, key=lambda card: card.max_model_len)
        return self._card

    def check(self) -> None:
        for name, member in self._members.items():
            assert member.name == name, f"{member.peer} is kept as {name}"
            assert member.standing is not Standing.GONE, f"{member.peer} is gone and still here"
            assert member.peer not in self._ended, f"{member.peer} has ended and still lives"
        assert len(self._ended) <= MAX_ENDED

    def _verdict(self, member: Member, now: float) -> tuple[Sign, str] | None:
        """What its silence says of it; or what all decode instances have done."""
        if member.parted and is_isolated(member, self):
            return Sign.DEAD, f"{member.name} is cut off from every living instance of the other role"
        silent_s = now - member.heard_at
        if silent_s < self._beat_timeout_s:
            return None
        sign = Sign.DEAD if silent_s >= self._dead_after_s else Sign.SILENT
        return sign, f"no beat of {member.name} for {silent_s:.1f} s"

    def _apply(self, member: Member, sign: Sign, reason: str, *, changes: Changes, now: float) -> None:
        if STANDINGS.get((member.standing, sign)) is Standing.GONE:
            changes.losses.append(self._end(member, sign, reason))
            changes.effects.append(Stamp(member.name, "lost", reason))
            if member.role in OTHER:
                changes.effects.append(Send(member.name, Refusal(ended(reason), member.peer.epoch)))
            changes.effects.extend(self._tell_others(member, now))
        elif member.move(sign):
            changes.losses.append(Loss(member, reason))
            changes.effects.append(Stamp(member.name, "suspect", reason))

    def _end(self, member: Member, sign: Sign, reason: str) -> Loss:
        member.move(sign)
        del self._members[member.name]
        self._ended[member.peer] = reason
        for other in self:
            other.forget(member.peer)
        while len(self._ended) > MAX_ENDED:
            self._ended.popitem(last=False)
        return Loss(member, reason)

    def _welcome_again(self, member: Member, hello: Hello, now: float) -> Changes:
        changed = member.hello != hello
        member.hello = hello
        member.heard_at = now
        member.move(Sign.HEARD)
        effects: list[Effect] = [Send(member.name, Welcome()), *self._tell(member, now)]
        return Changes(effects + self._tell_others(member, now) if changed else effects, [])

    def _tell(self, member: Member, now: float) -> list[Effect]:
        """Tell one instance of the other role's."""
        if member.role not in OTHER:
            return []
        member.told_at = now
        others = [other.hello for other in self if other.role is OTHER[member.role]]
        return [Send(member.name, Peers(tuple(sorted(others, key=lambda hello: hello.worker))))]

    def _tell_others(self, changed: Member, now: float) -> list[Effect]:
        others = [other for other in self if OTHER.get(other.role) is changed.role]
        return [effect for other in others for effect in self._tell(other, now)]


def hang_up(members: Membership, life: Peer) -> Changes:
    """Its connection is closed: most likely it has ended. If not, its next message says so."""
    member = next((member for member in members if member.peer == life), None)
    if member is None or not member.move(Sign.HUNG_UP):
        return Changes([], [])
    reason = f"the connection of {member.name} is closed"
    return Changes([Stamp(member.name, "suspect", reason)], [Loss(member, reason)])


def ended(reason: str) -> str:
    return f"this life has ended ({reason}) and its peers cut it off: start it again"
