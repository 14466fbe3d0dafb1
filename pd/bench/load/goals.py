"""Service level objectives: `ttft:500,tpot:50` in milliseconds, and whether a request met them. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from pd.bench.load.outcome import Outcome

NAMES = ("ttft", "tpot", "itl", "e2e")


@dataclass(frozen=True, slots=True)
class Goals:
    """Each in seconds; None: not asked for. `itl_s` bounds a request's longest gap."""

    ttft_s: float | None = None
    tpot_s: float | None = None
    itl_s: float | None = None
    e2e_s: float | None = None

    def are_met(self, outcome: Outcome) -> bool:
        """A failed request meets none. One of a single token has no time a token, and meets that goal."""
        if outcome.error is not None or outcome.ttft_s is None or outcome.e2e_s is None:
            return False
        return (
            _within(outcome.ttft_s, self.ttft_s)
            and _within(outcome.tpot_s or 0.0, self.tpot_s)
            and _within(max(outcome.gaps_s, default=0.0), self.itl_s)
            and _within(outcome.e2e_s, self.e2e_s)
        )

    def __bool__(self) -> bool:
        return any(goal is not None for goal in (self.ttft_s, self.tpot_s, self.itl_s, self.e2e_s))

    def __str__(self) -> str:
        limits = zip(NAMES, (self.ttft_s, self.tpot_s, self.itl_s, self.e2e_s), strict=True)
        return ",".join(f"{name}:{limit * 1e3:g}" for name, limit in limits if limit is not None)


def parse(text: str) -> Goals:
    """`ttft:500,tpot:50` -> Goals; milliseconds, or with a unit `ttft:0.5s`. Raises ValueError."""
    found: dict[str, float] = {}
    for piece in text.split(","):
        name, colon, value = (part.strip() for part in piece.partition(":"))
        if not colon or name not in NAMES:
            raise ValueError(f"--slo is {text!r}: {piece.strip()!r} is not NAME:MS with a name of {', '.join(NAMES)}")
        if name in found:
            raise ValueError(f"--slo is {text!r}: {name} is said twice")
        found[name] = _seconds(text, value)
    return Goals(**{f"{name}_s": value for name, value in found.items()})


def _seconds(text: str, value: str) -> float:
    number, unit = (value[:-2], 1e-3) if value.endswith("ms") else (value.removesuffix("s"), 1.0)
    if not value.endswith("s"):
        unit = 1e-3
    try:
        seconds = float(number) * unit
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise ValueError(f"--slo is {text!r}: {value!r} must be milliseconds above 0, or 0.5s")
    return seconds


def _within(value: float, limit: float | None) -> bool:
    return limit is None or value <= limit
