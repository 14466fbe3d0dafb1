"""Reads what people write in options: lists of numbers, `KIND[:PATH][,KEY=VALUE…]`. Pure; raises ValueError."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Spec:
    """`mooncake:trace.jsonl,scale=2` taken apart."""

    kind: str
    path: str | None
    settings: dict[str, str]


def counts(name: str, text: str) -> tuple[int, ...]:
    """`1,4,16` -> (1, 4, 16): whole numbers of at least 1, in the order given."""
    values = []
    for piece in text.split(","):
        try:
            value = int(piece)
        except ValueError:
            raise ValueError(f"{name} is {text!r}: {piece.strip()!r} is no whole number") from None
        if value < 1:
            raise ValueError(f"{name} is {text!r}: {value} is not at least 1")
        values.append(value)
    return tuple(values)


def rates(name: str, text: str) -> tuple[float, ...]:
    """`0.5,1,2` -> (0.5, 1.0, 2.0): numbers above 0, in the order given."""
    return tuple(positive(name, piece) for piece in text.split(","))


def positive(name: str, text: str) -> float:
    """A finite number above 0."""
    try:
        value = float(text)
    except ValueError:
        raise ValueError(f"{name}: {text.strip()!r} is no number") from None
    if not 0 < value < float("inf"):
        raise ValueError(f"{name} is {text.strip()}, must be above 0")
    return value


def spec(name: str, text: str, kinds: dict[str, dict[str, str]]) -> Spec:
    """Take `text` apart. `kinds` says each kind's settings and their defaults; what is not given gets those."""
    head, *pieces = text.split(",")
    kind, colon, path = head.partition(":")
    if kind not in kinds:
        raise ValueError(f"{name} is {text!r}: {kind!r} must be one of {', '.join(kinds)}")
    settings = dict(kinds[kind])
    for piece in pieces:
        key, equals, value = (part.strip() for part in piece.partition("="))
        if not equals:
            raise ValueError(f"{name} is {text!r}: {piece.strip()!r} is not KEY=VALUE")
        if key not in settings:
            known = ", ".join(settings) or "none"
            raise ValueError(f"{name} is {text!r}: unknown key {key!r}; {kind} knows {known}")
        settings[key] = value
    return Spec(kind, path if colon else None, settings)


def cores(name: str, text: str, allowed: Sequence[int]) -> list[int]:
    """`0-3,6` -> those cores, each of which must be `allowed`."""
    found: list[int] = []
    for piece in text.split(","):
        first, dash, last = piece.strip().partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()):
            raise ValueError(f"{name} is {text!r}, must be numbers and ranges, such as 0-3,6")
        found += range(int(first), int(last or first) + 1)
    if missing := sorted(set(found) - set(allowed)):
        raise ValueError(f"{name} names {missing}; this process may use {list(allowed)}")
    return sorted(set(found))


def ranks(layouts: Sequence[str]) -> int:
    """Of instances as `pd serve` takes them: `tp=2,cores=0-1` is two."""
    found = (re.search(r"(?:^|,)\s*tp\s*=\s*(\d+)", layout) for layout in layouts)
    return sum(int(match[1]) if match else 1 for match in found)
