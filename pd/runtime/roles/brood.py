"""How an instance's ranks are born: one process imports for all of them, is forked into them, and ends.

    leader ──starts──► mother: imports torch ──forks──► rank 0, rank 1, …
       ▲                         └─ ends                      │
       └───────────── their parent from then on ──────────────┘    (PR_SET_CHILD_SUBREAPER)

Torch takes 2.2 s of CPU to import, and a rank some milliseconds to fork: of eight ranks seven need not import it, and
they share the memory of what was. The mother starts no thread, and asks no device anything: there is nothing that a
fork could break. Both halves, the leader's and the ranks'; imports no torch. Linux only.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import msgspec

from pd.runtime.config import RankConfig
from pd.runtime.roles.process import adopt_orphans, die_with

_LOOK_S = 0.005
"""Between two looks whether a process has ended."""


@dataclass(frozen=True, slots=True)
class _Births:
    """What the leader hands the mother, as JSON on standard input."""

    first: RankConfig
    """Rank 0's; the others' differ in their rank alone."""
    cores: tuple[tuple[int, ...], ...]
    """Of each rank."""


class Ended(Exception):
    """A process has ended, with a status as subprocess has it. `rank` is None: the mother has, by a fault."""

    def __init__(self, rank: int | None, status: int) -> None:
        super().__init__(rank, status)
        self.rank = rank
        self.status = status


class Brood:
    """The leader's half: owns the processes, and leaves none once `end` has been called."""

    def __init__(
        self,
        first: RankConfig,
        cores: Sequence[tuple[int, ...]],
        *,
        command: Sequence[str],
        environment: Mapping[str, str],
    ) -> None:
        """`command` runs the mother, which calls `be_born` with the number that is its last argument."""
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # ignored, as who starts us may have it, no status would be kept
        adopt_orphans()
        self._births, theirs = os.pipe()
        self._mother = subprocess.Popen(
            [*command, str(theirs)],
            stdin=subprocess.PIPE,
            pass_fds=(theirs,),
            preexec_fn=_leave_interrupts_to_us,
            env=environment,
        )
        os.close(theirs)
        os.sched_setaffinity(self._mother.pid, {core for own in cores for core in own})
        assert self._mother.stdin is not None
        self._mother.stdin.write(msgspec.json.encode(_Births(first, tuple(cores))))
        self._mother.stdin.close()
        self._living: dict[int, int] | None = None  # rank -> process id; None: not born yet

    def check(self) -> None:
        """Raises Ended of the first that is found to have ended."""
        if self._living is None:
            if (status := self._mother.poll()) is None:
                return
            self._living = self._born()
            if status != 0:
                raise Ended(None, status)
        for rank in tuple(self._living):
            if (status := self._status(rank)) is not None:
                raise Ended(rank, status)

    def end(self, deadline: float) -> None:
        """Wait for all to end by themselves until `deadline`, of time.monotonic(), then end them by SIGKILL."""
        if self._living is None:
            self._mother.kill()  # it imports: nothing is lost. Who is not told of yet, in mid-fork, ends with us
            self._mother.wait()
            self._living = self._born()
        while time.monotonic() < deadline and any(self._status(rank) is None for rank in tuple(self._living)):
            time.sleep(_LOOK_S)
        for pid in self._living.values():
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        self._living = {}

    def _born(self) -> dict[int, int]:
        """As the mother has told, which has ended: they are our children now."""
        with os.fdopen(self._births) as told:
            return dict(enumerate(map(int, told.read().split())))

    def _status(self, rank: int) -> int | None:
        """None while it lives. Asked no more once it has ended."""
        assert self._living is not None
        pid, status = os.waitpid(self._living[rank], os.WNOHANG)
        if pid == 0:
            return None
        del self._living[rank]
        return os.waitstatus_to_exitcode(status)


def be_born(births_fd: int) -> RankConfig:
    """The ranks' half, once all is imported: returns in each rank, and nowhere else."""
    births = msgspec.json.decode(sys.stdin.buffer.read(), type=_Births)
    leader, mother = births.first.parent, os.getpid()
    die_with(leader)
    for rank, cores in enumerate(births.cores):
        if (pid := os.fork()) == 0:
            os.close(births_fd)
            while os.getppid() == mother:
                time.sleep(_LOOK_S)
            die_with(leader)
            os.sched_setaffinity(0, cores)
            return replace(births.first, rank=rank)
        os.write(births_fd, f"{pid}\n".encode())
    os._exit(0)


def _leave_interrupts_to_us() -> None:
    """In the child: a Ctrl-C in the terminal reaches it too, and it may still be importing torch."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
