"""A rank's process: one thread computes steps, one talks to the leader and moves KV.

    leader ──ZMQ──► io thread ──plans──► compute (main) thread
                      │   ◄──StepDone, writes──┘
                      └──► Mover ──► Transport ──► the peer's pool

Two threads, because a chunk of prefill may take a second, and the end of another request's transfer must not wait.
Run by the leader as `python -m pd.runtime.roles.rank`, once for all its ranks: brood.py forks them.
"""

from __future__ import annotations

import gc

if __name__ == "__main__":
    gc.disable()  # while all is imported: looking for garbage in what torch makes is a quarter of a rank's start

import logging
import os
import queue
import sys
import threading
import time
from collections import deque
from typing import NamedTuple

import torch
import zmq

from pd.runtime.config import ConfigError, LinkConfig, RankConfig
from pd.runtime.core.events import Peer
from pd.runtime.engine.build import Engine, build
from pd.runtime.engine.device import device_of, enter
from pd.runtime.engine.kv_pool import staging_base
from pd.runtime.engine.room import out_of_memory
from pd.runtime.engine.runner import Launched
from pd.runtime.keys import derived, read_cluster_key
from pd.runtime.roles.brood import be_born
from pd.runtime.roles.checking import Checker
from pd.runtime.roles.mover import Mover, rank_name
from pd.runtime.roles.packing import Packer
from pd.runtime.roles.process import reachable_host, setup_logging
from pd.runtime.roles.streaming import Arrivals, Grouped, Streamer, layer_groups
from pd.runtime.wire.link import Spoke
from pd.runtime.wire.plans import (
    Attach,
    Digest,
    FromRank,
    Group,
    Ping,
    Pong,
    Quit,
    RankFailed,
    RankLoading,
    RankReady,
    Sever,
    StepDone,
    StepPlan,
    Transfer,
    WriteJob,
)
from pd.transfer.choose import make_transport
from pd.transfer.layout import Shard
from pd.transfer.paced import Paced
from pd.transfer.packed import End
from pd.transfer.staging import STAGING_NBYTES
from pd.transfer.transport import TransferError, Transport

log = logging.getLogger("pd.rank")

LEADER = Peer("leader", "")
_POLL_MS = 1000
_LOOK_MS = 1
"""While layers on a GPU are waited for."""


MAX_QUEUED = 1
"""Steps on the device behind the one that runs: a leader sends no more than two plans ahead."""
_LOOK_S = 2e-4
"""Between two looks whether a step on a GPU is done, while the next one's plan is not there yet. Each costs some
microseconds, and a step milliseconds."""


class Running(NamedTuple):
    plan: StepPlan
    launched: Launched
    start: float
    writes: tuple[WriteJob, ...]  # to begin when it is done


Item = FromRank | WriteJob | Grouped


class Outbox:
    """From the compute thread to the io thread: a deque and the eventfd that wakes its reader."""

    def __init__(self) -> None:
        self.wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._items: deque[Item] = deque()

    def put(self, *items: Item) -> None:
        self._items.extend(items)
        self.wake()

    def wake(self) -> None:
        os.eventfd_write(self.wake_fd, 1)

    def drain(self) -> list[Item]:
        try:
            os.eventfd_read(self.wake_fd)
        except BlockingIOError:
            return []
        items: list[Item] = []
        while self._items:
            items.append(self._items.popleft())
        return items


class RankIO:
    """The io thread: owns the leader's link and, once the group is known, the Mover."""

    def __init__(
        self, link: Spoke, transport: Transport, *, outbox: Outbox, rank: int, how: LinkConfig, device: torch.device
    ) -> None:
        self.plans: queue.SimpleQueue[StepPlan | None] = queue.SimpleQueue()  # None: quit
        self._link = link
        self._transport = transport
        self._outbox = outbox
        self._rank = rank
        self._how = how
        self._arrivals = Arrivals()
        self._device = device
        self._engine: Engine | None = None
        self._mover: Mover | None = None
        self._running = True

    def run(self) -> None:
        enter(self._device)
        poller = zmq.Poller()
        for source in (self._link.socket, self._outbox.wake_fd, self._transport.wake_fd):
            poller.register(source, zmq.POLLIN)
        try:
            while self._running:
                poller.poll(self._patience_ms())
                self._turn()
        finally:
            self.plans.put(None)

    def ready(self, engine: Engine) -> None:
        """Called by the compute thread before it announces itself; the io thread reads it only after."""
        self._engine = engine

    def stop(self) -> None:
        self._running = False
        self._outbox.wake()

    def _patience_ms(self) -> int:
        if self._mover is not None and self._mover.is_busy:
            return 0
        return _LOOK_MS if self._arrivals.is_waiting else _POLL_MS

    def _turn(self) -> None:
        for item in self._outbox.drain():
            match item:
                case WriteJob():
                    self._answer(self._need_mover().start(item))
                case Grouped():
                    self._arrivals.add(item)
                case _:
                    self._link.send(item)
        for jobs, group, _ in self._arrivals.take():
            for job in jobs:
                self._answer(self._need_mover().stream(job, group))
        while received := self._link.receive():
            match received.message:
                case StepPlan() as plan:
                    self.plans.put(plan)
                case Group(shards=shards):
                    assert self._engine is not None, "the leader sends Group only after RankReady"
                    self._mover = make_mover(self._rank, self._engine, shards, self._transport, how=self._how)
                case Attach() as order:
                    self._answer(self._need_mover().attach(order))
                case Sever() as order:
                    self._answer(self._need_mover().sever(order))
                case Transfer(jobs=jobs, is_read=is_read):
                    for job in jobs:
                        self._answer(self._need_mover().start(job, is_read=is_read))
                case Digest() as order:
                    self._answer(self._need_mover().digest(order))
                case Ping():
                    self._answer([Pong()])
                case Quit():
                    self._running = False
                case message:
                    log.warning("rank %d got %s, which is not for ranks", self._rank, type(message).__name__)
        if self._mover:
            self._answer(self._mover.poll())

    def _need_mover(self) -> Mover:
        assert self._mover is not None, "the leader sends Group before anything that moves KV"
        return self._mover

    def _answer(self, messages: list[FromRank]) -> None:
        for message in messages:
            self._link.send(message)


def make_mover(rank: int, engine: Engine, shards: tuple[Shard, ...], transport: Transport, *, how: LinkConfig) -> Mover:
    """With staging, where the region has room for it behind the pool."""
    base = staging_base(engine.layout, engine.shard)
    has_staging = len(engine.region) >= base + STAGING_NBYTES
    packer = Packer(transport, engine.region, base, engine.reshard) if has_staging else None
    checker = Checker(engine.region, End(engine.layout, engine.shard))
    return Mover(rank, engine.layout, shards, transport, packer, how.move, checker, how.stream_layers)


def compute(
    engine: Engine, plans: queue.SimpleQueue[StepPlan | None], outbox: Outbox, *, stream_layers: int | None
) -> None:
    """Run plans in order until None. A step's writes start when its KV is in the pool, or that of `stream_layers`.

    On a GPU step n + 1 is queued as soon as its plan comes, while n runs, so that the device never waits for the host:

        plan n, launch n ────── plan n + 1, launch n + 1 ────── n is done, StepDone n ────── plan n + 2 …
    """
    running: deque[Running] = deque()
    end = 0.0
    groups = layer_groups(range(len(engine.shard.layers)), stream_layers)
    streamer = Streamer(engine, groups, outbox.put, engine.region.device)
    while True:
        try:
            plan = plans.get(timeout=_LOOK_S if running else None)
        except queue.Empty:
            pass  # then only what runs is looked at
        else:
            if plan is None:
                return
            start = time.perf_counter()
            if plan.writes and groups:
                running.append(Running(plan, streamer.launch(plan), start, ()))
            else:
                running.append(Running(plan, engine.launch(plan), start, plan.writes))
        while running and (len(running) > MAX_QUEUED or running[0].launched.is_done()):
            step = running.popleft()
            tokens = step.launched.finish()
            begin, end = max(step.start, end), time.perf_counter()
            outbox.put(StepDone(step.plan.step, tokens, end - begin), *step.writes)


def serve(config: RankConfig, link: Spoke, outbox: Outbox) -> None:
    """Build the engine, announce it, and run until told to quit. Raises ConfigError and TransferError before that."""
    instance = config.instance
    device = device_of(instance.device.device, config.rank)
    enter(device)  # before the transport: libraries look for the GPU that is current when they start
    transport = Paced(_transport(config))
    io = RankIO(link, transport, outbox=outbox, rank=config.rank, how=instance.link, device=device)
    thread = threading.Thread(target=io.run, name="io", daemon=True)
    thread.start()
    try:
        engine = build(config, transport, lambda done, total: outbox.put(RankLoading(config.rank, done, total)))
        io.ready(engine)
        outbox.put(
            RankReady(
                config.rank,
                engine.shard,
                engine.layout,
                transport.endpoint(),
                transport.name,
                engine.card,
                *engine.notes,
            )
        )
        compute(engine, io.plans, outbox, stream_layers=instance.link.stream_layers)
        engine.close()
    finally:
        io.stop()
        thread.join(timeout=2)
        transport.close()


def _transport(config: RankConfig) -> Transport:
    """Raises TransferError."""
    instance = config.instance
    key = read_cluster_key(instance.link.cluster_key)
    transport = make_transport(
        instance.link.transfer,
        me=rank_name(instance.name, config.epoch, config.rank),
        host=reachable_host(instance.link.host, instance.link.router),
        devices=instance.link.transfer_devices,
        params=dict(instance.link.transfer_params),
        key=None if key is None else derived(key, "pd-transfer"),
    )
    if key is not None and transport.name in ("nixl", "mooncake"):
        log.warning("%s cannot prove the cluster's key: KV moves unlocked, on a network that you trust", transport.name)
    return transport


def main(config: RankConfig) -> int:
    setup_logging(f"{config.instance.name}/{config.rank}")
    torch.set_num_threads(config.instance.device.threads or len(os.sched_getaffinity(0)))
    with zmq.Context[zmq.Socket[bytes]]() as context:
        link = Spoke(context, config.leader, me=Peer(str(config.rank), ""), hub=LEADER, queue=True)
        outbox = Outbox()
        try:
            serve(config, link, outbox)
        except ConfigError as error:
            link.send(RankFailed(config.rank, str(error), error.hint, True))
            return 2
        except TransferError as error:
            hint = error.hint or "pd doctor --only transfer,machine,rdma"
            link.send(RankFailed(config.rank, str(error), hint, True))
            return 2
        except torch.OutOfMemoryError as error:  # in a step
            fault = out_of_memory(error)
            log.error("%s\nhint: %s", fault, fault.hint)
            link.send(RankFailed(config.rank, f"{fault}; {fault.hint}", "", False))
            return 1
        except Exception as error:  # the outermost loop: the leader must hear a crash's last line
            log.exception("rank %d crashed", config.rank)
            link.send(RankFailed(config.rank, f"{type(error).__name__}: {error}", "", False))
            return 1
        finally:
            link.close()
    return 0


if __name__ == "__main__":
    gc.freeze()  # what is imported stays: no collection looks through it between two steps either
    gc.enable()
    status = main(be_born(int(sys.argv[1])))
    logging.shutdown()
    os._exit(status)  # everything of ours is closed; torch's own farewell takes over a second of CPU
