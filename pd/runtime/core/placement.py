"""Which instances serve a request: the pair with least to do, a cached beginning counted as done. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Set
from typing import NamedTuple

from pd.runtime.core.affinity import page_hashes
from pd.runtime.core.member import Member, Standing
from pd.runtime.wire.values import Role


class Wish(NamedTuple):
    """What a request needs of its instances."""

    tokens: Sequence[int]
    decodes: bool  # False: one token is all, and prefill samples it
    unfit: Set[str]  # names of instances that it can never fit
    avoid: str | None  # the instance that failed it last: taken only if there is no other


class Pair(NamedTuple):
    prefill: Member  # or colocated
    decode: Member | None  # None: the first one serves alone


def choose(members: Iterable[Member], wish: Wish, now: float) -> Pair | None:
    """The pair for a request, or None while none that it fits takes work."""
    open_to = [member for member in members if member.takes_work(now) and member.name not in wish.unfit]
    decodes = [member for member in open_to if member.role is Role.DECODE]

    def can_be_first(member: Member) -> bool:
        if member.role is Role.PREFILL:
            return not wish.decodes or any(map(member.can_meet, decodes))
        return member.role is Role.COLOCATED

    firsts = list(filter(can_be_first, open_to))
    if not firsts:
        return None
    first = _least_work(firsts, wish)
    if first.role is Role.COLOCATED or not wish.decodes:
        return Pair(first, None)
    met = filter(first.can_meet, decodes)
    return Pair(first, min(met, key=lambda member: (member.name == wish.avoid, _fullness(member), member.name)))


def fits_nowhere(members: Iterable[Member], wish: Wish) -> bool:
    """Whether some role's living instances have all said that the request can never fit them."""
    fit: dict[Role, bool] = {}
    for member in members:
        if member.standing is Standing.ALIVE:
            fit[member.role] = fit.get(member.role, False) or member.name not in wish.unfit
    if fit.get(Role.COLOCATED, False):
        return False
    if wish.decodes and not fit.get(Role.DECODE, True):
        return True
    return not fit.get(Role.PREFILL, Role.COLOCATED not in fit)


def _least_work(firsts: list[Member], wish: Wish) -> Member:
    """The one that would have computed the request first. With a lone candidate nothing is hashed."""
    if len(firsts) == 1:
        return firsts[0]
    sizes = {member.hello.layout.page_size for member in firsts}
    hashes = {size: page_hashes(wish.tokens, size) for size in sizes}

    def work(member: Member) -> tuple[bool, int, int, str]:
        size = member.hello.layout.page_size
        cached = member.prefixes.num_matching(hashes[size]) * size
        ahead = member.pending_tokens + member.foreign_tokens
        return member.name == wish.avoid, ahead + len(wish.tokens) - cached, member.num_assigned, member.name

    first = min(firsts, key=work)
    first.prefixes.remember(hashes[first.hello.layout.page_size])
    return first


def _fullness(member: Member) -> float:
    """The larger of the shares of slots and of pages that are taken; 1.0 is full."""
    slots = (member.num_assigned + member.foreign_running) / max(1, member.hello.max_running)
    pages = member.held_tokens / max(1, member.num_pages * member.hello.layout.page_size)
    return max(slots, pages)
