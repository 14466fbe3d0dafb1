"""What a brain still keeps when all is over: every container below it but those that remember on purpose."""

from __future__ import annotations

import enum
import functools
from collections import deque
from collections.abc import Iterator
from typing import Any

CONTAINERS = (dict, list, set, deque)
REMEMBERED = {
    "Attempts._latest": "late messages of old attempts are known by it; bounded",
    "Links._links": "the peers that live",
    "Links._severed": "lives that may not be attached again; bounded",
    "Lives._listed": "the peers that live",
    "Lives._vanished": "for as long as they may return",
    "Membership._members": "the instances that live",
    "Membership._ended": "late messages of ended lives are known by it; bounded",
    "Membership._asked_at": "strangers asked of late",
    "Member.parted": "lives that it can meet no more; forgotten with them",
    "Member.misfits": "lives that it never could meet; forgotten with them",
    "PagePool._counts": "one a page",
    "PagePool._free": "all of them",
    "Flight._free_slots": "all of them",
    "PrefixCache._by_key": "the cache",
    "PrefixCache._by_page": "the cache",
    "PrefixCache._idle": "the cache",
    "PrefixMemory._pages": "bounded by the instance's pages",
    "Timetable._heap": "entries of the forgotten; bounded",
    "Wants._failed": "until the router's next list",
    "Wants._absent": "until the router's next list; bounded by what is on it",
    "Doubts._doubts": "until a later write of the same peer is done, or its life ends",
}


def leftovers(brain: object) -> dict[str, int]:
    """Names and sizes of containers that should be empty."""
    return {name: len(held) for name, held in containers(brain, set()) if held and name not in REMEMBERED}


def containers(thing: object, seen: set[int]) -> Iterator[tuple[str, Any]]:
    """Every container below our own objects, with the class and attribute that has it."""
    if id(thing) in seen or not type(thing).__module__.startswith("pd.runtime.core") or isinstance(thing, enum.Enum):
        return
    seen.add(id(thing))
    for name in vars(thing) if hasattr(thing, "__dict__") else slots(type(thing)):
        value = getattr(thing, name, None)
        if isinstance(value, CONTAINERS):
            yield f"{type(thing).__name__}.{name}", value
            for part in value.values() if isinstance(value, dict) else value:
                yield from containers(part, seen)
        else:
            yield from containers(value, seen)


@functools.cache
def slots(cls: type) -> tuple[str, ...]:
    return tuple(name for base in cls.__mro__ for name in getattr(base, "__slots__", ()))
