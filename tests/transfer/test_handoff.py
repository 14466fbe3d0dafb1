"""Both ends' tables: every transition, and that no row frees pages without a proof."""

from __future__ import annotations

import itertools

import pytest

from pd.transfer.handoff import INBOX, OUTBOX, Effect, Event, InboxState, OutboxState, step

O, I, E, F = OutboxState, InboxState, Event, Effect  # noqa: E741


@pytest.mark.parametrize(
    ("events", "state", "effects"),
    [
        ((E.START, E.CHUNK, E.CHUNK, E.COMPUTED, E.DRAINED), O.LANDED, (F.WRITE, F.WRITE, F.SEND_LANDED, F.FREE)),
        ((E.STOP,), O.FENCED, (F.SEND_FENCED, F.FREE)),
        ((E.TIMEOUT,), O.FENCED, (F.SEND_FENCED, F.FREE)),
        ((E.PEER_LOST,), O.DONE, (F.FREE,)),
        ((E.START, E.CHUNK, E.STOP), O.STOPPING, (F.WRITE,)),
        ((E.START, E.STOP, E.CHUNK), O.STOPPING, ()),
        ((E.START, E.STOP, E.COMPUTED, E.DRAINED), O.FENCED, (F.SEND_FENCED, F.FREE)),
        ((E.START, E.TIMEOUT, E.DRAINED), O.FENCED, (F.SEND_FENCED, F.FREE)),
        ((E.START, E.DRAINED), O.COMPUTING, ()),
        ((E.START, E.COMPUTED, E.STOP, E.DRAINED), O.FENCED, (F.SEND_FENCED, F.FREE)),
        ((E.START, E.COMPUTED, E.TIMEOUT, E.TIMEOUT, E.DRAINED), O.FENCED, (F.SEVER, F.SEND_FENCED, F.FREE)),
        ((E.START, E.PEER_LOST, E.STOP, E.DRAINED), O.DONE, (F.FREE,)),
        ((E.START, E.COMPUTED, E.PEER_LOST, E.TIMEOUT, E.DRAINED), O.DONE, (F.SEVER, F.FREE)),
        ((E.START, E.STOP, E.PEER_LOST, E.DRAINED), O.DONE, (F.FREE,)),
        ((E.START, E.HOLD, E.CHUNK, E.COMPUTED, E.DRAINED), O.LANDED, (F.WRITE, F.SEND_LANDED, F.FREE)),
        ((E.START, E.HOLD, E.STOP), O.FENCED, (F.SEND_FENCED, F.FREE)),
        ((E.START, E.HOLD, E.TIMEOUT), O.FENCED, (F.SEND_FENCED, F.FREE)),
        ((E.START, E.OFFER, E.RENEW, E.RELEASED), O.DONE, (F.SEND_READY, F.SEND_RENEWED, F.FREE)),
        ((E.START, E.HOLD, E.OFFER, E.TIMEOUT), O.FENCED, (F.SEND_READY, F.SEND_FENCED, F.FREE)),
        ((E.START, E.OFFER, E.STOP, E.RENEW, E.STOP), O.WITHDRAWN, (F.SEND_READY, F.SEND_FENCED)),
        ((E.START, E.OFFER, E.PEER_LOST, E.TIMEOUT), O.DONE, (F.SEND_READY, F.FREE)),
        ((E.START, E.COMPUTED, E.DRAINED, E.STOP), O.LANDED, (F.SEND_LANDED, F.FREE)),
        ((E.START, E.COMPUTED, E.DRAINED, E.REMIND, E.HEARD), O.DONE, (F.SEND_LANDED, F.FREE, F.SEND_LANDED)),
        ((E.STOP, E.REMIND, E.REMIND, E.HEARD), O.DONE, (F.SEND_FENCED, F.FREE, F.SEND_FENCED, F.SEND_FENCED)),
        ((E.START, E.COMPUTED, E.DRAINED, E.TIMEOUT), O.DONE, (F.SEND_LANDED, F.FREE)),
        ((E.STOP, E.PEER_LOST), O.DONE, (F.SEND_FENCED, F.FREE)),
        ((E.START, E.DIGEST, E.DIGESTED, E.RELEASED), O.DONE, (F.DIGEST, F.SEND_READY, F.FREE)),
        ((E.START, E.HOLD, E.DIGEST, E.TIMEOUT, E.DIGESTED), O.FENCED, (F.DIGEST, F.SEND_FENCED, F.FREE)),
        ((E.START, E.DIGEST, E.STOP), O.FENCED, (F.DIGEST, F.SEND_FENCED, F.FREE)),
        ((E.START, E.DIGEST, E.PEER_LOST), O.DONE, (F.DIGEST, F.FREE)),
    ],
)
def test_the_writing_end(events: tuple[Event, ...], state: OutboxState, effects: tuple[Effect, ...]) -> None:
    assert run_outbox(events) == (state, effects)


@pytest.mark.parametrize(
    ("events", "state", "effects"),
    [
        ((E.LANDED,), I.DONE, (F.ADMIT,)),
        ((E.FENCED,), I.DONE, (F.FREE,)),
        ((E.CANCEL, E.FENCED), I.DONE, (F.SEND_STOP, F.FREE)),
        ((E.CANCEL, E.REMIND, E.LANDED), I.DONE, (F.SEND_STOP, F.SEND_STOP, F.FREE)),
        ((E.TIMEOUT, E.FENCED), I.DONE, (F.SEND_STOP, F.FREE)),
        ((E.TIMEOUT, E.TIMEOUT, E.SEVERED), I.DONE, (F.SEND_STOP, F.SEVER, F.FREE)),
        ((E.PEER_LOST, E.SEVERED), I.DONE, (F.SEVER, F.FREE)),
        ((E.CANCEL, E.PEER_LOST, E.FENCED), I.DONE, (F.SEND_STOP, F.SEVER, F.FREE)),
        ((E.PEER_LOST, E.LANDED), I.DONE, (F.SEVER, F.FREE)),
        ((E.PEER_LOST, E.UNCLEAN), I.QUARANTINED, (F.SEVER, F.QUARANTINE)),
        ((E.PEER_LOST, E.TIMEOUT), I.QUARANTINED, (F.SEVER, F.QUARANTINE)),
        (
            (E.PEER_LOST, E.UNCLEAN, E.REMIND, E.UNCLEAN, E.SEVERED),
            I.DONE,
            (F.SEVER, F.QUARANTINE, F.SEND_STOP, F.SEVER, F.READMIT),
        ),
        ((E.PEER_LOST, E.UNCLEAN, E.FENCED), I.DONE, (F.SEVER, F.QUARANTINE, F.READMIT)),
        ((E.PEER_LOST, E.UNCLEAN, E.LANDED), I.DONE, (F.SEVER, F.QUARANTINE, F.READMIT)),
        ((E.LANDED, E.LANDED, E.CANCEL, E.PEER_LOST), I.DONE, (F.ADMIT,)),
        ((E.CHECK, E.AGREED), I.DONE, (F.DIGEST, F.ADMIT)),
        ((E.CHECK, E.DIFFERS), I.DONE, (F.DIGEST, F.FREE)),
        ((E.CHECK, E.CHECK, E.LANDED, E.FENCED, E.PEER_LOST, E.SEVERED), I.CHECKING, (F.DIGEST,)),
        ((E.CHECK, E.CANCEL, E.AGREED), I.DONE, (F.DIGEST, F.FREE)),
        ((E.CHECK, E.TIMEOUT, E.AGREED), I.DONE, (F.DIGEST, F.FREE)),
        ((E.CANCEL, E.AGREED, E.FENCED), I.DONE, (F.SEND_STOP, F.FREE)),
    ],
)
def test_the_end_that_is_written(events: tuple[Event, ...], state: InboxState, effects: tuple[Effect, ...]) -> None:
    assert run_inbox(events) == (state, effects)


@pytest.mark.parametrize(
    ("events", "state", "effects"),
    [
        ((E.READY, E.REMIND, E.LANDED), I.DONE, (F.READ, F.SEND_RENEW, F.SEND_RENEW, F.SEND_RELEASED, F.ADMIT)),
        ((E.CANCEL,), I.DONE, (F.SEND_RELEASED, F.FREE)),
        ((E.FENCED,), I.DONE, (F.FREE,)),
        ((E.PEER_LOST,), I.DONE, (F.FREE,)),
        ((E.READY, E.CANCEL, E.LANDED, E.DRAINED), I.DONE, (F.READ, F.SEND_RENEW, F.SEND_RELEASED, F.FREE)),
        ((E.READY, E.FENCED, E.TIMEOUT), I.DROPPING, (F.READ, F.SEND_RENEW, F.SEVER)),
        ((E.READY, E.CHECK, E.AGREED), I.DONE, (F.READ, F.SEND_RENEW, F.SEND_RELEASED, F.DIGEST, F.ADMIT)),
        ((E.READY, E.TIMEOUT, E.DOUBT, E.SEVERED), I.DONE, (F.READ, F.SEND_RENEW, F.SEVER, F.FREE)),
        (
            (E.AHEAD, E.AHEAD, E.READY, E.AHEAD, E.LANDED),
            I.DONE,
            (F.READ, F.READ, F.READ, F.SEND_RENEW, F.SEND_RELEASED, F.ADMIT),
        ),
        ((E.AHEAD, E.FENCED, E.READY, E.DRAINED), I.DONE, (F.READ, F.SEND_RELEASED, F.FREE)),
        ((E.AHEAD, E.PEER_LOST, E.DOUBT, E.SEVERED), I.DONE, (F.READ, F.SEVER, F.FREE)),
    ],
)
def test_the_end_that_reads(events: tuple[Event, ...], state: InboxState, effects: tuple[Effect, ...]) -> None:
    assert run_inbox(events, I.AWAITING) == (state, effects)


def test_the_writing_end_lets_go_only_when_no_write_is_open() -> None:
    for (state, event), (_, effects) in OUTBOX.items():
        if F.FREE in effects:
            writes_nothing = state in (O.QUEUED, O.HOLDING, O.DIGESTING, O.OFFERED, O.WITHDRAWN)
            assert event is E.DRAINED or writes_nothing, f"{state} frees on {event}"


def test_what_is_offered_is_kept_until_it_is_released_or_its_lease_is_over() -> None:
    for (state, event), (_, effects) in OUTBOX.items():
        if state in (O.OFFERED, O.WITHDRAWN) and F.FREE in effects:
            assert event in (E.RELEASED, E.TIMEOUT), f"{state} frees on {event}"


def test_the_written_end_lets_go_only_on_a_proof() -> None:
    for (state, event), (_, effects) in INBOX.items():
        if {F.FREE, F.READMIT, F.ADMIT} & set(effects):
            is_proof = event in (E.LANDED, E.FENCED, E.SEVERED)
            nobody_writes = state in (I.AWAITING, I.CHECKING) or (state, event) == (I.DROPPING, E.DRAINED)
            assert is_proof or nobody_writes, f"{state} lets go on {event}"


def test_whatever_happens_pages_are_let_go_exactly_once_and_only_at_the_end() -> None:
    ours = (E.START, E.CHUNK, E.COMPUTED, E.HOLD, E.OFFER, E.DRAINED, E.RELEASED, E.STOP, E.TIMEOUT, E.PEER_LOST)
    digested = (E.START, E.HOLD, E.DIGEST, E.DIGESTED, E.RELEASED, E.STOP, E.TIMEOUT, E.PEER_LOST, E.DRAINED)
    checked = (E.LANDED, E.CHECK, E.AGREED, E.DIFFERS)
    theirs = (*checked, E.FENCED, E.CANCEL, E.REMIND, E.SEVERED, E.UNCLEAN, E.TIMEOUT, E.PEER_LOST)
    reading = (*checked, E.AHEAD, E.READY, E.FENCED, E.CANCEL, E.DRAINED, E.DOUBT, E.SEVERED, E.TIMEOUT, E.PEER_LOST)
    for events in itertools.chain(itertools.product(ours, repeat=5), itertools.product(digested, repeat=4)):
        outbox, effects = run_outbox(events)
        assert effects.count(F.FREE) == (outbox in (O.LANDED, O.FENCED, O.DONE)), events
    runs = [(I.RESERVED, events) for events in itertools.product(theirs, repeat=4)]
    runs += [(I.AWAITING, events) for events in itertools.product(reading, repeat=4)]
    for start, events in runs:
        inbox, effects = run_inbox(events, start)
        let_go = sum(effects.count(effect) for effect in (F.FREE, F.READMIT, F.ADMIT))
        assert let_go == (inbox is I.DONE), events
        assert effects.count(F.READMIT) <= effects.count(F.QUARANTINE) <= 1, events


def test_a_last_word_is_said_again_until_it_is_heard_and_ends_nothing_else() -> None:
    for state, word in ((O.LANDED, F.SEND_LANDED), (O.FENCED, F.SEND_FENCED)):
        assert step(OUTBOX, state, E.REMIND) == (state, (word,))
        for event in E:
            after, effects = step(OUTBOX, state, event)
            assert F.FREE not in effects and after in (state, O.DONE), f"{state} on {event}"


def test_every_state_that_waits_for_others_has_a_way_out_by_its_deadline() -> None:
    for outbox in set(O) - {O.DONE}:
        assert (outbox, E.TIMEOUT) in OUTBOX, outbox
    for inbox in set(I) - {I.DONE, I.QUARANTINED}:
        assert (inbox, E.TIMEOUT) in INBOX, inbox
    assert (I.QUARANTINED, E.REMIND) in INBOX


def run_outbox(events: tuple[Event, ...]) -> tuple[OutboxState, tuple[Effect, ...]]:
    state, done = O.QUEUED, ()
    for event in events:
        state, effects = step(OUTBOX, state, event)
        done += effects
    return state, done


def run_inbox(events: tuple[Event, ...], start: InboxState = I.RESERVED) -> tuple[InboxState, tuple[Effect, ...]]:
    state, done = start, ()
    for event in events:
        state, effects = step(INBOX, state, event)
        done += effects
    return state, done
