"""The fake model: its KV is a hash chain, its token a hash of all the KV that a rank reads, the seed and the position.

A page that landed in the wrong place, late, twice or not at all changes the tokens from there on.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from pd.runtime.wire.values import Finish, Sampling, Token

VOCAB_SIZE = 97


def kv_value(position: int, token: int, before: int, head: int) -> int:
    """KV of one head at a position: `before` is what stands in the pool for the position before."""
    return hash((position, token, before, head))


def sample(heads: Sequence[Sequence[int]], seed: int) -> int:
    """The token that follows the KV read, one sequence a head, from position 0 on: they say which position it is."""
    return hash((seed, *map(tuple, heads))) % VOCAB_SIZE


def token_at(position: int, token: int, logprobs: int | None) -> Token:
    """As a rank reports it, and a client must get it."""
    return Token(token) if logprobs is None else Token(token, -1.0 / (position + 1), ((token, -0.5),) * logprobs)


class Answer(NamedTuple):
    tokens: tuple[int, ...]
    finish: Finish


def expected(prompt: Sequence[int], sampling: Sampling, *, num_heads: int, max_model_len: int) -> Answer:
    """What a lone machine that never fails would answer."""
    limit = min(len(prompt) + sampling.max_tokens, max_model_len)
    tokens = list(prompt)
    heads: list[list[int]] = [[] for _ in range(num_heads)]
    while True:
        for position in range(len(heads[0]), len(tokens)):
            for head, values in enumerate(heads):
                before = values[-1] if values else 0
                values.append(kv_value(position, tokens[position], before, head))
        tokens.append(sample(heads, sampling.seed))
        if tokens[-1] in sampling.stop_token_ids:
            return Answer(tuple(tokens[len(prompt) :]), Finish.STOP)
        if len(tokens) >= limit:
            return Answer(tuple(tokens[len(prompt) :]), Finish.LENGTH)
