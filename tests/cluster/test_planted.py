"""Planted faults: each takes one safeguard away, and the simulation must see what comes of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import pytest

from pd.runtime.core import inbox, membership, outbox
from pd.runtime.core.answer import Answer, Piece
from pd.runtime.core.dispatch import Dispatch
from pd.runtime.core.events import Effect, Peer
from pd.runtime.core.flight import Flight
from pd.runtime.core.lives import Links
from pd.runtime.core.member import Member
from pd.runtime.core.pages import PageTable
from pd.runtime.core.timetable import Timetable
from pd.runtime.wire.messages import Finish, Handle, Token
from pd.transfer.handoff import INBOX, OUTBOX, InboxState, OutboxState
from pd.transfer.handoff import Effect as Do
from pd.transfer.handoff import Event as On
from tests.cluster.run import simulate
from tests.cluster.scenario import Profile

MAX_SEEDS = 120


def caught(profile: Profile) -> str | None:
    """The first violation of the profile's seeds."""
    for seed in range(MAX_SEEDS):
        violation = simulate(seed, profile).violation
        if violation is not None:
            return violation
    return None


def patched(table: Mapping[Any, Any], **rows: Any) -> Mapping[Any, Any]:
    return MappingProxyType({**table, **rows["rows"]})


R, F, S = InboxState.RESERVED, InboxState.FENCING, InboxState.SEVERING
FREED = (InboxState.DONE, (Do.FREE,))

INBOX_FAULTS: dict[str, tuple[dict[tuple[InboxState, On], Any], Profile]] = {
    "pages are free at once when the request is cancelled": ({(R, On.CANCEL): FREED}, Profile.FAULTS),
    "pages are free at once when landing takes too long": (
        {(R, On.TIMEOUT): FREED, (R, On.CANCEL): FREED},
        Profile.ALL,
    ),
    "a lost writer is not severed": ({(R, On.PEER_LOST): FREED, (F, On.PEER_LOST): FREED}, Profile.LATE),
    "a writer that could not be severed is trusted": ({(S, On.UNCLEAN): FREED}, Profile.LATE),
    "nobody reminds the writer of a Stop, and nobody gives up waiting": (
        {(F, On.REMIND): (F, ()), (F, On.TIMEOUT): (F, ())},
        Profile.FAULTS,
    ),
}

C, D = OutboxState.COMPUTING, OutboxState.DRAINING
OUTBOX_FAULTS: dict[str, tuple[dict[tuple[OutboxState, On], Any], Profile]] = {
    "Landed is said before the last write is done": (
        {(C, On.COMPUTED): (OutboxState.DONE, (Do.SEND_LANDED, Do.FREE))},
        Profile.CALM,
    ),
    "Fenced is said while writes are under way": (
        {
            (C, On.STOP): (OutboxState.DONE, (Do.SEND_FENCED, Do.FREE)),
            (D, On.STOP): (OutboxState.DONE, (Do.SEND_FENCED, Do.FREE)),
        },
        Profile.FAULTS,
    ),
    "Fenced is said of failed writes whose bytes may still land": (
        {
            (C, On.DOUBT): (OutboxState.STOPPING, ()),
            (D, On.DOUBT): (OutboxState.STOPPING, ()),
            (OutboxState.STOPPING, On.DOUBT): (OutboxState.STOPPING, ()),
        },
        Profile.FAULTS,
    ),
}


@pytest.mark.parametrize("fault", INBOX_FAULTS)
def test_a_fault_of_the_receiving_end_is_caught(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rows, profile = INBOX_FAULTS[fault]
    monkeypatch.setattr(inbox, "INBOX", patched(INBOX, rows=rows))
    assert caught(profile) is not None


@pytest.mark.parametrize("fault", OUTBOX_FAULTS)
def test_a_fault_of_the_writing_end_is_caught(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rows, profile = OUTBOX_FAULTS[fault]
    monkeypatch.setattr(outbox, "OUTBOX", patched(OUTBOX, rows=rows))
    assert caught(profile) is not None


def accept_old_attempts(monkeypatch: pytest.MonkeyPatch) -> None:
    def find(self: Dispatch, member: Member, handle: Handle) -> Answer | None:
        answer = self.answers.get(handle.request_id)
        return answer if answer is not None and member in (answer.decode, answer.prefill) else None

    monkeypatch.setattr(Dispatch, "find", find)


def have_no_deadlines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Timetable, "pop_due", lambda self, now: [])


def keep_no_order(monkeypatch: pytest.MonkeyPatch) -> None:
    def accept(self: Answer, position: int, tokens: tuple[Token, ...], finish: Finish | None) -> Piece | None:
        self.known += [token.id for token in tokens]
        return Piece(position, tokens, finish)

    monkeypatch.setattr(Answer, "accept", accept)


def ask_no_stranger(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(membership.Membership, "ask", lambda self, stranger, now: [])


def sever_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    cut = Links.cut

    def order_nothing(self: Links, life: Peer) -> list[Effect]:
        return cut(self, life)[:0]

    monkeypatch.setattr(Links, "cut", order_nothing)


def free_what_steps_in_flight_write(monkeypatch: pytest.MonkeyPatch) -> None:
    def release(self: Flight, table: PageTable, last_step: int) -> None:
        if table.pages:
            self._pages.release(table)

    monkeypatch.setattr(Flight, "release", release)


def believe_any_life(monkeypatch: pytest.MonkeyPatch) -> None:
    fenced = inbox.Inboxes.fenced

    def believe(self: inbox.Inboxes, sender: Peer, handle: Handle, *, now: float) -> list[Effect] | None:
        box = self._inboxes.get(handle)
        return fenced(self, box.life if box is not None else sender, handle, now=now)

    monkeypatch.setattr(inbox.Inboxes, "fenced", believe)


def forget_doubts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A Stop is answered as if nothing of a lost peer's failed writes could land."""
    monkeypatch.setattr(outbox.Outboxes, "doubt", lambda self, doubtful: None)


FAULTS: dict[str, tuple[Callable[[pytest.MonkeyPatch], None], Profile]] = {
    "nobody is severed who should be": (sever_nobody, Profile.CRASHES),
    "a new life's word is taken for its predecessor's": (believe_any_life, Profile.LATE),
    "the router takes old attempts for the current one": (accept_old_attempts, Profile.LATE),
    "the router has no deadlines": (have_no_deadlines, Profile.FAULTS),
    "the router passes tokens on as they come": (keep_no_order, Profile.FAULTS),
    "the router asks no stranger who it is": (ask_no_stranger, Profile.CRASHES),
    "doubts are forgotten": (forget_doubts, Profile.FAULTS),
    "pages are free while a launched step writes them": (free_what_steps_in_flight_write, Profile.TIGHT),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_of_a_brain_is_caught(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plant, profile = FAULTS[fault]
    plant(monkeypatch)
    assert caught(profile) is not None
