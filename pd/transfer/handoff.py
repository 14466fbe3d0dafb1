"""The life of one KV handoff, seen from both its ends. Pure: states and events in, states and effects out.

Rules
1. Every state, event and transition stands in the two tables, and `step` alone reads them. A pair without a
   row changes nothing: messages may cross, repeat and come late.
2. Each end gives up its own pages, in a FREE (or READMIT) and nowhere else.
3. No end frees a page that a write may still touch. At the writing end DRAINED proves that none will; at the
   other end LANDED, FENCED or SEVERED does. Nothing else is a proof: not a deadline, not a vanished peer.
4. Pulled KV is offered under a lease: prefill keeps it until RELEASED or the lease is over. Decode's own reads are
   the only writes then, and what it read counts (LANDED) only if the offer is known to have stood that long. What it
   reads ahead, while prefill still computes, is held by the request itself: the later proof covers it.
5. The writing end's last word, Landed or Fenced, is said again until it is known to be heard.

    writing end  QUEUED ─start─► COMPUTING ─computed─► DRAINING ─drained─► LANDED     says Landed
                 any of these ─stop | timeout─► STOPPING ─drained─► FENCED            says Fenced
                 LANDED, FENCED ─heard─► DONE                                         says it again until then
                 any of these ─peer lost | doubt─► ABANDONED ─drained─► DONE          says nothing
    other end    RESERVED ─landed─► DONE                                              the pages are in use
                 RESERVED ─cancel | timeout─► FENCING ─fenced | landed─► DONE         says Stop until answered
                 RESERVED, FENCING ─peer lost, or it does not answer─► SEVERING ─severed─► DONE
                 SEVERING ─unclean | timeout─► QUARANTINED ─severed | fenced | landed─► DONE    back to use

Where decode reserves late, the ticket comes after the first token:

    writing end  COMPUTING ─hold─► HOLDING ─computed─► DRAINING, or ─offer─► OFFERED

Where decode pulls:

    offering end COMPUTING | HOLDING ─offer─► OFFERED ─released─► DONE                says Ready, answers Renew
                 OFFERED ─lease over─► FENCED                                         says Fenced
                 OFFERED ─stop | peer lost─► WITHDRAWN ─released | lease over─► DONE
    reading end  AWAITING ─ready─► READING ─landed─► DONE                             says Renew, then Released
                 AWAITING ─ahead─► FOLLOWING ─ready─► READING                         by chunks, if it was early
                 FOLLOWING, READING ─cancel | fenced | …─► DROPPING ─drained─► DONE   says Released

Where the two sides compare digests of what was sent and what landed (what is written is digested job by job):

    offering end COMPUTING | HOLDING ─digest─► DIGESTING ─digested─► OFFERED          nobody reads before that
    other end    RESERVED | READING ─check─► CHECKING ─agreed─► DONE                  nobody writes any more
                 CHECKING ─differs | cancel | timeout─► DONE
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum, auto
from typing import TypeVar


class Event(Enum):
    START = auto()  # writing end: the first chunk is planned
    CHUNK = auto()  # writing end: a chunk is planned; what it completes can be written after it
    COMPUTED = auto()  # writing end: the last chunk is done and its token known
    FILLED = auto()  # writing end: a chunk is done, whose KV the peer may read
    DRAINED = auto()  # whose jobs they are: none of this handoff is in flight or planned
    STOP = auto()  # writing end: write no more (the peer asked, or it failed or ended here)
    DOUBT = auto()  # whose jobs they are: one failed, and bytes of it may land all the same
    HOLD = auto()  # writing end: computed, and no ticket yet
    OFFER = auto()  # writing end: computed, and the ticket says that the peer reads
    DIGEST = auto()  # writing end: OFFER, but the ticket asks for a digest first
    DIGESTED = auto()  # writing end: here it is
    RENEW = auto()  # writing end: the peer reads still
    RELEASED = auto()  # writing end: the peer has read it, or will not
    HEARD = auto()  # writing end: the peer knows how it ended
    AHEAD = auto()  # other end: some of the peer's pages may be read, and more will follow
    READY = auto()  # other end: the peer's pages may be read
    LANDED = auto()  # other end: every page is here, with the first token
    CHECK = auto()  # other end: LANDED, but it is to be compared with what was sent
    AGREED = auto()  # other end: it is what was sent
    DIFFERS = auto()  # other end: it is not, or nobody can say
    FENCED = auto()  # other end: the writer promises that no write will come
    CANCEL = auto()  # other end: the pages are no longer wanted
    REMIND = auto()  # either end: an answer is overdue, ask or say it again
    SEVERED = auto()  # other end: nothing of that peer can write here any more
    UNCLEAN = auto()  # other end: it may still write
    TIMEOUT = auto()  # the state's deadline passed
    PEER_LOST = auto()  # membership: that life is over


class Effect(Enum):
    WRITE = auto()
    SEND_LANDED = auto()
    SEND_FENCED = auto()
    SEND_STOP = auto()
    ADMIT = auto()  # the pages, full, pass to the one that waits for them
    SEVER = auto()  # cut that peer's life off
    QUARANTINE = auto()  # set the pages aside: held by nobody, given to nobody
    READMIT = auto()  # quarantined pages are free again
    FREE = auto()
    SEND_AHEAD = auto()
    SEND_READY = auto()
    SEND_RENEWED = auto()
    SEND_RENEW = auto()
    SEND_RELEASED = auto()
    READ = auto()
    DIGEST = auto()  # have the ranks tell the digest of what is to be offered, or of what landed


class OutboxState(Enum):
    """The writing end."""

    QUEUED = auto()
    COMPUTING = auto()
    DRAINING = auto()
    STOPPING = auto()
    ABANDONED = auto()
    HOLDING = auto()  # computed; decode has no pages for it yet
    DIGESTING = auto()  # computed, to be offered with its digest
    OFFERED = auto()  # to be read, under a lease
    WITHDRAWN = auto()  # may be read until the lease is over, and is not renewed
    LANDED = auto()  # nothing is held any more; Landed was said, and is not known to be heard
    FENCED = auto()  # the same, of Fenced
    DONE = auto()


class InboxState(Enum):
    """The end whose pages are written."""

    RESERVED = auto()
    FENCING = auto()
    SEVERING = auto()
    QUARANTINED = auto()
    AWAITING = auto()  # nobody writes; what is to be read is not there yet
    FOLLOWING = auto()  # what is there is read, while more is computed
    READING = auto()
    DROPPING = auto()  # reads that nobody wants are under way
    CHECKING = auto()  # all is here, and nobody writes; our ranks look at it
    DONE = auto()


State = TypeVar("State", OutboxState, InboxState)
Table = Mapping[tuple[State, Event], tuple[State, tuple[Effect, ...]]]

_O, _I, _E, _F = OutboxState, InboxState, Event, Effect

OUTBOX: Table[OutboxState] = {
    (_O.QUEUED, _E.START): (_O.COMPUTING, ()),
    (_O.QUEUED, _E.STOP): (_O.FENCED, (_F.SEND_FENCED, _F.FREE)),
    (_O.QUEUED, _E.TIMEOUT): (_O.FENCED, (_F.SEND_FENCED, _F.FREE)),
    (_O.QUEUED, _E.PEER_LOST): (_O.DONE, (_F.FREE,)),
    (_O.COMPUTING, _E.CHUNK): (_O.COMPUTING, (_F.WRITE,)),
    (_O.COMPUTING, _E.FILLED): (_O.COMPUTING, (_F.SEND_AHEAD,)),
    (_O.COMPUTING, _E.COMPUTED): (_O.DRAINING, ()),
    (_O.COMPUTING, _E.STOP): (_O.STOPPING, ()),
    (_O.COMPUTING, _E.TIMEOUT): (_O.STOPPING, ()),
    (_O.COMPUTING, _E.DOUBT): (_O.ABANDONED, ()),  # no promise can be made: only severing us is a proof
    (_O.COMPUTING, _E.PEER_LOST): (_O.ABANDONED, ()),
    (_O.DRAINING, _E.DRAINED): (_O.LANDED, (_F.SEND_LANDED, _F.FREE)),
    (_O.DRAINING, _E.STOP): (_O.STOPPING, ()),
    (_O.DRAINING, _E.TIMEOUT): (_O.STOPPING, ()),
    (_O.DRAINING, _E.DOUBT): (_O.ABANDONED, ()),
    (_O.DRAINING, _E.PEER_LOST): (_O.ABANDONED, ()),
    (_O.STOPPING, _E.DRAINED): (_O.FENCED, (_F.SEND_FENCED, _F.FREE)),
    (_O.STOPPING, _E.TIMEOUT): (_O.STOPPING, (_F.SEVER,)),  # makes the writes fail, and thereby end
    (_O.STOPPING, _E.DOUBT): (_O.ABANDONED, ()),
    (_O.STOPPING, _E.PEER_LOST): (_O.ABANDONED, ()),
    (_O.ABANDONED, _E.DRAINED): (_O.DONE, (_F.FREE,)),
    (_O.ABANDONED, _E.TIMEOUT): (_O.ABANDONED, (_F.SEVER,)),
    (_O.COMPUTING, _E.HOLD): (_O.HOLDING, ()),
    (_O.HOLDING, _E.CHUNK): (_O.HOLDING, (_F.WRITE,)),
    (_O.HOLDING, _E.COMPUTED): (_O.DRAINING, ()),
    (_O.HOLDING, _E.STOP): (_O.FENCED, (_F.SEND_FENCED, _F.FREE)),
    (_O.HOLDING, _E.TIMEOUT): (_O.FENCED, (_F.SEND_FENCED, _F.FREE)),
    (_O.COMPUTING, _E.OFFER): (_O.OFFERED, (_F.SEND_READY,)),
    (_O.HOLDING, _E.OFFER): (_O.OFFERED, (_F.SEND_READY,)),
    (_O.COMPUTING, _E.DIGEST): (_O.DIGESTING, (_F.DIGEST,)),
    (_O.HOLDING, _E.DIGEST): (_O.DIGESTING, (_F.DIGEST,)),
    (_O.DIGESTING, _E.DIGESTED): (_O.OFFERED, (_F.SEND_READY,)),
    (_O.DIGESTING, _E.STOP): (_O.FENCED, (_F.SEND_FENCED, _F.FREE)),
    (_O.DIGESTING, _E.TIMEOUT): (_O.FENCED, (_F.SEND_FENCED, _F.FREE)),
    (_O.DIGESTING, _E.PEER_LOST): (_O.DONE, (_F.FREE,)),
    (_O.OFFERED, _E.RENEW): (_O.OFFERED, (_F.SEND_RENEWED,)),
    (_O.OFFERED, _E.RELEASED): (_O.DONE, (_F.FREE,)),
    (_O.OFFERED, _E.TIMEOUT): (_O.FENCED, (_F.SEND_FENCED, _F.FREE)),
    (_O.OFFERED, _E.STOP): (_O.WITHDRAWN, (_F.SEND_FENCED,)),
    (_O.OFFERED, _E.PEER_LOST): (_O.WITHDRAWN, ()),
    (_O.WITHDRAWN, _E.RELEASED): (_O.DONE, (_F.FREE,)),
    (_O.WITHDRAWN, _E.TIMEOUT): (_O.DONE, (_F.FREE,)),
    (_O.LANDED, _E.REMIND): (_O.LANDED, (_F.SEND_LANDED,)),
    (_O.LANDED, _E.HEARD): (_O.DONE, ()),
    (_O.LANDED, _E.TIMEOUT): (_O.DONE, ()),
    (_O.LANDED, _E.PEER_LOST): (_O.DONE, ()),
    (_O.FENCED, _E.REMIND): (_O.FENCED, (_F.SEND_FENCED,)),
    (_O.FENCED, _E.HEARD): (_O.DONE, ()),
    (_O.FENCED, _E.RELEASED): (_O.DONE, ()),
    (_O.FENCED, _E.TIMEOUT): (_O.DONE, ()),
    (_O.FENCED, _E.PEER_LOST): (_O.DONE, ()),
}

INBOX: Table[InboxState] = {
    (_I.RESERVED, _E.LANDED): (_I.DONE, (_F.ADMIT,)),
    (_I.RESERVED, _E.FENCED): (_I.DONE, (_F.FREE,)),
    (_I.RESERVED, _E.CANCEL): (_I.FENCING, (_F.SEND_STOP,)),
    (_I.RESERVED, _E.TIMEOUT): (_I.FENCING, (_F.SEND_STOP,)),
    (_I.RESERVED, _E.PEER_LOST): (_I.SEVERING, (_F.SEVER,)),
    (_I.FENCING, _E.FENCED): (_I.DONE, (_F.FREE,)),
    (_I.FENCING, _E.LANDED): (_I.DONE, (_F.FREE,)),  # it crossed our Stop: the last write is done
    (_I.FENCING, _E.REMIND): (_I.FENCING, (_F.SEND_STOP,)),
    (_I.FENCING, _E.TIMEOUT): (_I.SEVERING, (_F.SEVER,)),
    (_I.FENCING, _E.PEER_LOST): (_I.SEVERING, (_F.SEVER,)),
    (_I.SEVERING, _E.SEVERED): (_I.DONE, (_F.FREE,)),
    (_I.SEVERING, _E.FENCED): (_I.DONE, (_F.FREE,)),  # a late promise is as good
    (_I.SEVERING, _E.LANDED): (_I.DONE, (_F.FREE,)),
    (_I.SEVERING, _E.UNCLEAN): (_I.QUARANTINED, (_F.QUARANTINE,)),
    (_I.SEVERING, _E.TIMEOUT): (_I.QUARANTINED, (_F.QUARANTINE,)),
    (_I.QUARANTINED, _E.REMIND): (_I.QUARANTINED, (_F.SEND_STOP, _F.SEVER)),
    (_I.QUARANTINED, _E.SEVERED): (_I.DONE, (_F.READMIT,)),
    (_I.QUARANTINED, _E.FENCED): (_I.DONE, (_F.READMIT,)),
    (_I.QUARANTINED, _E.LANDED): (_I.DONE, (_F.READMIT,)),
    (_I.AWAITING, _E.READY): (_I.READING, (_F.READ, _F.SEND_RENEW)),
    (_I.AWAITING, _E.FENCED): (_I.DONE, (_F.FREE,)),
    (_I.AWAITING, _E.CANCEL): (_I.DONE, (_F.SEND_RELEASED, _F.FREE)),
    (_I.AWAITING, _E.TIMEOUT): (_I.DONE, (_F.SEND_RELEASED, _F.FREE)),
    (_I.AWAITING, _E.PEER_LOST): (_I.DONE, (_F.FREE,)),
    (_I.AWAITING, _E.AHEAD): (_I.FOLLOWING, (_F.READ,)),
    (_I.FOLLOWING, _E.AHEAD): (_I.FOLLOWING, (_F.READ,)),
    (_I.FOLLOWING, _E.READY): (_I.READING, (_F.READ, _F.SEND_RENEW)),
    (_I.FOLLOWING, _E.FENCED): (_I.DROPPING, ()),
    (_I.FOLLOWING, _E.CANCEL): (_I.DROPPING, ()),
    (_I.FOLLOWING, _E.TIMEOUT): (_I.DROPPING, ()),
    (_I.FOLLOWING, _E.PEER_LOST): (_I.DROPPING, ()),
    (_I.READING, _E.REMIND): (_I.READING, (_F.SEND_RENEW,)),
    (_I.READING, _E.LANDED): (_I.DONE, (_F.SEND_RELEASED, _F.ADMIT)),
    (_I.READING, _E.FENCED): (_I.DROPPING, ()),
    (_I.READING, _E.CANCEL): (_I.DROPPING, ()),
    (_I.READING, _E.TIMEOUT): (_I.DROPPING, ()),
    (_I.READING, _E.PEER_LOST): (_I.DROPPING, ()),
    (_I.RESERVED, _E.CHECK): (_I.CHECKING, (_F.DIGEST,)),
    (_I.READING, _E.CHECK): (_I.CHECKING, (_F.SEND_RELEASED, _F.DIGEST)),
    (_I.CHECKING, _E.AGREED): (_I.DONE, (_F.ADMIT,)),
    (_I.CHECKING, _E.DIFFERS): (_I.DONE, (_F.FREE,)),
    (_I.CHECKING, _E.CANCEL): (_I.DONE, (_F.FREE,)),
    (_I.CHECKING, _E.TIMEOUT): (_I.DONE, (_F.FREE,)),
    (_I.DROPPING, _E.DRAINED): (_I.DONE, (_F.SEND_RELEASED, _F.FREE)),
    (_I.DROPPING, _E.DOUBT): (_I.SEVERING, (_F.SEVER,)),
    (_I.DROPPING, _E.TIMEOUT): (_I.DROPPING, (_F.SEVER,)),  # makes the reads fail, and thereby end
}


def step(table: Table[State], state: State, event: Event) -> tuple[State, tuple[Effect, ...]]:
    """The next state and what to do. An event that means nothing in `state` changes nothing."""
    return table.get((state, event), (state, ()))
