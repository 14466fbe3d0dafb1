"""KV that decode reads by itself: offers come, reads end, and what was read is admitted once it surely counts; and
what landed, by whomever, is compared with what was sent. Pure.

The offer's pages may be another's as soon as its lease is over, so what was read counts only if the offer stood
until then. Each Renew carries our own time, and the Renewed that brings it back says: it stood when this was heard,
and stands `lease_s` longer. Only our clock is read.

What prefill has computed of a request that it goes on with may be read ahead of the offer: its pages are held by the
request until they are offered, without a gap, so that a proof of the offer is one of them.

    ours      Renew s ────────── read done e ──► counts if e < s + TRUST * lease_s    no Renewed yet: it is waited for
    theirs        └► heard: kept for lease_s from here, which is later than s
"""

from __future__ import annotations

import math

from pd.runtime.core.events import Effect, Peer, Send, Stamp
from pd.runtime.core.inbox import Inbox, Inboxes
from pd.runtime.core.lives import Links
from pd.runtime.core.pages import num_pages_for
from pd.runtime.core.settings import BrainSettings
from pd.runtime.wire.messages import Ahead, Ready, Released, Renewed
from pd.runtime.wire.plans import WriteDone
from pd.runtime.wire.values import Stage
from pd.transfer.handoff import Event, InboxState

TRUST = 0.9
"""Of a lease: two hosts' clocks may run at rates some percent apart."""


class Reads:
    """Beside the Inboxes, whose states move by what is heard here."""

    def __init__(self, settings: BrainSettings, inboxes: Inboxes, links: Links) -> None:
        self._settings = settings
        self._inboxes = inboxes
        self._links = links

    def ahead(self, sender: Peer, message: Ahead, *, now: float) -> list[Effect]:
        """Some of the peer's pages may be read, and more will follow. Of what is known already nothing comes."""
        inbox = self._inboxes.find(message.handle, sender)
        if inbox is None or inbox.state not in (InboxState.AWAITING, InboxState.FOLLOWING):
            return []
        unit = math.lcm(self._settings.page_size, inbox.page_size)
        is_sound = message.num_tokens % unit == 0 and len(message.pages) == _num_due(inbox, message.num_tokens)
        if not is_sound or not inbox.num_read < message.num_tokens < len(inbox.reserve.tokens):
            return []
        inbox.num_offered, inbox.offered = message.num_tokens, message.pages
        return self._inboxes.move(inbox, Event.AHEAD, now=now)

    def begin(self, sender: Peer, message: Ready, *, now: float) -> list[Effect]:
        """The peer's pages may be read. If nobody wants them, it hears so."""
        inbox = self._inboxes.find(message.handle, sender)
        if inbox is None:
            return [Send(sender.name, Released(message.handle))]
        if inbox.state not in (InboxState.AWAITING, InboxState.FOLLOWING):
            return []
        if message.position != len(inbox.reserve.tokens):
            reason = f"{sender.name} offers {message.position} tokens, not {len(inbox.reserve.tokens)}"
            return self._inboxes.fail(inbox, Event.CANCEL, reason=reason, now=now)
        num_pages, num_due = len(message.pages), _num_due(inbox, message.position)
        if num_pages != num_due:
            reason = f"{sender.name} offers {num_pages} pages, and {num_due} have what is not here"
            return self._inboxes.fail(inbox, Event.CANCEL, reason=reason, now=now)
        inbox.first, inbox.ready, inbox.digest = message.token, message, message.digest
        inbox.num_offered, inbox.offered = message.position, message.pages
        return self._inboxes.move(inbox, Event.READY, now=now)

    def end(self, done: WriteDone, *, now: float) -> list[Effect]:
        """Every rank has ended this read, or told its digest."""
        inbox = self._inboxes.reads.end(done.job)
        if inbox.state is InboxState.CHECKING:
            return self._compare(inbox, done, now=now)
        if inbox.state is InboxState.DONE:  # given up while it was looked at
            return []
        inbox.is_doubtful |= done.may_land
        if done.error is not None:
            reason = f"read from {inbox.life.name} failed: {done.error}"
            return self._inboxes.fail(inbox, Event.CANCEL, reason=reason, now=now)
        if inbox.num_open:
            return []
        if inbox.state is InboxState.READING:
            inbox.read_at = now
        return self._land(inbox, now) or self._inboxes.move(inbox, inbox.drained, now=now)

    def renewed(self, sender: Peer, message: Renewed, *, now: float) -> list[Effect] | None:
        """The offer stood when that Renew was heard. None if nothing is read of it."""
        inbox = self._inboxes.find(message.handle, sender)
        if inbox is None or inbox.ready is None:
            return None
        inbox.proven_until = max(inbox.proven_until, message.at + inbox.ready.lease_s * TRUST)
        return self._land(inbox, now)

    def _land(self, inbox: Inbox, now: float) -> list[Effect]:
        """Admit what counts. If that is not known yet, ask again: the answer will say."""
        if inbox.state is not InboxState.READING or inbox.read_at is None:
            return []
        is_proven = inbox.proven_until > inbox.read_at
        return self._inboxes.move(inbox, inbox.arrived if is_proven else Event.REMIND, now=now)

    def _compare(self, inbox: Inbox, done: WriteDone, *, now: float) -> list[Effect]:
        """What landed is handed on if both sides tell the same digest of it."""
        if done.error is None and inbox.digest is not None and inbox.digest == done.digest:
            return self._inboxes.move(inbox, Event.AGREED, now=now)
        reason = self._difference(inbox, done)
        stamp = Stamp(str(inbox.reserve.handle), "corrupted", reason)
        return [stamp, *self._inboxes.fail(inbox, Event.DIFFERS, reason=reason, now=now, stage=Stage.VERIFY)]

    def _difference(self, inbox: Inbox, done: WriteDone) -> str:
        peer, num_tokens = inbox.life.name, len(inbox.reserve.tokens)
        if done.error is not None:
            return f"no digest of what {peer} sent: {done.error}"
        if inbox.digest is None:
            return f"{peer} told no digest of what it sent"
        what = f"tokens {inbox.table.num_shared * self._settings.page_size} to {num_tokens - 1}"
        hello = self._links.find(inbox.life)
        if hello is not None:
            what += f" ({hello.layout.num_layers} layers, {hello.layout.num_kv_heads} KV heads)"
        return f"KV of {what} is not what {peer} sent: digest {done.digest or 0:016x} here, {inbox.digest:016x} there"


def _num_due(inbox: Inbox, num_tokens: int) -> int:
    """Pages of the peer with those of its first `num_tokens` that are not held here."""
    return num_pages_for(num_tokens - inbox.num_held, inbox.page_size)
