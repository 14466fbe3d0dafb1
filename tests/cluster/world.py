"""The simulated cluster: processes, their network, their pools, clients, and what breaks."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from pd.runtime.config import RouterConfig, StepConfig
from pd.runtime.core import dispatch, settings
from pd.runtime.core.events import ROUTER, Drain, Emit, End, Event, Peer, Received
from pd.runtime.core.instance import InstanceBrain
from pd.runtime.core.router import RouterBrain
from pd.runtime.core.settings import BrainSettings
from pd.runtime.wire.messages import WIRE_VERSION, AnyMessage, Hello, ModelCard
from pd.transfer.layout import KVLayout, Shard
from tests.cluster.clients import Clients
from tests.cluster.clock import Clock
from tests.cluster.model import NUM_HEADS, VOCAB_SIZE
from tests.cluster.network import Network
from tests.cluster.ranks import Ranks
from tests.cluster.scenario import MAX_MODEL_LEN, Ask, Blow, Instance, Odds, Profile, Scenario, Strike
from tests.cluster.shells import Shell
from tests.cluster.trace import Trace, Violation
from tests.cluster.writes import DataPlane

ROUTER_DEADLINES = dispatch.Deadlines(
    reserve_s=0.5, prefill_s=4.0, land_s=3.0, progress_s=3.0, gap_s=0.5, beat_timeout_s=0.7, dead_after_s=2.0
)
INSTANCE_DEADLINES = settings.Deadlines(
    hello_s=0.3,
    beat_s=0.2,
    draining_s=1.0,
    stopping_s=1.0,
    fencing_s=2.5,
    remind_s=0.2,
    vanished_s=1.0,
    attach_s=0.2,
    step_s=60.0,
    retry_after_s=0.2,
)
"""About a fifth of the real ones, in the same order of size, so that a run of many seconds is a short one."""
RESTART_S = 0.3
QUIET_S = 40.0
"""After the last question, for everything to end and be given back."""


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
        self.clients = Clients(self.clock, scenario.profile, scenario.instances)
        self._brains = brains
        self._rng = random.Random(f"world {scenario.seed}")
        self._network = Network(self.clock, self._rng, scenario.odds, trace=trace, deliver=self._deliver)
        self._plane = DataPlane(self.clock, self._rng, scenario.odds, can_sever=scenario.can_sever, find=self._ranks_of)
        self._shells: dict[str, Shell] = {}
        self._lives: dict[Peer, Ranks] = {}
        self._num_lives = 0
        self._paused_s = 0.0

    def run(self) -> None:
        """Everything from the first Hello to the last free page. Raises Violation."""
        self._start_router()
        for spec in self.scenario.instances:
            self.clock.after(self._rng.uniform(0.0, 0.4), partial(self._start_instance, spec))
        for ask in self.scenario.asks:
            self.clock.at(ask.at, partial(self._ask, ask))
            if ask.leave_at is not None:
                self.clock.at(ask.leave_at, partial(self._leave, ask.request_id))
        for strike in self.scenario.strikes:
            self.clock.at(strike.at, partial(self._strike, strike))
        self.clock.at(self.scenario.whole_at, self._make_whole)
        self._run_until_quiet(self.scenario.asks[-1].at)
        self.clients.check_final()
        self._check_quiet()

    def _run_until_quiet(self, asked_until: float) -> None:
        check_at = 0.0
        while self.clock.step():
            now = self.clock.now
            if now < check_at:
                continue
            check_at = now + 0.1
            self.clients.check_time(self._paused_s)
            if now > asked_until and not self.clients.num_open and (self._is_quiet() or now > asked_until + QUIET_S):
                return

    def _is_quiet(self) -> bool:
        return not self._plane.num_open() and all(shell.brain.is_idle() for shell in self._shells.values())

    def _check_quiet(self) -> None:
        repeated = self._shells[ROUTER].stamps["repeated"]
        if repeated and self.scenario.profile is Profile.CALM:
            raise Violation(f"{repeated} attempts were repeated, though nothing is wrong")
        for shell in self._shells.values():
            if not shell.brain.is_idle():
                raise Violation(f"{shell.life} still holds something {QUIET_S:g} s after all is over")
        if self._plane.num_open():
            raise Violation("writes are open after all is over")

    def _ask(self, ask: Ask) -> None:
        self.clients.ask(ask, self._hear_router if self._shells[ROUTER].is_alive else None)

    def _leave(self, request_id: str) -> None:
        router = self._shells[ROUTER]
        if router.is_paused:  # it stands still, and the client's connection with it
            self.clock.at(router.paused_until + 1e-6, partial(self._leave, request_id))
        else:
            self.clients.leave(request_id, self._hear_router if router.is_alive else None)

    def _hear_router(self, event: Event) -> None:
        self._shells[ROUTER].hear(event)

    def _deliver(self, to: str, life: Peer | None, sender: Peer, message: AnyMessage) -> None:
        shell = self._shells.get(to)
        if shell is not None and shell.is_alive and life in (None, shell.life):
            shell.hear(Received(sender, message))

    def _post(self, sender: Peer, to: str, message: AnyMessage) -> None:
        shell = self._shells.get(to)
        life = shell.life if shell is not None and shell.is_alive else None
        named = Peer(ROUTER, "") if sender.name == ROUTER else sender
        self._network.send(named, to, message, life=life)

    def _tell(self, told: Emit | End) -> None:
        leaver = self.clients.tell(told)
        if leaver is not None:
            self.clock.after(0.0, partial(self._leave, leaver))

    def _new_life(self, name: str) -> Peer:
        self._num_lives += 1
        return Peer(name, f"e{self._num_lives}")

    def _start_router(self) -> None:
        life = self._new_life(ROUTER)
        config = RouterConfig(max_queue=64, queue_s=5.0, max_attempts=4)
        shell = self._shell(life, self._brains.router(config, life.epoch, ROUTER_DEADLINES))
        shell.tell = self._tell
        shell.start(self._rng)

    def _start_instance(self, spec: Instance) -> None:
        life = self._new_life(spec.name)
        brain_settings = BrainSettings(
            page_size=spec.page_size,
            num_pages=spec.num_pages,
            num_ranks=spec.num_ranks,
            step=StepConfig(max_running=spec.max_running, max_prefill_tokens=16, max_waiting=64),
            max_model_len=MAX_MODEL_LEN,
            deadlines=INSTANCE_DEADLINES,
        )
        shell = self._shell(life, self._brains.instance(brain_settings, hello(spec, life)))
        shell.ranks = self._lives[life] = Ranks(
            spec, life, clock=self.clock, rng=self._rng, plane=self._plane, hear=shell.hear_rank
        )
        shell.on_exit = lambda: self.clock.after(RESTART_S, partial(self._start_instance, spec))
        shell.start(self._rng)

    def _shell(self, life: Peer, brain: RouterBrain | InstanceBrain) -> Shell:
        shell = Shell(
            life,
            brain,
            clock=self.clock,
            trace=self.trace,
            clock_offset=self.scenario.clock_offsets[life.name],
            post=self._post,
        )
        self._shells[life.name] = shell
        self.trace.add(self.clock.now, life.name, lambda: f"══ starts as {life.epoch}")
        return shell

    def _ranks_of(self, life: Peer) -> Ranks:
        return self._lives[life]

    def _strike(self, strike: Strike) -> None:
        self.trace.add(self.clock.now, strike.target, lambda: f"══ {strike.blow.value} {strike}")
        shell, until = self._shells[strike.target], self.clock.now + strike.seconds
        match strike.blow:
            case Blow.STALL:
                shell.pause(until)
                if strike.target == ROUTER:
                    self._paused_s += strike.seconds
            case Blow.PART:
                others = [strike.other] if strike.other else [n for n in self._shells if n != strike.target]
                for other in others:
                    self._network.cut(strike.target, other, until)
            case Blow.DRAIN:
                shell.hear(Drain("asked to"))
            case Blow.KILL if shell.is_alive:
                self._kill(shell, strike, patience_s=0.5 if strike.is_cunning else 0.0)
            case Blow.KILL:
                pass

    def _kill(self, shell: Shell, strike: Strike, *, patience_s: float) -> None:
        if not shell.is_alive:
            return
        if patience_s > 0.0 and not (shell.ranks is not None and self._plane.is_moving(shell.ranks)):
            self.clock.after(0.002, partial(self._kill, shell, strike, patience_s=patience_s - 0.002))
            return
        until = self.clock.now + strike.seconds
        self.trace.add(self.clock.now, shell.life.name, lambda: "══ dies")
        shell.die()
        if shell.life.name == ROUTER:
            self.clients.lose_router()
            self.clock.at(until, self._start_router)
        else:
            [spec] = [spec for spec in self.scenario.instances if spec.name == shell.life.name]
            self.clock.at(until, partial(self._start_instance, spec))

    def _make_whole(self) -> None:
        self.trace.add(self.clock.now, "world", lambda: "══ nothing fails any more")
        self._network.odds = self._plane.odds = Odds()


def hello(spec: Instance, life: Peer) -> Hello:
    share = NUM_HEADS // spec.num_ranks
    return Hello(
        worker=life.name,
        role=spec.role,
        epoch=life.epoch,
        wire_version=WIRE_VERSION,
        model=ModelCard("chain", "c0ffee", VOCAB_SIZE, MAX_MODEL_LEN),
        layout=KVLayout(1, NUM_HEADS, 1, spec.page_size, "float32"),
        shards=tuple(Shard(0, 1, rank * share, (rank + 1) * share, spec.num_pages) for rank in range(spec.num_ranks)),
        transfer="memory",
        endpoints=(b"",) * spec.num_ranks,
        peer_address="",
        max_running=spec.max_running,
    )
