"""One life of an instance as the router knows it: its standing, its load, and who can meet whom. Pure."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Iterator

from pd.runtime.core.affinity import PrefixMemory
from pd.runtime.core.events import Effect, Peer, Stamp
from pd.runtime.wire.messages import Hello
from pd.runtime.wire.values import WIRE_VERSION, Load, Role

OTHER = {Role.PREFILL: Role.DECODE, Role.DECODE: Role.PREFILL}


class Standing(enum.Enum):
    ALIVE = "alive"
    SUSPECT = "suspect"
    DRAINING = "draining"
    GONE = "gone"


class Sign(enum.Enum):
    HEARD = enum.auto()
    SILENT = enum.auto()  # for beat_timeout_s
    HUNG_UP = enum.auto()  # its connection is closed: it has ended, or it connects again
    DEAD = enum.auto()  # silent for dead_after_s
    BYE = enum.auto()
    REPLACED = enum.auto()


S, G = Standing, Sign
STANDINGS: dict[tuple[Standing, Sign], Standing] = {
    (S.SUSPECT, G.HEARD): S.ALIVE,
    (S.ALIVE, G.SILENT): S.SUSPECT,
    (S.ALIVE, G.HUNG_UP): S.SUSPECT,
    (S.DRAINING, G.SILENT): S.GONE,  # it said it would go
    (S.ALIVE, G.DEAD): S.GONE,
    (S.SUSPECT, G.DEAD): S.GONE,
    (S.DRAINING, G.DEAD): S.GONE,
    (S.ALIVE, G.BYE): S.DRAINING,
    (S.SUSPECT, G.BYE): S.DRAINING,
    (S.ALIVE, G.REPLACED): S.GONE,
    (S.SUSPECT, G.REPLACED): S.GONE,
    (S.DRAINING, G.REPLACED): S.GONE,
}
"""A sign that stands in no row changes nothing."""


class Member:
    """One life of an instance, and what the router has given it to do."""

    __slots__ = (
        "backoff_until",
        "foreign_running",
        "foreign_tokens",
        "heard_at",
        "held_tokens",
        "hello",
        "load",
        "misfits",
        "num_assigned",
        "parted",
        "peer",
        "pending_tokens",
        "prefixes",
        "standing",
        "told_at",
    )

    def __init__(self, hello: Hello, now: float) -> None:
        self.hello = hello
        self.peer = Peer(hello.worker, hello.epoch)
        self.standing = Standing.ALIVE
        self.load: Load | None = None
        self.heard_at = now
        self.told_at = now
        self.num_assigned = 0  # requests whose streams have not ended
        self.pending_tokens = 0  # sent, and not yet computed
        self.held_tokens = 0  # of all assigned requests
        self.foreign_running = 0  # it reports more than we gave it: left over from another life of the router
        self.foreign_tokens = 0
        self.backoff_until = 0.0
        self.parted: set[Peer] = set()  # lives of the other role that it can meet no more, and a new life of it could
        self.misfits: dict[Peer, str] = {}  # those that it never could meet, and why
        self.prefixes = PrefixMemory(self.num_pages)

    @property
    def name(self) -> str:
        return self.peer.name

    @property
    def role(self) -> Role:
        return self.hello.role

    @property
    def num_pages(self) -> int:
        return min((shard.num_pages for shard in self.hello.shards), default=0)

    def takes_work(self, now: float) -> bool:
        return self.standing is Standing.ALIVE and self.backoff_until <= now

    def state(self) -> dict[str, object]:
        """JSON-able."""
        load = self.load
        return {
            "name": self.name,
            "epoch": self.peer.epoch,
            "role": self.role.value,
            "standing": self.standing.value,
            "num_assigned": self.num_assigned,
            "pending_tokens": self.pending_tokens,
            "num_running": load.num_running if load else None,
            "num_waiting": load.num_waiting if load else None,
            "num_free_pages": load.num_free_pages if load else None,
            "num_pages": load.num_pages if load else self.num_pages,
            "cannot_meet": {other.name: reason for other, reason in self.misfits.items()},
        }

    def move(self, sign: Sign) -> bool:
        """Whether the sign changed the standing."""
        standing = STANDINGS.get((self.standing, sign), self.standing)
        changed = standing is not self.standing
        self.standing = standing
        return changed

    def report(self, load: Load) -> None:
        self.load = load
        self.foreign_running = max(0, load.num_running + load.num_waiting - self.num_assigned)
        self.foreign_tokens = max(0, load.waiting_tokens - self.pending_tokens)

    def assign(self, num_tokens: int, *, pending: bool) -> None:
        """Count a request until `release`; with `pending`, its tokens are to be computed until `computed`."""
        self.num_assigned += 1
        self.held_tokens += num_tokens
        if pending:
            self.pending_tokens += num_tokens

    def computed(self, num_tokens: int) -> None:
        self.pending_tokens -= num_tokens

    def release(self, num_tokens: int) -> None:
        self.num_assigned -= 1
        self.held_tokens -= num_tokens
        self.backoff_until = 0.0  # something became free: it may be asked again

    def can_meet(self, other: Member) -> bool:
        return other.peer not in self.parted and other.peer not in self.misfits

    def part_from(self, other: Peer) -> None:
        """One has cut the other off; neither transfer can undo it."""
        self.parted.add(other)

    def forget(self, other: Peer) -> None:
        """That life has ended."""
        self.parted.discard(other)
        self.misfits.pop(other, None)

    def back_off(self, until: float) -> None:
        self.backoff_until = until


def missing_roles(members: Iterable[Member]) -> tuple[Role, ...]:
    """Roles without an instance that takes work; empty when these can serve."""
    alive = {member.role for member in members if member.standing is Standing.ALIVE}
    if Role.COLOCATED in alive:
        return ()
    return tuple(role for role in OTHER if role not in alive)


def is_isolated(member: Member, members: Iterable[Member]) -> bool:
    """There are instances of the other role, and it can meet none of them."""
    others = [other for other in members if OTHER.get(other.role) is member.role]
    return bool(others) and not any(map(member.can_meet, others))


def part(prefill: Member | None, decode: Member | None, reason: str, *, is_for_good: bool) -> list[Effect]:
    """The two, as one of them says, cannot serve together: in these lives or, `is_for_good`, in none like them."""
    if prefill is None or decode is None:
        return []
    if not is_for_good:
        prefill.part_from(decode.peer)
        return []
    is_known = decode.peer in prefill.misfits
    prefill.misfits[decode.peer] = f"{prefill.name} and {decode.name} cannot serve together: {reason}"
    return [] if is_known else [Stamp(prefill.name, "barred", f"from {decode.name}: {reason}")]


def why_none_meet(members: Iterable[Member]) -> str | None:
    """Why no two of the living can serve together, whatever is tried; None where some could, or one serves alone."""
    staying = [member for member in members if member.standing in (Standing.ALIVE, Standing.SUSPECT)]
    decodes = [member for member in staying if member.role is Role.DECODE]
    reason = None
    for member in staying:
        if member.role is Role.COLOCATED:
            return None
        if member.role is Role.PREFILL:
            for decode in decodes:
                reason = member.misfits.get(decode.peer)
                if reason is None:
                    return None
    return reason


def mismatch(sender: Peer, hello: Hello, others: Iterable[Hello]) -> str | None:
    """Why `hello` cannot serve beside the others, with both values; None if it can."""
    if (hello.worker, hello.epoch) != sender:
        return f"{sender.name} of epoch {sender.epoch} says it is {hello.worker} of epoch {hello.epoch}"
    if hello.wire_version != WIRE_VERSION:
        return f"{hello.worker} speaks wire version {hello.wire_version}, the router {WIRE_VERSION}"
    if hello.role is Role.ROUTER:
        return f"{hello.worker} says it is a router; workers are prefill, decode or colocated"
    for other in others:
        if other.worker == hello.worker:
            continue  # it takes that one's place
        dtype = () if OTHER.get(hello.role) is other.role else ("dtype",)  # another attempt answers the same
        faults = [*_differences(hello, other, "model", ("name", "fingerprint", "vocab_size", *dtype))]
        fields = ("num_layers", "num_kv_heads", "head_dim", "v_head_dim", "kind", *dtype)
        faults += _differences(hello, other, "layout", fields)  # of one role too: both must meet the same others
        if OTHER.get(hello.role) is other.role and hello.transfer != other.transfer:
            faults.append(f"transfer: {hello.transfer!r} and {other.transfer!r}")
        if not (hello.converts and other.converts) and not dtype:
            direct = " and ".join(one.worker for one in (hello, other) if not one.converts)
            told = _differences(hello, other, "layout", ("dtype",))
            faults += [f"KV {fault}, which {direct} with --move direct cannot convert" for fault in told]
        if faults:
            return f"{hello.worker} and {other.worker} cannot meet: " + "; ".join(faults)
    return None


def unlike(hello: Hello, others: Iterable[Hello]) -> str | None:
    """Who computes with other operators than `hello`: both can serve, and below float32 may round differently."""
    for other in others:
        if other.worker != hello.worker and other.operators != hello.operators:
            ours, theirs = hello.operators or "unknown operators", other.operators or "unknown operators"
            return (
                f"{hello.worker} computes with {ours}, {other.worker} with {theirs}: "
                f"in {hello.model.dtype} an answer may depend on who computes it"
            )
    return None


def _differences(hello: Hello, other: Hello, part: str, fields: tuple[str, ...]) -> Iterator[str]:
    ours, theirs = getattr(hello, part), getattr(other, part)
    for field in fields:
        if getattr(ours, field) != getattr(theirs, field):
            yield f"{field}: {getattr(ours, field)!r} and {getattr(theirs, field)!r}"
