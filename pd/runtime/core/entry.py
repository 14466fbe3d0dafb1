"""Whether an instance can ever take a request, and what it says if not. Pure."""

from __future__ import annotations

import math
from typing import NamedTuple

from pd.runtime.core.events import ROUTER, Effect, Peer, Send, Stamp
from pd.runtime.core.lives import Links
from pd.runtime.core.pages import num_pages_for
from pd.runtime.core.settings import BrainSettings
from pd.runtime.wire.messages import Failed, Fenced, Prefill, Refused, Reserve
from pd.runtime.wire.values import Stage, Ticket


class Apart(NamedTuple):
    """There is no way to the peer now."""

    retry_after_s: float | None
    is_parted: bool  # both as in Refused


class Fault(NamedTuple):
    stage: Stage
    reason: str
    is_retryable: bool
    apart: Apart | None = None  # None: it is a failed attempt


APART_S = 0.1
"""Until one that has no way to a peer is asked again: the peer may be on the list by then, or be attached again."""


def apart(life: Peer, links: Links, reason: str) -> tuple[str, Apart]:
    """What is said of a request for that life, which is not attached: `reason`, unless it can never be."""
    if (fault := links.why_barred(life)) is not None:
        return fault, Apart(None, is_parted=True)
    return reason, Apart(APART_S, links.is_cut(life))


def refuse(message: Prefill, fault: Fault) -> list[Effect]:
    """Fail a request that is not taken, and let its peer free what it promised."""
    answer: Failed | Refused = Failed(message.handle, fault.stage, fault.reason, fault.is_retryable)
    if fault.apart is not None:
        answer = Refused(message.handle, fault.reason, *fault.apart)
    effects: list[Effect] = [Send(ROUTER, answer), Stamp(str(message.handle), "failed", fault.reason)]
    if message.ticket is not None:
        effects.append(Send(message.ticket.decode, Fenced(message.handle, fault.reason)))
    return effects


def misfit(message: Prefill, limit: int, *, settings: BrainSettings, decodes: bool) -> Fault | None:
    """Why this request can never be served here. `decodes`: the instance is colocated."""
    num_tokens = len(message.tokens)
    if not 0 < num_tokens < limit:
        return Fault(Stage.QUEUE, f"{num_tokens} tokens leave none to generate of {limit}", False)
    most = limit - 1 if decodes else num_tokens
    num_pages = num_pages_for(most, settings.page_size)
    if num_pages > settings.num_pages:
        reason = f"{most} tokens need {num_pages} pages; there are {settings.num_pages}"
        return Fault(Stage.QUEUE, reason, False)
    if decodes and message.ticket is not None:
        return Fault(Stage.RESERVE, "a colocated instance hands nothing off; it got a ticket", True)
    if not decodes and message.ticket is None and not message.hands_off and limit > num_tokens + 1:
        return Fault(Stage.RESERVE, "a prefill instance decodes nothing; it got no ticket", True)
    return None


def ticket_fault(ticket: Ticket, num_tokens: int, *, me: Peer, links: Links, page_size: int) -> Fault | None:
    """Why KV cannot be written by this ticket, now. `page_size` is ours."""
    life = Peer(ticket.decode, ticket.epoch)
    if ticket.prefill_epoch != me.epoch:
        reason = f"the ticket is for epoch {ticket.prefill_epoch} of {me.name}, which is now {me.epoch}"
        return Fault(Stage.TRANSFER, reason, True)
    peer = links.find(life)
    if peer is None:
        reason, how = apart(life, links, f"{life.name} (epoch {life.epoch}) is not attached here")
        return Fault(Stage.TRANSFER, reason, True, how)
    size = peer.layout.page_size
    if ticket.held_tokens % math.lcm(page_size, size):
        reason = f"{ticket.held_tokens} held tokens are no whole pages of {page_size} and {size} tokens"
        return Fault(Stage.TRANSFER, reason, True)
    num_pages = num_pages_for(num_tokens - ticket.held_tokens, size)
    if len(ticket.pages) != num_pages:
        return Fault(Stage.TRANSFER, f"the ticket has {len(ticket.pages)} pages, not {num_pages}", True)
    return None


def pages_to_promise(message: Reserve, limit: int, page_size: int) -> int:
    """For what will land, and one token more where there will be one."""
    num_tokens = len(message.tokens)
    return num_pages_for(max(num_tokens, min(num_tokens + 1, limit - 1)), page_size)


def never_fits(message: Reserve, limit: int, settings: BrainSettings) -> Refused | None:
    """Why this request can never decode here."""
    num_tokens = len(message.tokens)
    num_pages = num_pages_for(limit - 1, settings.page_size)
    if not 0 < num_tokens < limit:
        return Refused(message.handle, f"{num_tokens} tokens leave none to generate of {limit}", None)
    if num_pages > settings.num_pages:
        return Refused(message.handle, f"{limit} tokens need {num_pages} pages; there are {settings.num_pages}", None)
    return None
