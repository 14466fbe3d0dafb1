"""The parts that messages are made of. Pure: types and nothing else."""

from __future__ import annotations

import enum

import msgspec

WIRE_VERSION = 5


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
    VERIFY = "verify"
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
    verifies: bool = False  # say the digest of what is sent with it


class ModelCard(Value, frozen=True):
    """What two instances must agree on."""

    name: str  # as clients say it
    fingerprint: str  # hash of config, of the weights' names and shapes, and of a sample of each
    vocab_size: int
    max_model_len: int  # tokens of prompt + answer this instance takes: the model's limit, or its pool's
    dtype: str = ""  # that it computes in; its KV's is the layout's


class Load(Value, frozen=True):
    num_running: int
    num_waiting: int
    num_free_pages: int
    num_pages: int
    waiting_tokens: int  # prompt tokens queued and not yet computed
