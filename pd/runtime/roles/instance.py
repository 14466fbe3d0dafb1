"""A leader's process: the brain of a prefill, decode or colocated instance, and the loop that performs its effects.

Imports no torch. One thread; nothing in the loop blocks longer than a tick.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import assert_never

import zmq

from pd.runtime.checkpoint import resolve, served_name
from pd.runtime.config import ConfigError, InstanceConfig
from pd.runtime.core.events import (
    ROUTER,
    Drain,
    Effect,
    Emit,
    End,
    Event,
    Exit,
    Launch,
    Order,
    Peer,
    Received,
    Send,
    Stamp,
    Tick,
)
from pd.runtime.core.instance import BrainSettings, InstanceBrain
from pd.runtime.engine.spec import read_spec
from pd.runtime.keys import read_cluster_key
from pd.runtime.observe import log_stamp
from pd.runtime.roles.process import StopSignals, new_epoch, reachable_host, setup_logging
from pd.runtime.roles.ranks import Ranks, RanksLost, raise_if_failed
from pd.runtime.wire.link import Hub, LinkError, Spoke
from pd.runtime.wire.lock import Lock
from pd.runtime.wire.messages import AnyMessage, Bye, Hello, Peers
from pd.runtime.wire.plans import Pong, RankFailed, RankReady
from pd.runtime.wire.values import WIRE_VERSION, Role
from pd.runtime.wire.watch import Complaints

log = logging.getLogger("pd.instance")

_TICK_MS = 50
_TRANSFER = {"auto": "auto, which is shm to peers on this host and tcp to others"}
_MAX_EVENTS_A_TURN = 512
"""Messages read before deadlines are looked at again."""
_LOOK_S = 1.0
"""Between two looks at connections that failed."""


class Leader:
    """Sockets around a brain. `run` ends with the process's exit status."""

    def __init__(self, lock: Lock, config: InstanceConfig, *, ranks: Ranks, hub: Hub, hello: Hello) -> None:
        self._lock = lock
        self._config = config
        self._ranks = ranks
        self._hub = hub
        self._me = Peer(hello.worker, hello.epoch)
        self._brain = InstanceBrain(_settings(config, hello), hello)
        self._router = self._spoke(config.link.router, Peer(ROUTER, ""), queue=False)
        self._peers: dict[Peer, Spoke] = {}
        self._complaints = Complaints(log)
        self._look_at = 0.0
        self._exit: Exit | None = None

    def run(self, stop: StopSignals) -> int:
        """Serve until drained, refused or told to stop. Raises RanksLost, and ConfigError if the router refuses us."""
        poller = zmq.Poller()
        for socket in (self._ranks.hub.socket, self._router.socket, self._hub.socket):
            poller.register(socket, zmq.POLLIN)
        stopping: float | None = None
        while self._exit is None:
            poller.poll(_TICK_MS)
            for event in self._events():
                self._give(event)
            now = time.monotonic()
            self._ranks.check(now)
            self._look(now)
            if stop.num_seen and stopping is None:
                stopping = now
                self._give(Drain("told to stop"))
            if stopping is not None and (stop.num_seen > 1 or now > stopping + self._config.drain_s):
                log.info("stopping with requests still running; the router starts them again elsewhere")
                return 0
        if self._exit.refused:
            same = "give both sides the same model and revision, dtype, --transfer and KV settings"
            raise ConfigError(self._exit.reason, hint=same)
        log.log(logging.ERROR if self._exit.failed else logging.INFO, "ending: %s", self._exit.reason)
        return 1 if self._exit.failed else 0

    def close(self, reason: str) -> None:
        """Say that this life is over; call it when the ranks have ended."""
        self._router.send(Bye(reason, is_gone=True))
        for spoke in (self._router, *self._peers.values()):
            spoke.close()

    def _events(self) -> Iterator[Event]:
        """What has arrived, a bounded number, then one Tick."""
        links: tuple[Hub | Spoke, ...] = (self._ranks.hub, self._router, self._hub)
        for link in links:
            for _ in range(_MAX_EVENTS_A_TURN):
                received = link.receive()
                if received is None:
                    break
                if link is self._ranks.hub:
                    self._ranks.heard(received.sender, time.monotonic())
                    if isinstance(received.message, Pong):
                        continue
                if link is self._hub and not is_peer(received.sender):
                    link.num_dropped += 1
                    continue
                yield received
        yield Tick()

    def _look(self, now: float) -> None:
        """Tell of connections that did not come about."""
        if now < self._look_at:
            return
        self._look_at = now + _LOOK_S
        links: tuple[Hub | Spoke, ...] = (self._router, self._hub, *self._peers.values())
        for link in links:
            self._complaints.say(link.refused(), now)

    def _give(self, event: Event) -> None:
        if isinstance(event, Received):
            match event.message:
                case Peers(peers=peers):
                    self._follow(peers)
                case RankFailed() as message:
                    raise_if_failed(message)
                case _:
                    pass
        for effect in self._brain.on(event, time.monotonic()):
            self._perform(effect)

    def _perform(self, effect: Effect) -> None:
        match effect:
            case Send(to=to, message=message):
                self._send(to, message)
            case Launch(plan=plan):
                self._ranks.broadcast(plan)
            case Order(message=message):
                self._ranks.broadcast(message)
            case Stamp(what="unwelcome"):
                log.warning(
                    "no router answers at %s: start one (pd launch --role router) or check --router; trying on",
                    self._config.link.router,
                )
            case Stamp():
                log_stamp(log, effect, me=self._me.name)
                if effect.what == "unreachable":
                    log.info("hint: pd doctor --only transfer; of two hosts: pd doctor --serve there, --peer HOST here")
            case Exit():
                self._exit = effect
            case Emit() | End():
                raise AssertionError(f"an instance has no client to tell: {effect}")
            case _:
                assert_never(effect)

    def _send(self, to: str, message: AnyMessage) -> None:
        if to == ROUTER:
            self._router.send(message)
            return
        for peer, spoke in self._peers.items():
            if peer.name == to:
                spoke.send(message)

    def _follow(self, peers: tuple[Hello, ...]) -> None:
        """Hold one Spoke to each living peer, and none to others."""
        living = {Peer(hello.worker, hello.epoch): hello.peer_address for hello in peers}
        for gone in self._peers.keys() - living.keys():
            self._peers.pop(gone).close()
        for peer in living.keys() - self._peers.keys():
            self._peers[peer] = self._spoke(living[peer], peer, queue=True)

    def _spoke(self, address: str, hub: Peer, *, queue: bool) -> Spoke:
        return Spoke(self._lock.context, address, me=self._me, hub=hub, queue=queue, lock=self._lock)


def is_peer(sender: Peer) -> bool:
    """Whether a sender on the hub for peers may be heard: it must not call itself the router, nor one of our ranks."""
    return sender.name != ROUTER and sender.epoch != ""


def run(config: InstanceConfig) -> int:
    """The process body. Raises ConfigError for what a person can mend."""
    setup_logging(config.name, says=config.log)
    stop = StopSignals()
    if config.device.cores:
        os.sched_setaffinity(0, config.device.cores)
    checkpoint = resolve(config.model.model)
    _check_tp(config, checkpoint)
    config = replace(config, model=replace(config.model, served_name=_served_name(config)))
    epoch = new_epoch()
    key = read_cluster_key(config.link.cluster_key)
    with zmq.Context[zmq.Socket[bytes]]() as context, Lock(context, key) as lock:
        hub = _bind(lock, config)
        log.info("starting %s, tp=%d, model %s", config.role.value, config.device.tp, checkpoint)
        try:
            return _lead(lock, config, epoch=epoch, checkpoint=checkpoint, hub=hub, stop=stop)
        finally:
            hub.close()


def _lead(
    lock: Lock,
    config: InstanceConfig,
    *,
    epoch: str,
    checkpoint: Path,
    hub: Hub,
    stop: StopSignals,
) -> int:
    """Start ranks, serve, end ranks, and only then say Bye: from there on nothing of this life writes anywhere."""
    leader: Leader | None = None
    reason = "told to stop"
    try:
        with Ranks(lock.context, config, epoch=epoch, checkpoint=checkpoint) as ranks:
            ready = ranks.wait_ready(stop)
            if ready is None:
                return 0
            leader = Leader(lock, config, ranks=ranks, hub=hub, hello=_hello(config, ready, epoch=epoch, hub=hub))
            _say_ready(config, ready, checkpoint)
            return leader.run(stop)
    except RanksLost as error:
        reason = str(error)
        log.error("error: %s; the instance ends with it", error)
        return 1
    finally:
        if leader is not None:
            leader.close(reason)


def _check_tp(config: InstanceConfig, checkpoint: Path) -> None:
    """Before any rank is born: each would read weights only to say the same."""
    num_query_heads = read_spec(checkpoint).num_query_heads
    if config.device.tp > num_query_heads:
        raise ConfigError(
            f"tp is {config.device.tp}, the model has {num_query_heads} query heads",
            hint=f"tp may be 1 to {num_query_heads}",
        )


def _served_name(config: InstanceConfig) -> str:
    return config.model.served_name or served_name(config.model.model)


def _bind(lock: Lock, config: InstanceConfig) -> Hub:
    port = config.link.port or "*"
    try:
        return Hub(lock.context, f"tcp://{config.link.host}:{port}", lock=lock)
    except LinkError as error:
        raise ConfigError(str(error), hint="choose another --port, or leave it out to take a free one") from error


def _hello(config: InstanceConfig, ready: tuple[RankReady, ...], *, epoch: str, hub: Hub) -> Hello:
    port = hub.address.rsplit(":", 1)[1]
    host = reachable_host(config.link.host, config.link.router)
    return Hello(
        worker=config.name,
        role=config.role,
        epoch=epoch,
        wire_version=WIRE_VERSION,
        model=ready[0].model,
        layout=ready[0].layout,
        shards=tuple(answer.shard for answer in ready),
        transfer=ready[0].transfer,
        endpoints=tuple(answer.endpoint for answer in ready),
        peer_address="" if config.role is Role.COLOCATED else f"tcp://{host}:{port}",
        max_running=config.step.max_running,
        operators=ready[0].operators,
        converts=config.link.move != "direct",
    )


def _settings(config: InstanceConfig, hello: Hello) -> BrainSettings:
    return BrainSettings(
        page_size=hello.layout.page_size,
        num_pages=min(shard.num_pages for shard in hello.shards),
        num_ranks=len(hello.shards),
        step=config.step,
        max_model_len=hello.model.max_model_len,
        prefix_cache=config.kv.prefix_cache,
        stream_layers=config.link.stream_layers,
    )


def _say_ready(config: InstanceConfig, ready: tuple[RankReady, ...], checkpoint: Path) -> None:
    first = ready[0]
    num_pages = min(answer.shard.num_pages for answer in ready)
    num_tokens = num_pages * first.layout.page_size
    limit = first.model.max_model_len
    log.info(
        "ready: %s of %s, tp=%d, %s; KV %d pages of %d tokens (%d tokens); requests of up to %d tokens%s; transfer %s",
        config.role.value,
        first.model.name or checkpoint.name,
        len(ready),
        first.note,
        num_pages,
        first.layout.page_size,
        num_tokens,
        limit,
        ", all that the pool holds (--num-pages, --kv-memory)" if limit == num_tokens else "",
        _TRANSFER.get(first.transfer, first.transfer),
    )
