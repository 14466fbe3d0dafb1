"""What decode says of a prompt that is computed: tickets that come late, leases of what it reads, Heard. Pure.

Rules
1. A ticket for what is not held is answered Fenced: nothing will be written by it, and its pages are free at once.
2. A Renew of what is not offered is answered Fenced: what was read since the last Renewed counts for nothing.
"""

from __future__ import annotations

from pd.runtime.core.entry import ticket_fault
from pd.runtime.core.events import ROUTER, Effect, Order, Peer, Send, Stamp
from pd.runtime.core.lives import Links
from pd.runtime.core.outbox import Outboxes, offering
from pd.runtime.core.prefill import PrefillPart
from pd.runtime.core.settings import BrainSettings
from pd.runtime.wire.messages import Fenced, Refused, Renew
from pd.runtime.wire.plans import Transfer, WriteDone
from pd.runtime.wire.values import Handle, Stage, Ticket
from pd.transfer.handoff import Event, OutboxState


class Offers:
    """Beside a PrefillPart, which ends attempts."""

    def __init__(
        self, settings: BrainSettings, me: Peer, *, prefill: PrefillPart, outboxes: Outboxes, links: Links
    ) -> None:
        self._settings = settings
        self._me = me
        self._prefill = prefill
        self._outboxes = outboxes
        self._links = links

    def deliver(self, handle: Handle, ticket: Ticket, *, now: float) -> list[Effect]:
        """Decode has reserved for what is held: write it, or offer it to be read."""
        outbox = self._outboxes.find(handle)
        if outbox is None:  # nothing of it is open, and nothing will be
            is_sure = handle not in self._outboxes.doubts
            return [Send(ticket.decode, Fenced(handle, "nothing of it is held"))] if is_sure else []
        if outbox.state is not OutboxState.HOLDING:
            return [Stamp(str(handle), "stale", "Deliver")]
        num_tokens, page_size = len(outbox.request.tokens), self._settings.page_size
        fault = ticket_fault(ticket, num_tokens, me=self._me, links=self._links, page_size=page_size)
        if fault is not None:
            outbox.life = Peer(ticket.decode, ticket.epoch)  # who is to hear that nothing will be written
            if fault.apart is not None:
                refused = Send(ROUTER, Refused(handle, fault.reason, *fault.apart))
                return [refused, *(self._prefill.cancel(handle, fault.reason, now=now) or [])]
            return self._prefill.fail(handle, fault.stage, reason=fault.reason, now=now)
        self._outboxes.assign(outbox, ticket)
        jobs = self._outboxes.write(outbox, stop=num_tokens)
        moves: list[Effect] = [Order(Transfer(tuple(jobs)))] if jobs else []
        return moves + self._outboxes.move(outbox, offering(ticket) if ticket.is_pull else Event.COMPUTED, now=now)

    def is_waiting_for(self, job: int) -> bool:
        """The digest of what is to be offered is asked of the ranks by that number."""
        return self._outboxes.digests.is_open(job)

    def digested(self, done: WriteDone, *, now: float) -> list[Effect]:
        """Every rank has told its digest of what is to be offered, unless it was given up meanwhile."""
        outbox = self._outboxes.digests.end(done)
        if outbox.state is not OutboxState.DIGESTING:
            return []
        if done.error is None:
            return self._outboxes.move(outbox, Event.DIGESTED, now=now)
        reason = f"there is no digest of it: {done.error}"
        return self._prefill.fail(outbox.request.handle, Stage.TRANSFER, reason=reason, now=now)

    def heard(self, sender: Peer, handle: Handle, *, now: float) -> list[Effect]:
        """The peer knows how the handoff ended."""
        outbox = self._outboxes.find(handle)
        return self._outboxes.move(outbox, Event.HEARD, now=now) if outbox and outbox.life == sender else []

    def renew(self, sender: Peer, message: Renew, *, now: float) -> list[Effect]:
        """The peer reads what was offered. If it is not any more, it hears so."""
        outbox = self._outboxes.find(message.handle)
        if outbox is None or outbox.life != sender:
            return [Send(sender.name, Fenced(message.handle, "nothing of it is offered"))]
        outbox.renewed_at = message.at
        return self._outboxes.move(outbox, Event.RENEW, now=now)

    def released(self, sender: Peer, handle: Handle, *, now: float) -> list[Effect]:
        """The peer reads no more."""
        outbox = self._outboxes.find(handle)
        return self._outboxes.move(outbox, Event.RELEASED, now=now) if outbox and outbox.life == sender else []
