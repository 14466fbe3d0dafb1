"""The clients of a chaos run: the same prompts again and again, each answer compared with that of quiet times."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections import Counter
from dataclasses import dataclass, field

import aiohttp

_PAUSE_S = 0.5
"""After a failure, so that a cluster that refuses is not asked a thousand times a second."""


@dataclass(frozen=True, slots=True)
class Ask:
    """One prompt and how to sample; every second one is not greedy."""

    prompt: tuple[int, ...]
    temperature: float
    seed: int

    def body(self, model: str, num_tokens: int) -> dict[str, object]:
        return {
            "model": model,
            "prompt": list(self.prompt),
            "max_tokens": num_tokens,
            "temperature": self.temperature,
            "seed": self.seed,
            "ignore_eos": True,
            "return_token_ids": True,
            "stream": True,
        }


@dataclass(frozen=True, slots=True)
class Heard:
    """How an answer went. `fault` None: it came to its end."""

    tokens: tuple[int, ...]
    longest_gap_s: float
    fault: str | None
    is_hung: bool = False


@dataclass(slots=True)
class Tally:
    num_done: int = 0
    num_wrong: int = 0
    num_hung: int = 0
    num_failed: int = 0
    num_cut_off: int = 0
    """Streamed through a router that was killed, or asked while there was none."""
    longest_gap_s: float = 0.0
    gaps_s: list[float] = field(default_factory=list)
    """The longest of each answer."""
    faults: Counter[str] = field(default_factory=Counter)


def asks(vocab_size: int, *, count: int, seed: int) -> list[Ask]:
    dice = random.Random(seed)
    made = []
    for number in range(count):
        prompt = tuple(dice.randrange(vocab_size) for _ in range(dice.randint(3, 60)))
        made.append(Ask(prompt, 0.0 if number % 2 else 0.9, number))
    return made


async def hear(session: aiohttp.ClientSession, url: str, body: dict[str, object], *, patience_s: float) -> Heard:
    """Ask once and read to the end. Nothing is raised but cancellation."""
    tokens: list[int] = []
    last, longest = time.monotonic(), 0.0
    try:
        async with asyncio.timeout(patience_s), session.post(f"{url}/v1/completions", json=body) as answer:
            if answer.status != 200:
                return Heard((), 0.0, f"{answer.status} {(await answer.text())[:300]}")
            async for line in answer.content:
                if line.startswith(b"data: [DONE]"):
                    return Heard(tuple(tokens), longest, None)
                if not line.startswith(b"data: {"):
                    continue
                now = time.monotonic()
                longest, last = max(longest, now - last), now
                event = json.loads(line[6:])
                if "error" in event:
                    return Heard(tuple(tokens), longest, str(event["error"]["message"]))
                for choice in event["choices"]:
                    tokens += choice.get("token_ids", ())
    except TimeoutError:
        return Heard(tuple(tokens), longest, f"no end within {patience_s:g} s", is_hung=True)
    except (aiohttp.ClientError, OSError) as error:
        return Heard(tuple(tokens), longest, f"{type(error).__name__}: {error}")
    return Heard(tuple(tokens), longest, "the stream ended without [DONE]")


@dataclass(slots=True)
class Load:
    """Keeps `concurrency` requests open until told to stop; those open then are waited for."""

    url: str
    bodies: list[dict[str, object]]
    references: list[tuple[int, ...]]
    patience_s: float
    tally: Tally = field(default_factory=Tally)
    is_ending: bool = False
    num_routers_lost: int = 0
    is_router_away: bool = False

    async def run(self, session: aiohttp.ClientSession, concurrency: int, *, seed: int) -> None:
        await asyncio.gather(*(self._client(session, random.Random(seed + number)) for number in range(concurrency)))

    async def _client(self, session: aiohttp.ClientSession, dice: random.Random) -> None:
        while not self.is_ending:
            which = dice.randrange(len(self.bodies))
            num_lost = self.num_routers_lost
            heard = await hear(session, self.url, self.bodies[which], patience_s=self.patience_s)
            is_excused = self.is_router_away or self.num_routers_lost > num_lost
            self._note(heard, self.references[which], is_excused=is_excused)
            if heard.fault is not None:
                await asyncio.sleep(_PAUSE_S)

    def _note(self, heard: Heard, expected: tuple[int, ...], *, is_excused: bool) -> None:
        tally = self.tally
        tally.gaps_s.append(heard.longest_gap_s)
        tally.longest_gap_s = max(tally.longest_gap_s, heard.longest_gap_s)
        if heard.tokens != expected[: len(heard.tokens)] or (heard.fault is None and heard.tokens != expected):
            tally.num_wrong += 1
            tally.faults["wrong tokens"] += 1
        if heard.fault is None:
            tally.num_done += 1
        elif is_excused and not heard.is_hung:
            tally.num_cut_off += 1
        else:
            tally.num_hung += heard.is_hung
            tally.num_failed += not heard.is_hung
            tally.faults[heard.fault] += 1
