"""A rank that is silent is found, and our own pause is not taken for its silence."""

from __future__ import annotations

from pd.runtime.core.pulse import PING_S, SILENT_S, Pulse


def look(pulse: Pulse, start: float, seconds: float, *, answering: tuple[int, ...]) -> tuple[float, int | None]:
    """Look ten times a second; when a rank was found silent and which, or the end and None."""
    now = start
    while now < start + seconds:
        now += 0.1
        for rank in answering:
            pulse.heard(rank, now)
        if (silent := pulse.silent(now)) is not None:
            return now - start, silent
    return now, None


def test_a_silent_rank_is_found_in_time_while_the_others_answer() -> None:
    after_s, rank = look(Pulse(3, now=5.0), 5.0, 100.0, answering=(0, 2))
    assert rank == 1 and SILENT_S <= after_s < SILENT_S + 0.3


def test_ranks_that_answer_are_never_silent() -> None:
    assert look(Pulse(2, now=0.0), 0.0, 100.0, answering=(0, 1))[1] is None


def test_our_own_pause_is_no_ranks_silence() -> None:
    pulse = Pulse(1, now=0.0)
    now, _ = look(pulse, 0.0, 3.0, answering=(0,))
    assert pulse.silent(now + 500.0) is None
    after_s, rank = look(pulse, now + 500.0, 100.0, answering=())
    assert rank == 0 and after_s > SILENT_S - 1.0


def test_ranks_are_asked_at_an_even_pace() -> None:
    pulse = Pulse(1, now=0.0)
    asked = [number for number in range(100) if pulse.is_due(number / 10)]
    assert len(asked) == round(10.0 / PING_S)
