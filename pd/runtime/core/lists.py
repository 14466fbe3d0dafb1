"""What is wanted of each instance, said again and again: so a lost message of either costs a few seconds. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable

from pd.runtime.core.answer import Answer, is_handed
from pd.runtime.core.events import Effect, Send
from pd.runtime.core.member import Member
from pd.runtime.core.membership import Membership
from pd.runtime.wire.messages import Wanted
from pd.runtime.wire.values import Handle


class Lists:
    def __init__(self, members: Membership, effects: list[Effect], *, every_s: float) -> None:
        self._members = members
        self._effects = effects
        self._every_s = every_s
        self._say_at = -math.inf

    def tick(self, answers: Iterable[Answer], now: float) -> None:
        if now >= self._say_at:
            self._say_at = now + self._every_s
            self.say(answers)

    def say(self, answers: Iterable[Answer]) -> None:
        """Tell each instance all that is wanted of it. `answers`: all that are open."""
        must: dict[Member, list[Handle]] = {member: [] for member in self._members}
        handed: dict[Member, list[Handle]] = {member: [] for member in self._members}
        for answer in answers:
            for member in answer.asked:
                (handed if is_handed(answer, member) else must)[member].append(answer.handle)
        for member, handles in must.items():
            self._effects.append(Send(member.name, Wanted(tuple(handles), tuple(handed[member]))))
