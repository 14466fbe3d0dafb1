"""The simulated cluster: processes, their network, their pools, clients, and what breaks."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace

from pd.runtime.config import RouterConfig, StepConfig
from pd.runtime.core import dispatch, settings
from pd.runtime.core.events import ROUTER, Drain, Emit, End, Event, HungUp, Peer, Received
from pd.runtime.core.instance import InstanceBrain
from pd.runtime.core.router import RouterBrain
from pd.runtime.core.settings import BrainSettings
from pd.runtime.wire.messages import Ahead, AnyMessage, Bye, Hello
from pd.runtime.wire.values import WIRE_VERSION, ModelCard
from pd.transfer.layout import KVLayout, Shard
from tests.cluster.clients import Clients
from tests.cluster.clock import Clock
from tests.cluster.leftovers import leftovers
from tests.cluster.model import VOCAB_SIZE
from tests.cluster.network import Network
from tests.cluster.ranks import Ranks
from tests.cluster.scenario import Ask, Blow, Instance, Odds, Profile, Scenario, Strike
from tests.cluster.shells import Shell
from tests.cluster.trace import Trace, Violation
from tests.cluster.writes import DataPlane

ROUTER_DEADLINES = dispatch.Deadlines(
    reserve_s=0.5,
    prefill_s=24.0,
    land_s=20.0,
    progress_s=20.0,
    gap_s=0.5,
    wanted_s=0.3,
    beat_timeout_s=0.7,
    dead_after_s=2.0,
)
"""Long where nobody may have to wait: PATIENCE_S in `clients` is shorter."""
INSTANCE_DEADLINES = settings.Deadlines(
    hello_s=0.3,
    beat_s=0.2,
    draining_s=1.0,
    stopping_s=1.0,
    fencing_s=2.5,
    heard_s=2.0,
    holding_s=1.2,
    lease_s=0.8,
    checking_s=0.6,
    remind_s=0.2,
    sever_again_s=0.4,
    vanished_s=1.0,
    attach_s=0.2,
    step_s=60.0,
    retry_after_s=0.2,
)
"""About a fifth of the real ones, in the same order of size, so that a run of many seconds is a short one."""
RESTART_S = 0.3
QUIET_S = 4.0
"""For everything to be given back, from the last answer on and from when all must have settled."""
LOOK_S = 0.1
"""Between two looks at what waits and whether all is quiet."""
SLOWNESS = 10.0


@dataclass(frozen=True, slots=True)
class Brains:
    """How brains are made: a planted fault is another one of these."""

    router: Callable[[RouterConfig, str, dispatch.Deadlines], RouterBrain] = lambda config, epoch, deadlines: (
        RouterBrain(config, epoch, deadlines=deadlines)
    )
    instance: Callable[[BrainSettings, Hello], InstanceBrain] = InstanceBrain


class World:
    def __init__(self, scenario: Scenario, *, brains: Brains, trace: Trace) -> None:
        self.scenario = scenario
        self.trace = trace
        self.clock = Clock()
        self.clients = Clients(self.clock, scenario)
        self.happened: Counter[str] = Counter()
        self._brains = brains
        self._rng = rng = random.Random(scenario.seed)
        self.network = Network(self.clock, rng, scenario.odds, trace=trace, deliver=self._deliver)
        self.plane = DataPlane(self.clock, rng, scenario.odds, can_sever=scenario.can_sever, find=self._ranks_of)
        self.shells: dict[str, Shell] = {}
        self._lives: dict[Peer, Ranks] = {}
        self._specs = {spec.name: spec for spec in scenario.instances}
        self._leaving = {ask.request_id: ask.leave_at_event for ask in scenario.asks if ask.leave_at_event}
        self._probes = list(scenario.probes)  # still to be answered, one after the other
        self._asked: Ask | None = None  # a probe
        self._num_probes = 0
        self._num_lives = 0
        self._paused_s = 0.0
        self.network.is_encoded = scenario.is_encoded
        self.network.happened = self.plane.happened = self.happened
        self.plane.is_cut = self.network.is_cut

    def run(self) -> None:
        """Everything from the first Hello to the last free page. Raises Violation."""
        self._start_router()
        for spec in self.scenario.instances:
            self.clock.at(spec.joins_at, self._start_instance, spec)
        for ask in self.scenario.asks:
            self.clock.at(ask.at, self._ask, ask)
            if ask.leave_at is not None:
                self.clock.at(ask.leave_at, self._leave, ask.request_id)
        for strike in self.scenario.strikes:
            self.clock.at(strike.at, self._strike, strike)
        self.clock.at(self.scenario.whole_at, self._make_whole)
        self._run_until_quiet()
        self.clients.check_final()
        self._check_quiet()

    def _run_until_quiet(self) -> None:
        ready_at = max(self.scenario.whole_at, *(ask.at for ask in self.scenario.asks))
        look_at, give_up_at = 0.0, max(self.scenario.settled_at, ready_at) + QUIET_S
        step, clock = self.clock.step, self.clock
        while step():
            now = clock.now
            if now < look_at:
                continue
            look_at = now + LOOK_S
            self.clients.check_time(self._paused_s)
            if now < ready_at or self.clients.num_open or not (self._is_quiet() or now > give_up_at):
                continue
            if not self._probe(now):
                return

    def _probe(self, now: float) -> bool:
        """All is quiet: see what became of the probe, and ask the next, or the same again. False: all are answered.

        Until all must have settled one may fail, as a request does while a cluster starts.
        """
        asked, self._asked = self._asked, None
        if asked is not None:
            if self.clients.has_finished(asked.request_id):
                del self._probes[0]
            elif asked.at >= self.scenario.settled_at:
                raise Violation(f"all is whole again, and {asked.request_id} is not answered")
        if not self._probes:
            return False
        if now >= self._probes[0].at:
            self._num_probes += 1
            self._asked = replace(self._probes[0], at=now, request_id=f"probe{self._num_probes}")
            self._ask(self._asked)
        return True

    def _is_quiet(self) -> bool:
        if self.plane.num_open():
            return False
        alive = [shell for shell in self.shells.values() if shell.is_alive]
        if any(shell.is_paused or (shell.ranks and shell.ranks.num_held) for shell in alive):
            return False
        return all(shell.brain.is_idle() for shell in alive)

    def _check_quiet(self) -> None:
        self._check_repeats(self.shells[ROUTER].repeats)
        if self.plane.num_open():
            raise Violation("writes are open after all is over")
        for shell in self.shells.values():
            if not shell.is_alive:
                continue
            if not shell.brain.is_idle():
                raise Violation(f"{shell.life} still holds something {QUIET_S:g} s after all is over")
            if shell.ranks is not None and shell.ranks.num_held > 0:
                raise Violation(f"the ranks of {shell.life} still hold something after all is over")
            if self.scenario.seed % 3 == 0 and (left := leftovers(shell.brain)):  # it takes as long as all checks
                raise Violation(f"{shell.life} keeps {left} after all is over")

    def _check_repeats(self, reasons: list[str]) -> None:
        """Where nothing fails, nothing is repeated but what gave its pages to an older request."""
        match self.scenario.profile:
            case Profile.CALM:
                odd = reasons
            case Profile.TIGHT:
                odd = [reason for reason in reasons if "preempted" not in reason]
            case _:
                return
        if odd:
            raise Violation(f"{len(odd)} attempts were repeated, though nothing failed: {odd[0]}")

    def _ask(self, ask: Ask) -> None:
        self.clients.ask(ask, self._hear_router if self.shells[ROUTER].is_alive else None)

    def _leave(self, request_id: str) -> None:
        router = self.shells[ROUTER]
        if router.is_paused:  # it stands still, and the client's connection with it
            self.clock.at(router.paused_until + 1e-6, self._leave, request_id)
        elif self.clients.leave(request_id, self._hear_router if router.is_alive else None):
            self.happened["client left"] += 1

    def _hear_router(self, event: Event) -> None:
        self.shells[ROUTER].hear(event)

    def _deliver(self, to: str, life: Peer | None, sender: Peer, message: AnyMessage) -> None:
        shell = self.shells.get(to)
        if shell is None or not shell.is_alive:
            return
        if life is not None and life != shell.life:
            return
        if life is None and sender.name != ROUTER and (ranks := self._lives.get(sender)) and not ranks.is_alive:
            self.happened["word of the dead"] += 1
        self.happened["read ahead"] += isinstance(message, Ahead)
        shell.hear(Received(sender, message))
        if self._leaving and (handle := getattr(message, "handle", None)) is not None:
            self._count_down(handle.request_id)

    def _count_down(self, request_id: str) -> None:
        left = self._leaving.get(request_id)
        if left is None:
            return
        self._leaving[request_id] = left - 1
        if left == 1:
            del self._leaving[request_id]
            self._leave(request_id)

    def _post(self, sender: Peer, to: str, message: AnyMessage) -> None:
        shell = self.shells.get(to)
        life = shell.life if shell is not None and shell.is_alive else None
        named = Peer(ROUTER, "") if sender.name == ROUTER else sender
        self.network.send(named, to, message, life=life)

    def _tell(self, told: Emit | End) -> None:
        leaver = self.clients.tell(told)
        if leaver is not None:
            self.clock.after(0.0, self._leave, leaver)

    def _new_life(self, name: str) -> Peer:
        self._num_lives += 1
        if name in self.shells:
            self.happened["restart"] += 1
        return Peer(name, f"e{self._num_lives}")

    def _start_router(self) -> None:
        life = self._new_life(ROUTER)
        told = self.scenario
        config = RouterConfig(
            max_queue=64,
            queue_s=5.0,
            max_attempts=4,
            reserve=told.reserve,
            direction=told.direction,
            verify_kv=told.verifies,
        )
        shell = self._shell(life, self._brains.router(config, life.epoch, ROUTER_DEADLINES))
        shell.tell = self._tell
        shell.start(self._rng)

    def _start_instance(self, spec: Instance) -> None:
        whole = self.scenario
        if spec.joins_at > 0.2 and spec.name not in self.shells:
            self.happened["join under load"] += 1
        life = self._new_life(spec.name)
        brain_settings = BrainSettings(
            page_size=spec.page_size,
            num_pages=spec.num_pages,
            num_ranks=spec.num_ranks,
            step=StepConfig(max_running=spec.max_running, max_prefill_tokens=whole.max_prefill_tokens, max_waiting=64),
            max_model_len=whole.max_model_len,
            deadlines=INSTANCE_DEADLINES,
        )
        brain = self._brains.instance(brain_settings, hello(spec, life, whole))
        shell = self._shell(life, brain)
        shell.ranks = ranks = Ranks(
            spec,
            life,
            clock=self.clock,
            rng=self._rng,
            plane=self.plane,
            hear=shell.hear_rank,
            num_heads=whole.num_heads,
            streams=whole.streams,
            staging=whole.staging,
            misfit=whole.misfits.get(spec.name),
        )
        self._lives[life] = ranks
        ranks.happened = self.happened
        ranks.slowness = lambda: SLOWNESS if self.network.is_slow(spec.name) else 1.0
        ranks.attach_error = lambda: self.plane.odds.attach_error
        shell.check = lambda: brain.check(ranks.reachable())
        ranks.fail = shell.end
        shell.on_exit = lambda: self._exit(shell, spec)
        shell.start(self._rng)

    def _exit(self, shell: Shell, spec: Instance) -> None:
        """It ends by itself, says so, and a supervisor starts it again."""
        self.happened["exit"] += 1
        self._post(shell.life, ROUTER, Bye("it ends", is_gone=True))
        self.clock.after(RESTART_S, self._start_instance, spec)

    def _shell(self, life: Peer, brain: RouterBrain | InstanceBrain) -> Shell:
        shell = Shell(life, brain, clock=self.clock, trace=self.trace, post=self._post)
        shell.clock_offset = self.scenario.clock_offsets.get(life.name, 0.0)
        shell.clock_rate = self.scenario.clock_rates.get(life.name, 1.0)
        shell.happened = self.happened
        self.shells[life.name] = shell
        self._say(life.name, f"starts as {life.epoch}")
        return shell

    def _ranks_of(self, life: Peer) -> Ranks:
        return self._lives[life]

    def _strike(self, strike: Strike) -> None:
        shell, until = self.shells.get(strike.target), self.clock.now + strike.seconds
        if shell is None or not shell.is_alive:
            return
        self._say(strike.target, f"{strike.blow.value} {strike}")
        match strike.blow:
            case Blow.STALL:
                self.happened["stall"] += 1
                shell.pause(until)
                if strike.target == ROUTER:
                    self._paused_s += strike.seconds
            case Blow.SLOW:
                self.happened["slow peer"] += 1
                self.network.slow_down(strike.target, until)
            case Blow.PART:
                self.happened["partition"] += 1
                others = [strike.other] if strike.other else [n for n in self.shells if n != strike.target]
                for other in others:
                    self.network.cut(strike.target, other, until)
                if ROUTER in others and self._rng.random() < 0.3:
                    self._hang_up(shell.life)
            case Blow.DRAIN:
                self.happened["drain under load" if self.clients.num_open else "drain"] += 1
                shell.hear(Drain("asked to"))
            case Blow.KILL if strike.event is not None:
                shell.doom(strike.event, strike.effect, lambda: self._fall(shell, strike, "kill at an event"))
            case Blow.KILL:
                self._kill(shell, strike, patience_s=0.5 if strike.is_cunning else 0.0)

    def _kill(self, shell: Shell, strike: Strike, *, patience_s: float) -> None:
        if not shell.is_alive:
            return
        is_moving = shell.ranks is not None and self.plane.is_moving(shell.ranks)
        if patience_s > 0.0 and not is_moving:
            self.clock.after(0.002, lambda: self._kill(shell, strike, patience_s=patience_s - 0.002))
            return
        self._fall(shell, strike, "kill under a write" if is_moving else "kill")

    def _fall(self, shell: Shell, strike: Strike, how: str) -> None:
        if self.clock.now >= self.scenario.whole_at:
            return  # too late: all is to be whole
        name = shell.life.name
        self.happened[how] += 1
        self._say(name, "dies")
        shell.die()
        if name == ROUTER:
            self.happened["router lost"] += 1
            self.clients.lose_router()
        elif self._rng.random() < 0.5:  # else its host went, too, and no connection is closed
            self._hang_up(shell.life)
        if strike.is_for_good:
            self.happened["death for good"] += 1
        elif math.isfinite(strike.seconds):
            until = self.clock.now + strike.seconds
            if name == ROUTER:
                self.clock.at(until, self._start_router)
            else:
                self.clock.at(until, self._start_instance, self._specs[name])

    def _hang_up(self, life: Peer) -> None:
        """The router sees its connection closed."""
        self.happened["hung up"] += 1
        self.clock.after(self._rng.expovariate(50.0), self._hear_router, HungUp(life))

    def _make_whole(self) -> None:
        self._say("world", "nothing fails any more")
        self.network.odds = self.plane.odds = Odds()

    def _say(self, subject: str, what: str) -> None:
        if self.trace.is_kept:
            self.trace.add(self.clock.now, subject, f"══ {what}")


def hello(spec: Instance, life: Peer, whole: Scenario) -> Hello:
    share = whole.num_heads // spec.num_ranks
    return Hello(
        worker=life.name,
        role=spec.role,
        epoch=life.epoch,
        wire_version=WIRE_VERSION,
        model=ModelCard("chain", "c0ffee", VOCAB_SIZE, whole.max_model_len),
        layout=KVLayout(1, whole.num_heads, 1, spec.page_size, "float32"),
        shards=tuple(Shard(0, 1, rank * share, (rank + 1) * share, spec.num_pages) for rank in range(spec.num_ranks)),
        transfer="memory",
        endpoints=(b"",) * spec.num_ranks,
        peer_address="",
        max_running=spec.max_running,
    )
