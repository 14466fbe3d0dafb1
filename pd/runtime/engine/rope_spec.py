"""Reads how a model turns positions into rotations, from both spellings of config.json. Pure.

transformers 5 writes `rope_parameters` (theta in it); older ones `rope_scaling` beside `rope_theta`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

DEFAULT_THETA = 10000.0


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """A kind and its numbers; those of other kinds keep their defaults."""

    kind: str = "default"  # a key of KINDS
    theta: float = DEFAULT_THETA
    factor: float = 1.0
    original_max_positions: int = 0  # llama3, yarn: what the model was first trained on
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    attention_factor: float | None = None  # yarn, and what follows
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True

    def stretched(self, max_position_embeddings: int) -> int:
        """Positions the model reaches. A config.json of these kinds may give the length before stretching.

        dynamic: not stretched. Beyond the trained length transformers rotates by frequencies of the longest
        request seen so far, so an answer would depend on its neighbours; up to it they are the plain ones.
        """
        match self.kind:
            case "linear":
                return int(max_position_embeddings * self.factor)
            case "yarn":
                return max(max_position_embeddings, int(self.original_max_positions * self.factor))
            case _:
                return max_position_embeddings


KINDS: Mapping[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor",),
}
"""Each kind and the numbers it cannot do without."""


def mscale(factor: float, scale: float) -> float:
    """How much hotter attention gets where positions are stretched by `factor` (Peng et al. 2023, §3.4)."""
    return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0


_OPTIONAL = ("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim")


def read_rope(
    config: Mapping[str, object], max_positions: int, default_theta: float = DEFAULT_THETA
) -> tuple[RopeSpec, list[str]]:
    """The rotation, and faults in words; with faults the rotation is not to be used."""
    given = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if not isinstance(given, dict):
        return RopeSpec(), [f"rope parameters must be an object, not {given!r}"]
    if nested := [name for name, value in given.items() if isinstance(value, dict)]:
        return RopeSpec(), [f"rope parameters of their own for {', '.join(nested)} are not supported"]
    kind = str(given.get("rope_type", given.get("type", "default")))
    if kind not in KINDS:
        return RopeSpec(), [f"rope type {kind!r} is not supported; {', '.join(KINDS)} are"]
    faults = []
    if (partial := given.get("partial_rotary_factor", config.get("partial_rotary_factor"))) not in (None, 1):
        faults.append(f"partial_rotary_factor {partial} is not supported")
    theta = given.get("rope_theta", config.get("rope_theta"))
    values: dict[str, object] = {"rope_theta": default_theta if theta is None else theta}
    values |= {name: given.get(name) for name in KINDS[kind]}
    values |= {name: given[name] for name in _OPTIONAL if given.get(name) is not None and kind == "yarn"}
    original = config.get("original_max_position_embeddings", given.get("original_max_position_embeddings"))
    values["original_max_position_embeddings"] = max_positions if original is None else original
    numbers = {name: float(v) for name, v in values.items() if isinstance(v, int | float) and v > 0}
    faults += [
        f"rope {kind}: {name} must be a positive number, not {values[name]!r}" for name in values if name not in numbers
    ]
    if faults:
        return RopeSpec(), faults
    theta_value, original_value = numbers.pop("rope_theta"), numbers.pop("original_max_position_embeddings")
    truncate = bool(given.get("truncate", True))
    return RopeSpec(kind, theta_value, original_max_positions=int(original_value), truncate=truncate, **numbers), []
