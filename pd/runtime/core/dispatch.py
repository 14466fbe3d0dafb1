"""Attempts at requests: begun on a pair, repeated elsewhere when they fail, ended once. Pure.

Rules
1. A request ends once, in `end`, and leaves nothing behind: no place in the queue, no deadline, no count.
2. Every attempt has its own number, and an answer's members are those of its current attempt: so `find` knows
   a message of an old attempt, or of an instance that lost the request, and it is the only place that must.
3. Every state has a deadline. What runs into one is repeated, up to max_attempts.
4. Whoever is sent something about an attempt is among its `asked`, until it is known to be done with it.
"""

from __future__ import annotations

from dataclasses import dataclass

from pd.runtime.config import RouterConfig
from pd.runtime.core.answer import Answer, Move, Piece, State
from pd.runtime.core.events import Effect, Emit, End, Send, Stamp
from pd.runtime.core.lists import Lists
from pd.runtime.core.member import Member, Standing, part, why_none_meet
from pd.runtime.core.membership import Membership
from pd.runtime.core.placement import fits_nowhere
from pd.runtime.core.timetable import Timetable
from pd.runtime.core.waiting import Waiting
from pd.runtime.wire.messages import Cancel, Deliver, Prefill, Refused, Reserve
from pd.runtime.wire.values import Handle, Role, Stage, Ticket

RETRY_AFTER_S = 1.0
"""What a client is told: about what a restarted instance or a finished request takes."""
MIN_BACKOFF_S = 0.05
"""An instance that refuses is not asked again sooner, whatever it says."""
FIRST_DELAY_S = 0.25
"""The first repeat goes at once; each later one waits twice as long, to outlive a fault of a second."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Deadlines:
    """Of the stages, in seconds; the whole answer's comes with each Submit."""

    reserve_s: float = 2.0
    """Reserve to Reserved: decode decides at once, so this is a lost message or a busy process."""
    prefill_s: float = 120.0
    """Prefill's queue and its computing. Long: a long queue is health, and overload is refused at entry."""
    land_s: float = 30.0
    """First token to decode's first: the last transfer, and a slot there."""
    progress_s: float = 30.0
    """Between tokens. Not below land_s: a token moves its deadline later without touching the timetable."""
    gap_s: float = 3.0
    """Later tokens are here and an earlier one is missing: it was lost, or a link reconnects."""
    wanted_s: float = 1.0
    """Between two lists of all that is wanted of an instance. It says after two what it never got."""
    beat_timeout_s: float = 3.0
    """Silence until an instance is suspect: three beats."""
    dead_after_s: float = 10.0
    """Silence until its peers cut it off, which cannot be undone."""


class Dispatch:
    """Owns every Answer from arrival to ending. What is to be done goes into `effects`, the router's list."""

    def __init__(self, config: RouterConfig, deadlines: Deadlines, members: Membership, effects: list[Effect]) -> None:
        assert deadlines.progress_s >= deadlines.land_s, "see Deadlines.progress_s"
        self.answers: dict[str, Answer] = {}
        self.waiting = Waiting()
        self._config = config
        self._deadlines = deadlines
        self._members = members
        self._effects = effects
        self._timetable = Timetable()
        self.lists = Lists(members, effects, every_s=deadlines.wanted_s)

    def queue(self, answer: Answer, now: float) -> None:
        """Begin an attempt, or have the request wait in the order of arrival."""
        self.answers[answer.request_id] = answer
        self.waiting.add(answer)
        self._watch(answer, answer.queued_at + self._config.queue_s)
        if answer.ready_at > now:
            self._timetable.watch(answer.request_id, answer.ready_at)
        self.pump(now)
        while (last := self.waiting.over(self._config.max_queue)) is not None:
            reason = f"{self._config.max_queue} requests wait already, and no more may; {last.last_reason}"
            self.end(last, reason, now, status=429)

    def find(self, member: Member, handle: Handle) -> Answer | None:
        """The answer whose current attempt this is, at this instance."""
        answer = self.answers.get(handle.request_id)
        if answer is None or answer.attempt != handle.attempt:
            return None
        return answer if member is answer.decode or member is answer.prefill else None

    def instruct(self, answer: Answer, ticket: Ticket | None, now: float) -> None:
        """Have prefill compute, by a ticket or for one to come; or hand off what it holds."""
        assert answer.prefill is not None
        message: Prefill | Deliver
        if answer.state is State.HANDING and ticket is not None:
            answer.move(Move.DELIVER)
            seconds = self._deadlines.land_s
            message = Deliver(answer.handle, ticket)
        else:
            hands_off = ticket is None and answer.is_apart
            answer.move(Move.PREFILL)
            seconds = self._deadlines.prefill_s
            tokens = tuple(answer.known)
            message = Prefill(answer.handle, tokens, answer.num_prompt, answer.sampling, ticket, seconds, hands_off)
            answer.asked.append(answer.prefill)
        self._effects.append(Send(answer.prefill.name, message))
        self._watch(answer, now + seconds)

    def emit(
        self, answer: Answer, piece: Piece | None, member: Member, *, cached_tokens: int | None, now: float
    ) -> None:
        """Send on what `member` reported (None: an earlier token is missing). The request may end thereby."""
        if piece is not None:
            cached = cached_tokens if piece.position == answer.num_prompt else None
            timings = None if piece.finish is None else answer.course.timings(now)
            self._effects.append(Emit(answer.request_id, piece.position, piece.tokens, piece.finish, cached, timings))
            # the timetable comes by before that, and looks again
            answer.due_at = now + self._deadlines.progress_s
            if answer.state is State.PREFILLING:
                answer.move(Move.FIRST_TOKEN)
                answer.computed()
                self._effects.append(Stamp(str(answer.handle), "first_token"))
                self._watch(answer, now + self._deadlines.land_s)
                if piece.finish is None and answer.is_apart and self._config.reserve == "late":
                    self._reserve(answer, now)
            if piece.finish is not None:
                knows = member if answer.finish is not None else None
                self.end(answer, piece.finish.value, now, knows=knows)
                return
        if answer.held:
            self._watch(answer, min(answer.due_at, now + self._deadlines.gap_s))

    def let_go_of_drained(self, member: Member) -> None:
        """It leaves. If it drained first, its handoffs are done, and Landed is on its way or there; else decode says
        that it waits in vain."""
        for answer in self.answers.values():
            is_handed_off = answer.state is State.DECODING and answer.prefill is member is not answer.decode
            if is_handed_off and member.standing is Standing.DRAINING:
                answer.landed()

    def refuse(self, answer: Answer, member: Member, refused: Refused, now: float) -> None:
        """The instance does not take it: back into the queue, for another, or for later."""
        after_s, reason = refused.retry_after_s, refused.reason
        answer.last_reason = f"{member.name}: {reason}"
        if refused.is_parted:
            self._effects += part(answer.prefill, answer.decode, reason, is_for_good=after_s is None)
            if answer.wish.decodes and (why := why_none_meet(self._members)) is not None:
                self.end(answer, why, now, status=503, knows=member)
                for other in [each for each in self.answers.values() if each.state is State.QUEUED]:
                    if other.wish.decodes:
                        self.end(other, why, now, status=503)
                return
        elif after_s is None:
            answer.unfit.add(member.name)
            if fits_nowhere(self._members, answer.wish):
                self.end(answer, reason, now, status=400, knows=member)
                return
        self._cancel(answer, reason, member)
        answer.move(Move.REPEAT)
        if after_s is not None and not refused.is_parted:
            member.back_off(now + max(after_s, MIN_BACKOFF_S))
        self.queue(answer, now)

    def fail(self, answer: Answer, culprit: Member, stage: Stage, *, reason: str, now: float) -> None:
        """The attempt came to nothing. Repeat it from the tokens that are out, or give up."""
        made_progress = len(answer.known) > answer.started_at
        if not (stage is Stage.DECODE and reason.startswith("preempted") and made_progress):
            answer.num_failures += culprit in answer.asked  # else it was lost before it had anything of this
            answer.avoid = culprit.name
        answer.last_reason = f"{culprit.name} in stage {stage.value}: {reason}"
        if answer.num_failures >= self._config.max_attempts:
            why = f"gave up after {answer.num_failures} attempts; the last failed at {answer.last_reason}"
            self.end(answer, why, now, status=503)
            return
        self._effects.append(Stamp(str(answer.handle), "repeated", answer.last_reason))
        self._cancel(answer, reason)
        answer.move(Move.REPEAT)
        answer.rest(now, FIRST_DELAY_S * 2 ** (answer.num_failures - 2) if answer.num_failures > 1 else 0.0)
        self.queue(answer, now)

    def end(
        self,
        answer: Answer,
        reason: str,
        now: float,
        *,
        status: int | None = None,
        knows: Member | None = None,
    ) -> None:
        """The one ending. `status`: an End for the client; without one it has its finish, or has left.
        `knows`: the instance that ended it by itself, and need not be told."""
        self._effects.append(Stamp(str(answer.handle), "ended", reason))
        if status is not None:
            retry_after_s = RETRY_AFTER_S if status in (429, 503) else None
            self._effects.append(End(answer.request_id, status, reason, retry_after_s))
        if answer.state is State.QUEUED:
            self.waiting.remove(answer)
        else:
            self._cancel(answer, reason, knows)
        answer.move(Move.END)
        del self.answers[answer.request_id]
        self._timetable.forget(answer.request_id)
        self.pump(now)

    def pump(self, now: float) -> None:
        """Begin attempts for those that wait, while there are pairs that take them."""
        for answer, pair in self.waiting.place(self._members, now):
            alone = pair.prefill if pair.prefill.role is Role.COLOCATED else None
            answer.begin(pair.prefill, pair.decode or alone)
            names = pair.prefill.name if pair.decode is None else f"{pair.prefill.name} {pair.decode.name}"
            self._effects.append(Stamp(str(answer.handle), "placed", names))
            if answer.is_apart and self._config.reserve == "early":
                self._reserve(answer, now)
            else:
                self.instruct(answer, None, now)

    def tick(self, now: float) -> None:
        """Look at the deadlines that have come up. Those that moved since are looked at again later."""
        for request_id in self._timetable.pop_due(now):
            answer = self.answers[request_id]
            if answer.look_at <= now:
                self._expire(answer, now)
            else:
                self._timetable.watch(request_id, answer.look_at)
        self.pump(now)
        self.lists.tick(self.answers.values(), now)

    def check(self) -> None:
        for request_id, answer in self.answers.items():
            handle = answer.handle
            assert answer.request_id == request_id and answer.state is not State.ENDED, f"{handle} has ended"
            is_placed = answer.prefill is not None or answer.decode is not None
            assert is_placed == (answer.state is not State.QUEUED), f"{handle} is {answer.state}"
            assert answer.num_left > 0, f"{handle} has all its tokens and goes on"
            assert set(answer.asked) <= {answer.prefill, answer.decode}, f"{handle} was asked of others"
        self.waiting.check([answer for answer in self.answers.values() if answer.state is State.QUEUED])
        self._timetable.check({request_id: answer.look_at for request_id, answer in self.answers.items()})

    def _reserve(self, answer: Answer, now: float) -> None:
        """Ask decode for pages: before prefill begins, or when it is done."""
        assert answer.prefill is not None and answer.decode is not None
        answer.move(Move.RESERVE)
        limits = self._deadlines
        prefill_s = 0.0 if answer.state is State.HANDING else limits.prefill_s
        reserve = Reserve(
            answer.handle,
            tuple(answer.known[: answer.started_at]),
            answer.num_prompt,
            answer.sampling,
            *answer.prefill.peer,
            deadline_s=limits.reserve_s + prefill_s + limits.land_s,
            is_pull=self._config.direction == "pull",
            verifies=self._config.verify_kv,
        )
        answer.asked.append(answer.decode)
        self._effects.append(Send(answer.decode.name, reserve))
        self._watch(answer, now + limits.reserve_s)

    def _cancel(self, answer: Answer, reason: str, knows: Member | None = None) -> None:
        """Let the instances go, and tell all but `knows`."""
        for member in answer.let_go():
            if member is not knows and member.standing is not Standing.GONE:
                self._effects.append(Send(member.name, Cancel(answer.handle, reason)))

    def _watch(self, answer: Answer, until: float) -> None:
        """Give the state its deadline."""
        answer.due_at = until
        self._timetable.watch(answer.request_id, answer.look_at)

    def _expire(self, answer: Answer, now: float) -> None:
        """A deadline has passed: the whole answer's, or that of the state."""
        if answer.ends_at <= now:
            num_tokens = len(answer.known) - answer.num_prompt
            reason = f"no whole answer in time: in stage {answer.stage.value}, after {num_tokens} tokens"
            self.end(answer, reason, now, status=504)
        elif answer.state is State.QUEUED:
            reason = f"no instances took it within {self._config.queue_s:g} s; {answer.last_reason or 'all busy'}"
            self.end(answer, reason, now, status=503)
        else:
            culprit = answer.prefill if answer.state is State.PREFILLING else answer.decode or answer.prefill
            assert culprit is not None, f"{answer.handle} is {answer.state} with nobody"
            lateness = _lateness(answer, self._deadlines)
            self.fail(answer, culprit, answer.stage, reason=lateness, now=now)


def _lateness(answer: Answer, deadlines: Deadlines) -> str:
    """What did not happen in time."""
    if answer.held:
        return f"the token at position {len(answer.known)} was lost on its way"
    match answer.stage:
        case Stage.RESERVE:
            return f"no answer to Reserve within {deadlines.reserve_s:g} s"
        case Stage.PREFILL:
            return f"no first token within {deadlines.prefill_s:g} s"
        case Stage.TRANSFER:
            return f"first token, but none of decode within {deadlines.land_s:g} s"
        case _:
            return f"no token within {deadlines.progress_s:g} s"
