"""Every message round-trips, and garbage raises only WireError."""

from __future__ import annotations

import builtins
import contextlib
import enum
import random
import types
from collections.abc import Callable
from typing import Any, get_args, get_origin, get_type_hints

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pd.runtime.wire import messages, plans, values
from pd.runtime.wire.codec import MAX_MESSAGE_BYTES, WireError, decode, encode
from pd.runtime.wire.messages import AnyMessage, Tokens
from pd.runtime.wire.plans import Chunk, StepKind, StepPlan
from pd.runtime.wire.values import Handle, Token
from pd.transfer.layout import DEFAULT_ORDER, KVLayout, Shard

KINDS = get_args(AnyMessage)


def anything(kind: Any, dice: random.Random) -> Any:
    """A random value of an annotated type."""
    match get_origin(kind), get_args(kind):
        case (_, ()) if kind in SCALARS:
            return SCALARS[kind](dice)
        case (_, ()) if issubclass(kind, enum.Enum):
            return dice.choice(list(kind))
        case (builtins.tuple, (item, builtins.Ellipsis)):
            return tuple(anything(item, dice) for _ in range(dice.randint(0, 3)))
        case (builtins.tuple, items):
            return tuple(anything(item, dice) for item in items)
        case (_, (some, types.NoneType)):
            return None if dice.random() < 0.3 else anything(some, dice)
        case _:
            hints = get_type_hints(kind)
            return kind(**{name: anything(hint, dice) for name, hint in hints.items() if name[0] != "_"})


def layout(dice: random.Random) -> KVLayout:
    order = tuple(dice.sample(DEFAULT_ORDER, len(DEFAULT_ORDER)))
    return KVLayout(dice.randint(1, 80), 2, 64, 16, dice.choice(["float32", "bfloat16"]), order=order)


def shard(dice: random.Random) -> Shard:
    start = dice.randint(0, 9)
    return Shard(start, start + dice.randint(1, 9), start, start + dice.randint(1, 9), dice.randint(1, 99))


SCALARS: dict[type, Callable[[random.Random], object]] = {
    int: lambda dice: dice.randint(-(2**63), 2**63 - 1),
    float: lambda dice: dice.uniform(-1e9, 1e9),
    bool: lambda dice: dice.random() < 0.5,
    str: lambda dice: "".join(map(chr, dice.sample(range(1, 0xD000), 5))),
    bytes: lambda dice: dice.randbytes(9),
    KVLayout: layout,
    Shard: shard,
}


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_a_message_of_every_kind_survives_the_wire(kind: type[AnyMessage]) -> None:
    for seed in range(50):
        message = anything(kind, random.Random(seed))
        assert decode(encode(message)) == message, f"seed {seed}"


def test_every_message_class_is_in_the_union() -> None:
    classes = {
        value
        for module in (messages, plans)
        for value in vars(module).values()
        if isinstance(value, type) and issubclass(value, values.Message) and value is not values.Message
    }
    assert classes == set(KINDS)


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=200))
def test_garbage_raises_only_wire_error(frame: bytes) -> None:
    with contextlib.suppress(WireError):
        decode(frame)


@pytest.mark.parametrize("seed", range(20))
def test_a_damaged_message_raises_only_wire_error_or_is_another_message(seed: int) -> None:
    dice = random.Random(seed)
    plan = StepPlan(3, StepKind.MIXED, chunks=(Chunk(1, 0, 17, (4, 5)), Chunk(2, 9, 10)))
    for _ in range(200):
        frame = bytearray(encode(plan))
        for _ in range(dice.randint(1, 4)):
            frame[dice.randrange(len(frame))] = dice.randrange(256)
        with contextlib.suppress(WireError):
            assert isinstance(decode(bytes(frame[: dice.randint(1, len(frame))])), KINDS), f"seed {seed}"


def test_deep_nesting_is_refused_not_a_crash() -> None:
    with pytest.raises(WireError):
        decode(b"\x91" * 100_000)


def test_an_oversized_frame_is_refused_unread() -> None:
    with pytest.raises(WireError, match=str(MAX_MESSAGE_BYTES)):
        decode(memoryview(bytearray(MAX_MESSAGE_BYTES + 1)))


def test_wrong_types_are_named() -> None:
    frame = msgspec.msgpack.encode(["Cancel", ["id", "not a number"], "why"])
    with pytest.raises(WireError, match="Expected `int`"):
        decode(frame)


def test_a_steady_decode_step_is_a_few_bytes_a_request() -> None:
    plan = StepPlan(7, StepKind.DECODE, chunks=tuple(Chunk(slot, 100, 101) for slot in range(256)))
    assert len(encode(plan)) < 8 * 256
    told = Tokens(tuple(messages.Progress(Handle(f"r{i}", 0), 100, (Token(17),)) for i in range(256)))
    assert len(encode(told)) < 32 * 256
