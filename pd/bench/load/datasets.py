"""Datasets: made up from a seed, or read from the public formats. Pure: a file's lines are handed in.

Rules
1. The same text and seed give the same conversations, wherever they run.
2. A line that cannot be read is named by its number: nothing is skipped in silence.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator
from typing import NamedTuple

import msgspec

from pd.bench.load.asks import Ask, Conversation, Message
from pd.bench.load.traces import read_azure, read_mooncake
from pd.bench.specs import Spec

VOCAB = "32000"
"""Ids below are in nearly every vocabulary."""
_MADE = {"input": "512", "output": "64", "spread": "0", "vocab": VOCAB}
_CUT = {"max-input": "0", "max-output": "0"}
KINDS: dict[str, dict[str, str]] = {
    "random": _MADE,
    "shared-prefix": {**_MADE, "prefixes": "8", "prefix": "512"},
    "multi-turn": {**_MADE, "turns": "4", "think": "1", "prefix": "0"},
    "sharegpt": _CUT,
    "mooncake": {**_CUT, "vocab": VOCAB},
    "azure": {**_CUT, "vocab": VOCAB},
    "jsonl": {"output": "64"},
}
"""Each with its settings and their defaults; 0 means no limit."""
MADE_UP = ("random", "shared-prefix", "multi-turn")
"""These make as many conversations as are wanted; the others have what their file has."""
TRACES = ("mooncake", "azure")

_LOWEST_ID = 100
"""Below are the special tokens of most vocabularies."""

Count = Callable[[str], int]
"""Tokens of a text."""


def about(text: str) -> int:
    """Where no tokenizer is given: four characters a token, as English has them."""
    return max(1, round(len(text) / 4))


class Settings:
    """A spec's settings as numbers. Raises ValueError naming the one that is none."""

    def __init__(self, spec: Spec) -> None:
        self._spec = spec

    def count(self, key: str, *, least: int = 1) -> int:
        text = self._spec.settings[key]
        if not text.lstrip("-").isdecimal() or int(text) < least:
            raise ValueError(f"{self._spec.kind}: {key}={text}, must be a whole number of at least {least}")
        return int(text)

    def number(self, key: str, *, most: float = float("inf")) -> float:
        text = self._spec.settings[key]
        try:
            value = float(text)
        except ValueError:
            raise ValueError(f"{self._spec.kind}: {key}={text} is no number") from None
        if not 0 <= value <= most:
            raise ValueError(f"{self._spec.kind}: {key}={text}, must be 0 to {most}")
        return value


def made_up(spec: Spec, seed: int) -> Iterator[Conversation]:
    """Conversations without end. Raises ValueError for settings that make no sense, at once."""
    settings, dice = Settings(spec), random.Random(f"{spec.kind} {seed}")
    maker = _Maker(settings, dice)
    match spec.kind:
        case "random":
            return maker.independent()
        case "shared-prefix":
            prefixes = [maker.ids(settings.count("prefix")) for _ in range(settings.count("prefixes"))]
            return maker.after(prefixes)
        case "multi-turn":
            return maker.conversations(
                settings.count("turns"), settings.number("think"), settings.count("prefix", least=0)
            )
        case _:
            raise ValueError(f"{spec.kind} is read from a file")


class _Maker:
    def __init__(self, settings: Settings, dice: random.Random) -> None:
        self._input, self._output = settings.count("input"), settings.count("output")
        self._spread = settings.number("spread", most=1.0)
        self._vocab = settings.count("vocab", least=_LOWEST_ID + 2)
        self._dice = dice

    def ids(self, num_tokens: int) -> tuple[int, ...]:
        span = self._vocab - _LOWEST_ID
        return tuple(_LOWEST_ID + int(self._dice.random() * span) for _ in range(num_tokens))

    def length(self, mean: int) -> int:
        """Uniform around `mean`, by at most the spread's part of it."""
        low, high = round(mean * (1 - self._spread)), round(mean * (1 + self._spread))
        return max(1, self._dice.randint(low, high))

    def ask(self, before: tuple[int, ...] = (), think_s: float = 0.0) -> Ask:
        return Ask(before + self.ids(self.length(self._input)), self.length(self._output), think_s)

    def independent(self) -> Iterator[Conversation]:
        while True:
            yield Conversation((self.ask(),))

    def after(self, prefixes: list[tuple[int, ...]]) -> Iterator[Conversation]:
        while True:
            yield Conversation((self.ask(self._dice.choice(prefixes)),))

    def conversations(self, num_turns: int, think_s: float, prefix: int) -> Iterator[Conversation]:
        before = self.ids(prefix)
        while True:
            asks = [self.ask(before if turn == 0 else (), think_s if turn else 0.0) for turn in range(num_turns)]
            yield Conversation(tuple(asks))


def from_file(spec: Spec, text: str, *, count: Count, seed: int) -> list[Conversation]:
    """All conversations of a file. Raises ValueError naming the line."""
    settings = Settings(spec)
    if spec.kind == "jsonl":
        return [_own(line, settings.count("output")) for line in numbered(text)]
    cut = Cut(settings.count("max-input", least=0), settings.count("max-output", least=0))
    if spec.kind == "sharegpt":
        return list(_sharegpt(text, cut, count))
    vocab = settings.count("vocab", least=_LOWEST_ID + 2)
    dice = random.Random(f"{spec.kind} {seed}")

    def ids(num_tokens: int, of: int | None) -> tuple[int, ...]:
        source = dice if of is None else random.Random(f"{seed} {of}")
        return tuple(_LOWEST_ID + int(source.random() * (vocab - _LOWEST_ID)) for _ in range(num_tokens))

    rows = read_mooncake(numbered(text)) if spec.kind == "mooncake" else read_azure(numbered(text))
    return [
        Conversation((Ask(row.prompt(ids, cut.max_input), cut.answer(row.num_answer)),), at_s=row.at_s) for row in rows
    ]


class Cut(NamedTuple):
    max_input: int  # 0: no limit
    max_output: int

    def answer(self, num_tokens: int) -> int:
        return min(num_tokens, self.max_output or num_tokens)


def numbered(text: str) -> Iterator[tuple[int, str]]:
    """Lines that hold anything, counted from 1 as an editor does."""
    return ((number, line) for number, line in enumerate(text.splitlines(), 1) if line.strip())


class _Own(msgspec.Struct):
    """A line of one's own dataset. Either a prompt (text or token ids) or messages."""

    prompt: str | list[int] | None = None
    messages: list[Message] | None = None
    max_tokens: int | None = None
    output_tokens: int | None = None  # vLLM's name for it
    at_s: float | None = None


def _own(numbered_line: tuple[int, str], num_answer: int) -> Conversation:
    number, line = numbered_line
    try:
        own = msgspec.json.decode(line, type=_Own)
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        raise ValueError(f"line {number}: {error}") from None
    for name in ("prompt", "messages"):
        if getattr(own, name) in ("", []):
            raise ValueError(f"line {number}: {name} is empty")
    if (own.prompt is None) == (own.messages is None):
        raise ValueError(f"line {number}: needs a prompt or messages, and not both")
    wanted = own.max_tokens or own.output_tokens or num_answer
    if wanted < 1:
        raise ValueError(f"line {number}: max_tokens is {wanted}, must be at least 1")
    if own.messages and any(not {"role", "content"} <= message.keys() for message in own.messages):
        raise ValueError(f"line {number}: a message needs role and content")
    prompt = own.prompt if isinstance(own.prompt, str) else tuple(own.prompt or own.messages or ())
    return Conversation((Ask(prompt, wanted),), at_s=own.at_s)  # type: ignore[arg-type]


class _Said(msgspec.Struct):
    value: str
    speaker: str = msgspec.field(name="from", default="")


class _Shared(msgspec.Struct):
    conversations: list[_Said]


def _sharegpt(text: str, cut: Cut, count: Count) -> Iterator[Conversation]:
    """The first question of each conversation, and an answer as long as the one it got.

    As everywhere with this dataset, conversations of fewer than two turns are left out, and very short ones.
    """
    for shared in _shared(text):
        if len(shared.conversations) < 2:
            continue
        asked, answered = shared.conversations[0].value, shared.conversations[1].value
        if not asked or not answered:
            continue
        num_prompt, num_answer = count(asked), cut.answer(count(answered))
        if num_prompt < 4 or num_answer < 4 or (cut.max_input and num_prompt > cut.max_input):
            continue
        yield Conversation((Ask(asked, num_answer),))


def _shared(text: str) -> Iterator[_Shared]:
    """The format is one JSON list; some files have an object a line."""
    if not text.lstrip().startswith("["):
        for number, line in numbered(text):
            try:
                yield msgspec.json.decode(line, type=_Shared)
            except (msgspec.DecodeError, msgspec.ValidationError) as error:
                raise ValueError(f"line {number}: {error}") from None
        return
    try:
        items = msgspec.json.decode(text, type=list[msgspec.Raw])
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        where = re.search(r"\(byte (\d+)\)", str(error))
        number = text.encode()[: int(where[1])].count(b"\n") + 1 if where else text.count("\n") + 1
        raise ValueError(f"line {number}: no JSON list: {error}") from None
    for place, item in enumerate(items, 1):
        try:
            yield msgspec.json.decode(item, type=_Shared)
        except msgspec.ValidationError as error:
            number = text[: text.find(bytes(item).decode())].count("\n") + 1
            raise ValueError(f"entry {place}, line {number}: {error}") from None
