"""The tally of ranks: an answer counts when all have given it; and the memory of attempts."""

from __future__ import annotations

from pd.runtime.core.attempts import Arrival, Attempts
from pd.runtime.core.ranks import Tally
from pd.runtime.wire.plans import Severed, StepDone, WriteDone
from pd.runtime.wire.values import Handle, Token


def test_a_step_is_done_when_all_ranks_are_with_the_tokens_of_rank_0() -> None:
    tally = Tally(3)
    assert tally.step_done(2, StepDone(1, (), 0.3)) is None
    assert tally.step_done(0, StepDone(1, (Token(5),), 0.1)) is None
    assert tally.step_done(0, StepDone(1, (Token(5),), 0.1)) is None
    assert tally.step_done(1, StepDone(2, (), 0.1)) is None
    assert tally.step_done(1, StepDone(1, (), 0.2)) == StepDone(1, (Token(5),), 0.3)


def test_a_write_ends_with_the_first_error_of_any_rank_but_only_when_all_have_ended() -> None:
    tally = Tally(3)
    assert tally.write_done(1, WriteDone(7, "reset", 10, 0.1)) is None
    assert tally.write_done(0, WriteDone(7, None, 30, 0.5)) is None
    assert tally.write_done(2, WriteDone(7, "severed", 0, 0.2)) == WriteDone(7, "reset", 40, 0.5)
    assert tally.write_done(0, WriteDone(7, None, 1, 0.1)) is None


def test_a_peer_is_severed_cleanly_if_it_is_on_every_rank_and_can_be_asked_again() -> None:
    tally = Tally(2)
    assert tally.severed(0, Severed("p", "1", True)) is None
    assert tally.severed(0, Severed("p", "2", True)) is None
    assert tally.severed(1, Severed("p", "1", False)) == Severed("p", "1", False)
    assert tally.severed(1, Severed("p", "1", True)) is None
    assert tally.severed(0, Severed("p", "1", True)) == Severed("p", "1", True)


def test_the_latest_attempt_is_new_once_and_all_before_it_are_stale() -> None:
    attempts = Attempts()
    assert attempts.begin(Handle("a", 2)) is Arrival.NEW
    assert attempts.begin(Handle("a", 2)) is attempts.begin(Handle("a", 1)) is Arrival.STALE
    assert attempts.earlier(Handle("a", 3)) == Handle("a", 2)
    assert attempts.earlier(Handle("b", 1)) is None
    assert attempts.begin(Handle("a", 3)) is Arrival.NEW


def test_a_stop_is_remembered_for_what_has_not_come_and_only_for_that_attempt() -> None:
    attempts = Attempts()
    attempts.begin(Handle("a", 1))
    attempts.stop(Handle("a", 1))
    assert attempts.begin(Handle("a", 1)) is Arrival.STALE
    attempts.stop(Handle("a", 2))
    assert attempts.begin(Handle("a", 2)) is Arrival.STOPPED
    assert attempts.begin(Handle("a", 3)) is Arrival.NEW


def test_the_memory_of_attempts_is_bounded() -> None:
    attempts = Attempts(max_remembered=3)
    for number in range(10):
        attempts.begin(Handle(str(number), 1))
    assert len(attempts) == 3
    assert attempts.begin(Handle("9", 1)) is Arrival.STALE
    assert attempts.begin(Handle("0", 1)) is Arrival.NEW
