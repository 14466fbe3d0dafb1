"""Every message that crosses a process border. Pure: types and nothing else.

Rules
1. A message about a request carries its `handle`; an old attempt is thereby known.
2. The link's envelope carries the sender's name and epoch (`link.Peer`); an old life is thereby known.
3. Token positions count from the start of prompt + answer. `num_prompt` says where the answer begins.
4. Adding a field at a message's end with a default keeps WIRE_VERSION; anything else raises it.
"""

from __future__ import annotations

import enum

import msgspec

from pd.transfer.layout import KVLayout, Shard

WIRE_VERSION = 3


class Value(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A part of a message."""


class Message(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Travels alone; its tag is its class name."""


# ---- parts ----------------------------------------------------------------------------------------------------


class Handle(Value, frozen=True):
    """Names one attempt at one request."""

    request_id: str
    attempt: int

    def __str__(self) -> str:
        return f"{self.request_id}#{self.attempt}"


class Role(enum.Enum):
    ROUTER = "router"
    PREFILL = "prefill"
    DECODE = "decode"
    COLOCATED = "colocated"


class Finish(enum.Enum):
    STOP = "stop"  # a stop token id was sampled; it is the last token reported
    LENGTH = "length"  # max_tokens or the model's limit


class Stage(enum.Enum):
    """Where a request was when it failed; words a person reads."""

    QUEUE = "queue"
    RESERVE = "reserve"
    PREFILL = "prefill"
    TRANSFER = "transfer"
    DECODE = "decode"


class Sampling(Value, frozen=True):
    """How to choose tokens. Randomness is a function of (seed, position) alone."""

    max_tokens: int  # of the answer, counted from num_prompt, streamed ones included
    seed: int = 0
    temperature: float = 1.0  # 0: greedy
    top_p: float = 1.0
    top_k: int | None = None
    min_p: float = 0.0
    min_tokens: int = 0  # stop tokens cannot be sampled before
    stop_token_ids: tuple[int, ...] = ()  # end-of-text among them, unless the client ignores it
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    logprobs: int | None = None  # how many alternatives to report with each token; None: no logprobs at all


class Token(Value, frozen=True):
    """One sampled token. `logprob` and `top` only where asked for."""

    id: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


class Ticket(Value, frozen=True):
    """Decode's promise: these pages are yours to write until you say Landed or Fenced."""

    decode: str  # worker name
    epoch: str
    pages: tuple[int, ...]  # decode's page numbers, for tokens [held_tokens, num_tokens)
    held_tokens: int = 0  # a prefix decode already holds, whole pages: not sent
    prefill_epoch: str = ""  # Reserve's: the one life of the prefill instance that may write; another must not
    is_pull: bool = False  # nobody writes: say Ready, and decode reads


class ModelCard(Value, frozen=True):
    """What two instances must agree on."""

    name: str  # as clients say it
    fingerprint: str  # hash of config and weights' names, shapes and sizes
    vocab_size: int
    max_model_len: int  # tokens of prompt + answer this instance takes: the model's limit, or its pool's


class Load(Value, frozen=True):
    num_running: int
    num_waiting: int
    num_free_pages: int
    num_pages: int
    waiting_tokens: int  # prompt tokens queued and not yet computed


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


class Welcome(Message, frozen=True):
    """The router took the Hello."""


class Refusal(Message, frozen=True):
    """The router did not take the Hello, or a peer's; both values are in the reason."""

    reason: str
    epoch: str = ""  # of the life that is refused; another life of that name ignores it. "": whoever hears it


class Beat(Message, frozen=True):
    load: Load


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


# ---- workers -> router ------------------------------------------------------------------------------------------


class Reserved(Message, frozen=True):
    handle: Handle
    ticket: Ticket


class Refused(Message, frozen=True):
    handle: Handle
    reason: str
    retry_after_s: float | None  # None: it can never fit
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


# ---- prefill <-> decode -----------------------------------------------------------------------------------------


class Landed(Message, frozen=True):
    """prefill -> decode: every page is written; here is the first token."""

    handle: Handle
    position: int
    token: Token


class Stop(Message, frozen=True):
    """decode -> prefill: write no more for this handle, and say Fenced."""

    handle: Handle


class Fenced(Message, frozen=True):
    """prefill -> decode: no write of this handle is in flight and none will start."""

    handle: Handle
    reason: str


class Ready(Message, frozen=True):
    """prefill -> decode: these pages are yours to read until the lease is over; here is the first token."""

    handle: Handle
    position: int
    token: Token
    pages: tuple[int, ...]  # prefill's, for tokens [held_tokens, num_tokens) of the ticket
    lease_s: float  # kept so long from each Renew on


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


# ---- leader <-> rank --------------------------------------------------------------------------------------------


class SlotInit(Value, frozen=True):
    """A request takes a slot of the ranks' state. The rank keeps tokens, page table and sampling until `retire`."""

    slot: int
    tokens: tuple[int, ...]  # known ones; sampled ones are appended on the device
    num_prompt: int
    sampling: Sampling
    pages: tuple[int, ...]  # already filled (cached prefix, or landed) or about to be


class Chunk(Value, frozen=True):
    """One request's part of a step: compute positions [start, stop) of its slot.

    Inputs are the slot's tokens at those positions. With `sample`, the token for position `stop` is sampled,
    appended to the slot, and reported.
    """

    slot: int
    start: int
    stop: int
    pages: tuple[int, ...] = ()  # newly given, appended to the slot's page table before the step
    sample: bool = True


class WriteJob(Value, frozen=True):
    """Move tokens [start, stop) of a request to (or from) a peer. `start` is a multiple of both page sizes."""

    job: int
    peer: str  # worker name; Attach told the ranks of it
    start: int
    stop: int
    src_pages: tuple[int, ...]  # covering [start, stop): ours, or the peer's if we read
    dst_pages: tuple[int, ...]  # likewise where the tokens go


class StepKind(enum.Enum):
    PREFILL = "prefill"
    DECODE = "decode"  # every chunk is one token and samples
    MIXED = "mixed"
    IDLE = "idle"  # no chunk: only writes and retirements


class StepPlan(Message, frozen=True):
    """leader -> each rank. Plans run in the order of `step`; a rank may hold several."""

    step: int
    kind: StepKind
    admits: tuple[SlotInit, ...] = ()
    chunks: tuple[Chunk, ...] = ()
    writes: tuple[WriteJob, ...] = ()
    retire: tuple[int, ...] = ()  # slots given up; carried out before `admits`


class StepDone(Message, frozen=True):
    """rank -> leader, one from each rank. Only rank 0 reports tokens, in the order of the sampling chunks."""

    step: int
    tokens: tuple[Token, ...]
    seconds: float


class Transfer(Message, frozen=True):
    """leader -> each rank: move now, with no step to wait for. `is_read`: from the peer's pages into ours."""

    jobs: tuple[WriteJob, ...]
    is_read: bool = False


class WriteDone(Message, frozen=True):
    """rank -> leader: this rank's share of a job ended. error None: every byte is visible where it was to go."""

    job: int
    error: str | None
    nbytes: int
    seconds: float
    may_land: bool = False  # it failed, and bytes of it may land until the peer ends or severs us


class Group(Message, frozen=True):
    """leader -> rank: every rank is ready; this is what each holds."""

    shards: tuple[Shard, ...]


class Attach(Message, frozen=True):
    """leader -> rank: a peer to write to. The rank pairs up shards, connects, and answers nothing unless it fails."""

    peer: str
    epoch: str
    layout: KVLayout
    shards: tuple[Shard, ...]
    endpoints: tuple[bytes, ...]


class Sever(Message, frozen=True):
    """leader -> rank: cut this peer's life off; answer Severed."""

    peer: str
    epoch: str


class Severed(Message, frozen=True):
    """rank -> leader: `clean`: nothing of that peer can write here any more; else its pages must be quarantined."""

    peer: str
    epoch: str
    clean: bool


class PeerUnreachable(Message, frozen=True):
    """rank -> leader: the transfer to this peer is broken."""

    peer: str
    epoch: str
    reason: str


class RankReady(Message, frozen=True):
    """rank -> leader: weights loaded, pool allocated."""

    rank: int
    shard: Shard
    layout: KVLayout
    endpoint: bytes
    transfer: str
    model: ModelCard
    note: str  # for the start-up line: dtype, threads, attention, transfer chosen and why
    operators: str = ""  # as Hello's


class RankLoading(Message, frozen=True):
    """rank -> leader: progress while weights load."""

    rank: int
    done_bytes: int
    total_bytes: int


class RankFailed(Message, frozen=True):
    """rank -> leader, once, before it exits: a fault a person can mend (a ConfigError), or a crash's last line."""

    rank: int
    error: str
    hint: str
    mendable: bool


class Ping(Message, frozen=True):
    """leader -> rank: say that you are there; the thread that talks answers, whatever the other computes."""


class Pong(Message, frozen=True):
    """rank -> leader."""


class Quit(Message, frozen=True):
    """leader -> rank: end now."""


ToRouter = Hello | Beat | Bye | DrainInstance | Reserved | Refused | FirstToken | Tokens | Failed | Cancelled
FromRouter = Welcome | Refusal | WhoAreYou | Peers | DrainReport | Reserve | Prefill | Deliver | Cancel
Handoff = Landed | Stop | Fenced | Ready | Renew | Renewed | Released
ToRank = StepPlan | Group | Attach | Sever | Transfer | Ping | Quit
FromRank = Pong | StepDone | WriteDone | Severed | PeerUnreachable | RankReady | RankLoading | RankFailed
AnyMessage = ToRouter | FromRouter | Handoff | ToRank | FromRank
