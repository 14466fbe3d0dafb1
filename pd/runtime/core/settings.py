"""What an instance's brain is told at birth. Pure: values and their reasons."""

from __future__ import annotations

from dataclasses import dataclass, field

from pd.runtime.config import StepConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Deadlines:
    """Seconds of this host's clock. A request's own deadlines come with its messages."""

    hello_s: float = 1.0
    """Between two Hellos while the router has not answered: it may start after us."""
    unreachable_s: float = 10.0
    """Between two stamps that the router does not answer: seen in a log, and not filling it."""
    beat_s: float = 0.5
    """Between two Beats: load is at most this old where requests are placed."""
    sweep_s: float = 0.1
    """Between two looks at all deadlines: none is shorter than 10 of these, and 4,000 waiting requests take 1 ms."""
    draining_s: float = 10.0
    """Without any write job ending, after the last chunk: a job is at most one step's tokens, well below 1 s."""
    stopping_s: float = 10.0
    """Without any write job ending, once the handoff is given up: then the peer is cut off, so that they fail."""
    fencing_s: float = 30.0
    """For a Fenced: two steps of prefill may have to end first, and then their writes (`stopping_s`)."""
    heard_s: float = 10.0
    """For Heard, after Landed or Fenced: as long as one that is silent counts as living."""
    holding_s: float = 6.0
    """For the ticket, once the prompt is computed: decode is asked at once, and has 2 s. Then a message was lost."""
    lease_s: float = 6.0
    """From one Renew to the last moment at which offered pages may be read: a dozen Renews."""
    checking_s: float = 10.0
    """For our ranks to make the digest of what landed: at 0.2 GB/s, 2 GB a rank."""
    remind_s: float = 0.5
    """Between two Stops, two Renews, two Landeds: a lost one costs no more."""
    sever_again_s: float = 2.0
    """Between two Severs of a peer that could not be severed: its process may have ended since."""
    vanished_s: float = 3.0
    """For a peer to return to the router's list: a restarted router hears of all its instances within two Hellos."""
    attach_s: float = 1.0
    """From a broken transfer to the next try: one transient error must not part two instances for good."""
    step_s: float = 600.0
    """For one step: longer than any chunk of a large model on few cores. A rank that hangs ends the instance."""
    retry_after_s: float = 1.0
    """What a refused request is told: about the time in which a running one ends and frees its pages."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BrainSettings:
    page_size: int  # tokens
    num_pages: int  # of each rank; all ranks number them alike
    num_ranks: int
    step: StepConfig
    max_model_len: int  # tokens of prompt + answer
    prefix_cache: bool = True
    stream_layers: int | None = None  # as the ranks were told, to say so where it is of no use
    deadlines: Deadlines = field(default_factory=Deadlines)
