"""What the router's shell sets of the front. Pure."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontSettings:
    max_body_bytes: int = 8 << 20
    body_s: float = 60.0
    """For a whole body to arrive."""
    request_s: float = 600.0
    """A whole answer; the router's deadline."""
    api_keys: tuple[str, ...] = ()
    """A client must show one of them; none: everyone is served."""
    tokenize_at_once: int = 2
    """Long prompts turned into tokens at the same time, beside the loop."""
    tokenize_waiting: int = 256
    """Requests that may wait for that; more get 429."""
