"""A leader's ranks: the link to them, and what they say until all are ready. Imports no torch."""

from __future__ import annotations

import logging
import os
import signal
import sys
import tempfile
import time
from pathlib import Path

import zmq

from pd.runtime.config import ConfigError, InstanceConfig, RankConfig
from pd.runtime.core.events import Peer
from pd.runtime.core.pulse import SILENT_S, Pulse
from pd.runtime.roles.brood import Brood, Ended
from pd.runtime.roles.process import StopSignals
from pd.runtime.wire.link import Hub
from pd.runtime.wire.messages import AnyMessage
from pd.runtime.wire.plans import Group, Ping, Quit, RankFailed, RankLoading, RankReady
from pd.transfer.layout import split

log = logging.getLogger("pd.ranks")

_QUIT_S = 1.5
"""From Quit to SIGKILL: a step of prefill may still be running."""
_PROGRESS_S = 2.0
_POLL_MS = 100
_LAST_WORDS_S = 1.0
"""For what an ended rank had said to come through, where others go on talking."""
_MAX_FOLDER_LENGTH = 80
"""A socket's path holds 107 characters on Linux, ours adds about 20."""
_ENVIRONMENT = {
    # Standard variables of the libraries below us; a user's own win. Measured on small CPU machines: waiting threads
    # that spin cost 40x when a neighbour runs, and unmapping large temporaries costs 4x in attention.
    "OMP_WAIT_POLICY": "PASSIVE",
    "MALLOC_MMAP_THRESHOLD_": str(4 << 30),
    "MALLOC_TRIM_THRESHOLD_": str(8 << 30),
    # numpy's: a rank multiplies no matrices by it, and it would start threads in the process that is forked.
    "OPENBLAS_NUM_THREADS": "1",
}
_PLACES = {"OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY", "KMP_AFFINITY"}
"""Read where torch is imported, which is once for all ranks; each has its own cores anyway."""


class RanksLost(Exception):
    """A rank ended or crashed. The instance ends with it; the supervisor starts it again."""


class Ranks:
    """The rank processes of one instance. A context manager: leaving it ends them all."""

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], config: InstanceConfig, *, epoch: str, checkpoint: Path
    ) -> None:
        folder = tempfile.gettempdir()
        is_long = len(folder) > _MAX_FOLDER_LENGTH
        self._folder = tempfile.TemporaryDirectory(prefix="pd-", dir="/tmp" if is_long else folder)  # mode 0700
        self.hub = Hub(context, f"ipc://{self._folder.name}/leader")
        self._peers = tuple(Peer(str(rank), "") for rank in range(config.device.tp))
        self._pulse = Pulse(config.device.tp, time.monotonic())
        self._brood = self._start(config, epoch, checkpoint)

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        self.broadcast(Quit())
        self._brood.end(time.monotonic() + _QUIT_S)
        self.hub.close()
        self._folder.cleanup()

    def broadcast(self, message: AnyMessage) -> None:
        self.hub.send(message, *self._peers)

    def heard(self, sender: Peer, now: float) -> None:
        """A rank has said something: it lives."""
        if sender.name.isdecimal():
            self._pulse.heard(int(sender.name), now)

    def check(self, now: float) -> None:
        """Raises RanksLost if a process has ended, or does not answer. Asks them for an answer now and then."""
        if self._pulse.is_due(now):
            self.broadcast(Ping())
        if (silent := self._pulse.silent(now)) is not None:
            raise RanksLost(f"rank {silent} has not answered for {SILENT_S:g} s: it is stopped, or its host is")
        self._check_ended()

    def _check_ended(self) -> None:
        try:
            self._brood.check()
        except Ended as ended:
            who = "the process that imports for all ranks" if ended.rank is None else f"rank {ended.rank}"
            raise RanksLost(f"{who} {_how_it_ended(ended.status)}") from None

    def wait_ready(self, stop: StopSignals) -> tuple[RankReady, ...] | None:
        """Wait until every rank has its weights and pool. None: told to stop. Raises ConfigError or RanksLost."""
        ready: dict[int, RankReady] = {}
        progress = _Progress(len(self._peers))
        while len(ready) < len(self._peers):
            if stop.num_seen:
                return None
            self._hear_loading(ready, progress)
            try:
                self._check_ended()
            except RanksLost:
                until = time.monotonic() + _LAST_WORDS_S
                while self._hear_loading(ready, progress) and time.monotonic() < until:
                    pass  # others spoke; its own last words, which say why, may be on their way
                raise
        self._pulse = Pulse(len(ready), time.monotonic())
        answers = tuple(ready[rank] for rank in range(len(ready)))
        self.broadcast(Group(tuple(answer.shard for answer in answers)))
        return answers

    def _hear_loading(self, ready: dict[int, RankReady], progress: _Progress) -> bool:
        """Wait a moment for what ranks say. Whether they did. Raises ConfigError or RanksLost if one says that it
        cannot start."""
        self.hub.socket.poll(_POLL_MS)
        has_heard = False
        while received := self.hub.receive():
            has_heard = True
            match received.message:
                case RankReady() as message:
                    ready[message.rank] = message
                case RankLoading() as message:
                    progress.add(message)
                case message:
                    raise_if_failed(message)
        return has_heard

    def _start(self, config: InstanceConfig, epoch: str, checkpoint: Path) -> Brood:
        cores = [rank_cores(config, rank) for rank in range(config.device.tp)]
        threads = config.device.threads or max(map(len, cores))  # a rank with fewer cores says so itself
        first = RankConfig(
            rank=0,
            instance=config,
            epoch=epoch,
            leader=self.hub.address,
            rendezvous=f"file://{self._folder.name}/rendezvous",
            checkpoint=str(checkpoint),
            parent=os.getpid(),
        )
        environment = _ENVIRONMENT | os.environ | {"OMP_NUM_THREADS": str(threads)}
        for name in _PLACES & environment.keys() if config.device.tp > 1 else ():
            log.warning(
                "%s=%s is left out: it would place every rank's threads on the cores of all", name, environment[name]
            )
            del environment[name]
        command = (sys.executable, "-P", "-m", "pd.runtime.roles.rank")
        return Brood(first, cores, command=command, environment=environment)


class _Progress:
    """Weights of all ranks, a line every two seconds while they load."""

    def __init__(self, num_ranks: int) -> None:
        self._latest: dict[int, RankLoading] = {}
        self._num_ranks = num_ranks
        self._said = time.monotonic()

    def add(self, message: RankLoading) -> None:
        self._latest[message.rank] = message
        if time.monotonic() - self._said < _PROGRESS_S or len(self._latest) < self._num_ranks:
            return  # shards differ in size: the sum is known when all have told theirs
        self._said = time.monotonic()
        done = sum(m.done_bytes for m in self._latest.values())
        total = sum(m.total_bytes for m in self._latest.values())
        log.info("loading weights: %d of %d MB (%.0f %%)", done >> 20, total >> 20, 100 * done / max(total, 1))


def raise_if_failed(message: AnyMessage) -> None:
    """Raises ConfigError for what a person can mend, RanksLost for a crash."""
    if isinstance(message, RankFailed):
        if message.mendable:
            raise ConfigError(message.error, hint=message.hint)
        raise RanksLost(f"rank {message.rank}: {message.error}")


def _how_it_ended(status: int) -> str:
    if status >= 0:
        return f"ended with status {status}"
    name = signal.Signals(-status).name
    return f"was ended by {name}" + (", perhaps for want of memory (see dmesg)" if name == "SIGKILL" else "")


def rank_cores(config: InstanceConfig, rank: int) -> tuple[int, ...]:
    """The CPU cores of one rank: its share of the instance's, or all of them where ranks outnumber cores."""
    cores = config.device.cores or tuple(sorted(os.sched_getaffinity(0)))
    if config.device.tp > len(cores):
        return cores
    share = split(len(cores), config.device.tp)[rank]
    return cores[share.start : share.stop]
