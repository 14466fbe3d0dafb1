"""Messages between router, instances and peers; those of a leader and its ranks are in `plans`. Pure: types only.

Rules
1. A message about a request carries its `handle`; an old attempt is thereby known.
2. The link's envelope carries the sender's name and epoch (`link.Peer`); an old life is thereby known.
3. Token positions count from the start of prompt + answer. `num_prompt` says where the answer begins.
4. Adding a field at a message's end with a default keeps WIRE_VERSION; anything else raises it.
"""

from __future__ import annotations

from pd.runtime.wire.plans import FromRank, ToRank
from pd.runtime.wire.values import Finish, Handle, Load, Message, ModelCard, Role, Sampling, Stage, Ticket, Token, Value
from pd.transfer.layout import KVLayout, Shard

# ---- membership: worker <-> router ------------------------------------------------------------------------------


class Hello(Message, frozen=True):
    """A worker's whole self; sent at start, and again whenever the router asks."""

    worker: str
    role: Role
    epoch: str  # one a process life
    wire_version: int
    model: ModelCard
    layout: KVLayout
    shards: tuple[Shard, ...]  # one a rank
    transfer: str  # backend name
    endpoints: tuple[bytes, ...]  # one a rank; Transport.endpoint()
    peer_address: str  # where this leader takes handoff messages; "" for roles without
    max_running: int
    operators: str = ""  # what computes: instances that differ here may round differently
    converts: bool = True  # KV to another dtype on its way; not where all of it goes as it lies


class Welcome(Message, frozen=True):
    """The router took the Hello."""


class Refusal(Message, frozen=True):
    """The router did not take the Hello, or a peer's; both values are in the reason."""

    reason: str
    epoch: str = ""  # of the life that is refused; another life of that name ignores it. "": whoever hears it


class Beat(Message, frozen=True):
    load: Load
    is_draining: bool = False  # a Bye may have been lost


class WhoAreYou(Message, frozen=True):
    """The router heard from a worker it does not know (it was restarted): say Hello again."""


class Peers(Message, frozen=True):
    """The whole list of the other role's living instances; sent whenever it changes."""

    peers: tuple[Hello, ...]


class DrainInstance(Message, frozen=True):
    """An operator asks the router, and the router the worker: take nothing new, end what runs, then leave.

    An operator says it again and again, to hear how far that is; a draining worker ignores it.
    """

    worker: str
    reason: str


class DrainReport(Message, frozen=True):
    """router -> operator: how far the draining is."""

    worker: str
    num_open: int  # requests that it still has a part in
    num_others: int  # instances of its role that take work
    is_gone: bool


class Bye(Message, frozen=True):
    """A worker leaves, or is about to: send it nothing new. It ends what it runs.

    `is_gone`: its ranks have ended, and it ends with this message.
    """

    reason: str
    is_gone: bool = False


# ---- router -> workers ------------------------------------------------------------------------------------------


class Reserve(Message, frozen=True):
    handle: Handle
    tokens: tuple[int, ...]  # prompt, then whatever was already streamed (a retried attempt)
    num_prompt: int
    sampling: Sampling
    prefill: str  # the worker that will write
    prefill_epoch: str
    deadline_s: float  # from now, for the pages to be landed in
    is_pull: bool = False  # decode reads the KV, instead of prefill writing it
    verifies: bool = False  # before it is used, its digest is compared with that of what was sent


class Prefill(Message, frozen=True):
    handle: Handle
    tokens: tuple[int, ...]
    num_prompt: int
    sampling: Sampling
    ticket: Ticket | None  # None: this instance decodes as well (colocated), there is nothing to decode, or:
    deadline_s: float  # from now, for the first token
    hands_off: bool = False  # the ticket comes in a Deliver, after the first token


class Deliver(Message, frozen=True):
    """Where decode reserves late: the ticket for what is computed and held."""

    handle: Handle
    ticket: Ticket


class Cancel(Message, frozen=True):
    handle: Handle
    reason: str


class Wanted(Message, frozen=True):
    """All that the router wants of this worker, now and then: either may have missed a message of the other.

    It comes after every message that gave or cancelled one of them. What is not listed is to be given up.
    """

    handles: tuple[Handle, ...]  # must be here
    handed: tuple[Handle, ...] = ()  # may be: prefill hands them off, or has done so


# ---- workers -> router ------------------------------------------------------------------------------------------


class Reserved(Message, frozen=True):
    handle: Handle
    ticket: Ticket


class Refused(Message, frozen=True):
    handle: Handle
    reason: str
    retry_after_s: float | None  # None: it can never fit; or nothing could ever be moved between the two
    is_parted: bool = False  # these lives of prefill and decode can meet no more: one has cut the other off


class FirstToken(Message, frozen=True):
    handle: Handle
    position: int  # of the token; num_prompt for a first attempt
    token: Token
    finish: Finish | None
    cached_tokens: int  # of the prompt, found in the prefix cache
    prefill_s: float = 0.0  # from its first chunk's plan


class Progress(Value, frozen=True):
    handle: Handle
    position: int  # of tokens[0]
    tokens: tuple[Token, ...]
    finish: Finish | None = None


class Tokens(Message, frozen=True):
    """One message a step for all requests of the instance."""

    progress: tuple[Progress, ...]


class Failed(Message, frozen=True):
    handle: Handle
    stage: Stage
    reason: str
    retryable: bool


class Cancelled(Message, frozen=True):
    """The pages are free, or will be when the peer has fenced. Nothing more follows for the handle."""

    handle: Handle


class Missing(Message, frozen=True):
    """Wanted, and not here: they never came, or the word of their end was lost."""

    handles: tuple[Handle, ...]


# ---- prefill <-> decode -----------------------------------------------------------------------------------------


class Landed(Message, frozen=True):
    """prefill -> decode: every page is written; here is the first token."""

    handle: Handle
    position: int
    token: Token
    num_pages: int  # decode's, written by jobs that ended well
    digest: int | None = None  # of all that was written, where the ticket asked for it


class Stop(Message, frozen=True):
    """decode -> prefill: write no more for this handle, and say Fenced."""

    handle: Handle


class Fenced(Message, frozen=True):
    """prefill -> decode: no write of this handle is in flight and none will start."""

    handle: Handle
    reason: str


class Heard(Message, frozen=True):
    """decode -> prefill: Landed, or Fenced, is known. It is said again until this comes."""

    handle: Handle


class Ahead(Message, frozen=True):
    """prefill -> decode: these pages may be read already; more are being computed. One that is lost is made up for by
    the next, or by Ready."""

    handle: Handle
    num_tokens: int  # that they reach to: whole pages of both sides
    pages: tuple[int, ...]  # prefill's, for tokens [held_tokens, num_tokens) of the ticket


class Ready(Message, frozen=True):
    """prefill -> decode: these pages are yours to read until the lease is over; here is the first token."""

    handle: Handle
    position: int
    token: Token
    pages: tuple[int, ...]  # prefill's, for tokens [held_tokens, num_tokens) of the ticket
    lease_s: float  # kept so long from each Renew on
    digest: int | None = None  # as in Landed


class Renew(Message, frozen=True):
    """decode -> prefill: still reading."""

    handle: Handle
    at: float  # decode's own clock; comes back as it is


class Renewed(Message, frozen=True):
    """prefill -> decode: the pages were still yours when that Renew was heard, and are for `lease_s` more."""

    handle: Handle
    at: float


class Released(Message, frozen=True):
    """decode -> prefill: the pages were read, or will not be."""

    handle: Handle


ToRouter = Hello | Beat | Bye | DrainInstance | Reserved | Refused | FirstToken | Tokens | Failed | Cancelled | Missing
FromRouter = Welcome | Refusal | WhoAreYou | Peers | DrainReport | Reserve | Prefill | Deliver | Cancel | Wanted
Handoff = Landed | Stop | Fenced | Heard | Ahead | Ready | Renew | Renewed | Released
AnyMessage = ToRouter | FromRouter | Handoff | ToRank | FromRank
