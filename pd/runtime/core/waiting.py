"""Requests that wait for a pair of instances, first come first served. Pure.

Rules
1. The order is that of arrival, whatever an attempt went through since: who comes back takes its old place.
2. One that waits for room holds up those behind it, because nobody asks the instance that refused it for a
   while: so small requests do not starve a large one. One that rests before its next attempt holds up nobody.
3. A burst is asked for at once, and most of it may come back: then who came last is turned away first.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Iterator, Sequence

from pd.runtime.core.answer import Answer
from pd.runtime.core.member import Member
from pd.runtime.core.placement import Pair, choose

MAX_SCANNED = 64
"""Requests tried at once; those behind them wait for the next occasion. Bounds the work of one event."""


class Waiting:
    def __init__(self) -> None:
        self._answers: list[Answer] = []

    def __len__(self) -> int:
        return len(self._answers)

    def add(self, answer: Answer) -> None:
        bisect.insort(self._answers, answer, key=_order)

    def remove(self, answer: Answer) -> None:
        index = bisect.bisect_left(self._answers, answer.order, key=_order)
        assert self._answers[index] is answer, f"{answer.handle} does not wait"
        del self._answers[index]

    def over(self, most: int) -> Answer | None:
        """Who has to go because more than `most` wait: the last to come that has got no token yet."""
        if len(self._answers) <= most:
            return None
        return next((answer for answer in reversed(self._answers) if len(answer.known) == answer.num_prompt), None)

    def place(self, members: Iterable[Member], now: float) -> Iterator[tuple[Answer, Pair]]:
        """Take out those that can go, each with its pair. The caller begins each before the next."""
        if not self._answers or not any(member.takes_work(now) for member in members):
            return
        for answer in self._answers[:MAX_SCANNED]:
            pair = choose(members, answer.wish, now) if answer.ready_at <= now else None
            if pair is not None:
                self.remove(answer)
                yield answer, pair

    def check(self, wanted: Sequence[Answer]) -> None:
        orders = [answer.order for answer in self._answers]
        assert orders == sorted(set(orders)), f"not in the order of arrival: {orders}"
        assert set(orders) == {answer.order for answer in wanted}, f"waiting {orders}, queued {wanted}"


def _order(answer: Answer) -> int:
    return answer.order
