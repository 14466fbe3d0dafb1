"""When conversations arrive: times in seconds from a run's start, from a rate and a seed. Pure."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator, Sequence

from pd.bench.specs import Spec

KINDS: dict[str, dict[str, str]] = {
    "poisson": {},
    "gamma": {"shape": "0.25"},  # burstier than poisson, which is shape 1
    "constant": {},
    "ramp": {"to": "", "over": "60"},
    "trace": {"scale": "1"},
}


def times(spec: Spec, rate: float | None, *, seed: int, own: Sequence[float | None] = ()) -> Iterator[float]:
    """Without end, but for a trace: then `own` are the times it has. `rate` is a second's mean, or a ramp's first.

    Raises ValueError at once for what makes no sense.
    """
    if spec.kind == "trace":
        return _trace(own, _number(spec, "scale"))
    if rate is None:
        raise ValueError(f"--arrival {spec.kind} needs a --rate")
    dice = random.Random(f"{spec.kind} {seed}")
    match spec.kind:
        case "constant":
            return (index / rate for index in itertools.count())
        case "gamma":
            shape = _number(spec, "shape")
            return itertools.accumulate(dice.gammavariate(shape, 1 / (rate * shape)) for _ in itertools.count())
        case "ramp":
            if not spec.settings["to"]:
                raise ValueError("--arrival ramp needs to=RATE, as in ramp,to=8,over=60")
            return _ramp(rate, _number(spec, "to"), _number(spec, "over"), dice)
        case _:
            return itertools.accumulate(dice.expovariate(rate) for _ in itertools.count())


def _trace(own: Sequence[float | None], scale: float) -> Iterator[float]:
    if not own or any(at_s is None for at_s in own):
        raise ValueError("--arrival trace needs a dataset with times: mooncake, azure, or jsonl lines with at_s")
    return iter(sorted(at_s / scale for at_s in own if at_s is not None))


def _ramp(start: float, stop: float, over_s: float, dice: random.Random) -> Iterator[float]:
    """Poisson of a rate that goes from `start` to `stop` within `over_s` and stays there.

    The n-th arrival is where the expected number, start·t + (stop-start)·t²/(2·over), reaches the sum of n unit
    exponentials.
    """
    slope, at_end = (stop - start) / over_s, (start + stop) / 2 * over_s
    for wanted in itertools.accumulate(dice.expovariate(1.0) for _ in itertools.count()):
        if wanted >= at_end:
            yield over_s + (wanted - at_end) / stop
        elif abs(slope) < 1e-12:
            yield wanted / start
        else:
            yield (math.sqrt(start * start + 2 * slope * wanted) - start) / slope


def _number(spec: Spec, key: str) -> float:
    text = spec.settings[key]
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise ValueError(f"--arrival {spec.kind}: {key}={text}, must be a number above 0")
    return value
