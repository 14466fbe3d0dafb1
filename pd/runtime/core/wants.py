"""What the router wants of an instance, held against what is here: so it comes to light what one of them forgot. Pure.

Rules
1. What is here and not wanted is given up, as if its Cancel had come; that was lost.
2. What is wanted and has failed here is said again to have failed: our word of it was lost, or crossed the list.
3. What is wanted and not here is missing, if it was so the last time too: its request was lost, or our word of its end.
   Once proves nothing: another link may be slower than the router's.
"""

from __future__ import annotations

from collections.abc import Iterable

from pd.runtime.core.events import ROUTER, Effect, Send, Stamp
from pd.runtime.core.parts import Parts
from pd.runtime.core.work import Work
from pd.runtime.wire.messages import Cancelled, Failed, Missing, Refused, Wanted
from pd.runtime.wire.values import Handle


class Wants:
    def __init__(self, parts: Parts, work: Work) -> None:
        self._parts = parts
        self._work = work
        self._absent: set[Handle] = set()  # of what was wanted the last time
        self._failed: dict[Handle, Failed | Refused] = {}  # said since then, or wanted still

    def note(self, effects: Iterable[Effect]) -> None:
        """What this instance is about to do."""
        for effect in effects:
            if isinstance(effect, Send) and isinstance(effect.message, Failed | Refused):
                self._failed[effect.message.handle] = effect.message

    def hear(self, message: Wanted, now: float) -> list[Effect]:
        """The router's whole list."""
        held = self._parts.held()
        wanted = {*message.handles, *message.handed}
        effects: list[Effect] = []
        for handle in held:
            if handle not in wanted:
                effects += self._work.cancel(handle, "the router wants it no more", now=now) or []
                effects += [Send(ROUTER, Cancelled(handle)), Stamp(str(handle), "cancelled", "wanted no more")]
        self._failed = {handle: word for handle, word in self._failed.items() if handle in wanted}
        effects += [Send(ROUTER, word) for word in self._failed.values()]
        absent = [handle for handle in message.handles if handle not in held and handle not in self._failed]
        missing = tuple(handle for handle in absent if handle in self._absent)
        self._absent = set(absent)
        if missing:
            effects.append(Send(ROUTER, Missing(missing)))
        return effects
