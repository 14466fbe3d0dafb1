"""Messages between a leader and its ranks: what to compute, what to move, and what came of it. Pure: types only."""

from __future__ import annotations

import enum

from pd.runtime.wire.values import Message, ModelCard, Sampling, Token, Value
from pd.transfer.layout import KVLayout, Shard


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
    is_digested: bool = False  # with a digest of what is sent, in WriteDone


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


class Digest(Message, frozen=True):
    """leader -> each rank: move nothing, and tell the digest of the job's tokens in WriteDone.

    `is_own`: of all that the rank holds of them; else of what it would send to the job's peer, as often as it would.
    """

    job: WriteJob
    is_own: bool


class WriteDone(Message, frozen=True):
    """rank -> leader: this rank's share of a job ended. error None: every byte is visible where it was to go."""

    job: int
    error: str | None
    nbytes: int
    seconds: float
    may_land: bool = False  # it failed, and bytes of it may land until the peer ends or severs us
    digest: int | None = None  # of this rank's share, where the job asked for it


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
    is_final: bool = False  # between these two lives: trying again is no use


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


ToRank = StepPlan | Group | Attach | Sever | Transfer | Digest | Ping | Quit
FromRank = Pong | StepDone | WriteDone | Severed | PeerUnreachable | RankReady | RankLoading | RankFailed
