"""Traces of what real services were asked: when, how long, and (Mooncake) which prefixes were shared. Pure.

Neither holds text. A prompt is made up: in Mooncake's each hash id names 512 tokens, so equal ids become equal
tokens, and prefix caches see what the service's saw.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime

import msgspec

HASHED = 512
"""Tokens that one hash id of the Mooncake trace stands for."""

MakeIds = Callable[[int, int | None], tuple[int, ...]]
"""(number of tokens, hash id or None for ever new ones) -> token ids."""


@dataclass(frozen=True, slots=True)
class Row:
    at_s: float  # from the trace's first
    num_prompt: int
    num_answer: int
    hashes: tuple[int, ...] = ()

    def prompt(self, ids: MakeIds, limit: int) -> tuple[int, ...]:
        """At most `limit` tokens, from the front; 0 for all."""
        left = min(self.num_prompt, limit or self.num_prompt)
        made: list[int] = []
        for hashed in self.hashes:
            if len(made) >= left:
                break
            made += ids(HASHED, hashed)
        if len(made) < left:
            made += ids(left - len(made), None)
        return tuple(made[:left])


class _Mooncake(msgspec.Struct):
    timestamp: float  # ms
    input_length: int
    output_length: int
    hash_ids: tuple[int, ...] = ()


def read_mooncake(lines: Iterable[tuple[int, str]]) -> Iterator[Row]:
    """JSON lines of timestamp (ms), input_length, output_length, hash_ids. Raises ValueError naming the line."""
    first: float | None = None
    for number, line in lines:
        try:
            row = msgspec.json.decode(line, type=_Mooncake)
        except (msgspec.DecodeError, msgspec.ValidationError) as error:
            raise ValueError(f"line {number}: {error}") from None
        _check(number, row.input_length, row.output_length)
        first = row.timestamp if first is None else first
        yield Row(max(0.0, row.timestamp - first) / 1e3, row.input_length, max(1, row.output_length), row.hash_ids)


def read_azure(lines: Iterable[tuple[int, str]]) -> Iterator[Row]:
    """CSV of TIMESTAMP, ContextTokens, GeneratedTokens, as Azure published them in 2023 and 2024."""
    first: datetime | None = None
    for number, line in lines:
        cells = [cell.strip() for cell in line.split(",")]
        if number == 1 and cells[0].upper() == "TIMESTAMP":
            continue
        try:
            at, num_prompt, num_answer = cells
            when, prompt, answer = datetime.fromisoformat(at), int(num_prompt), int(num_answer)
            first = when if first is None else first
            at_s = (when - first).total_seconds()
        except (ValueError, TypeError) as error:  # TypeError: one time with a zone, one without
            wanted = "TIMESTAMP,ContextTokens,GeneratedTokens"
            raise ValueError(f"line {number}: {line.strip()!r} is not {wanted}: {error}") from None
        _check(number, prompt, answer)
        yield Row(max(0.0, at_s), prompt, max(1, answer))


def _check(number: int, num_prompt: int, num_answer: int) -> None:
    if num_prompt < 1 or num_answer < 0:
        raise ValueError(f"line {number}: {num_prompt} tokens in and {num_answer} out: a prompt has at least 1")
