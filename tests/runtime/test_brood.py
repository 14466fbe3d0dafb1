"""Ranks are forked by one process, are their leader's children, and none is lost sight of: real processes, no torch."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

PATIENCE_S = 30.0
LEADER = """
import os, sys, time
from pd.runtime.config import InstanceConfig, RankConfig
from pd.runtime.roles.brood import Brood, Ended
from pd.runtime.wire.values import Role

program, folder, cores = sys.argv[1:]
instance = InstanceConfig(role=Role.COLOCATED, name="x")
born = {"epoch": "e", "leader": "", "rendezvous": "", "checkpoint": folder, "parent": os.getpid()}
first = RankConfig(rank=0, instance=instance, **born)
cores = [tuple(map(int, own.split(","))) for own in cores.split()]
brood = Brood(first, cores, command=(sys.executable, "-P", "-c", program), environment=os.environ)
for line in sys.stdin:
    word, seconds = line.split()
    began = time.monotonic()
    if word == "end":
        brood.end(began + float(seconds))
        print(time.monotonic() - began, flush=True)
        continue
    said = "all live"
    try:
        while time.monotonic() < began + float(seconds):
            brood.check()
            time.sleep(0.01)
    except Ended as ended:
        said = f"{ended.rank} ended with {ended.status}"
    print(said, flush=True)
"""
BORN = """
import os, sys, time
from pd.runtime.roles.brood import be_born

config = be_born(int(sys.argv[-1]))
mark = f"{config.checkpoint}/{config.rank}"
with open(mark + ".new", "w") as file:
    print(os.getpid(), os.getppid(), *sorted(os.sched_getaffinity(0)), file=file)
os.rename(file.name, mark)
"""
STAY = BORN + "time.sleep(600)\n"


class Leader:
    """A process that owns a brood of two and does as it is told."""

    def __init__(self, program: str, folder: Path) -> None:
        self._folder = folder
        allowed = sorted(os.sched_getaffinity(0))
        self.cores = [allowed[0]], allowed
        told = " ".join(",".join(map(str, own)) for own in self.cores)
        self.process = subprocess.Popen(
            [sys.executable, "-c", LEADER, program, str(folder), told],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def told(self, order: str) -> str:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(order + "\n")
        self.process.stdin.flush()
        return self.process.stdout.readline().strip()

    def ranks(self) -> list[list[int]]:
        """What each has written, once both have: its process id, its parent's, its cores."""
        deadline = time.monotonic() + PATIENCE_S
        while not all((self._folder / str(rank)).exists() for rank in range(2)):
            assert time.monotonic() < deadline and self.process.poll() is None
            time.sleep(0.01)
        return [[int(word) for word in (self._folder / str(rank)).read_text().split()] for rank in range(2)]


@pytest.fixture
def lead(tmp_path: Path) -> Iterator[Callable[[str], Leader]]:
    made: list[Leader] = []

    def make(program: str) -> Leader:
        made.append(Leader(program, tmp_path))
        return made[-1]

    yield make
    for leader in made:
        leader.process.kill()  # and its ranks with it
        leader.process.communicate()


def lives(pid: int) -> bool:
    """False also for a zombie: the init of a container may not reap an orphan that was killed."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_each_rank_is_the_leaders_child_on_its_own_cores_and_nothing_else_stays(lead: Callable[[str], Leader]) -> None:
    leader = lead(STAY)
    ranks = leader.ranks()
    assert leader.told("watch 0.1") == "all live"
    assert [parent for _, parent, *_ in ranks] == [leader.process.pid] * 2
    assert tuple(cores for _, _, *cores in ranks) == leader.cores
    children = psutil.Process(leader.process.pid).children(recursive=True)
    assert {child.pid for child in children} == {pid for pid, *_ in ranks}


@pytest.mark.parametrize(("how", "status"), [("sys.exit(3)", 3), ("os.kill(os.getpid(), 9)", -9)])
def test_the_rank_that_ends_is_named_with_its_status(lead: Callable[[str], Leader], how: str, status: int) -> None:
    leader = lead(BORN + f"if config.rank == 1: {how}\ntime.sleep(600)\n")
    assert leader.told(f"watch {PATIENCE_S}") == f"1 ended with {status}"


def test_a_leader_whose_parent_ignored_the_end_of_children_is_told_of_its_own(lead: Callable[[str], Leader]) -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # which a child inherits
    try:
        leader = lead(BORN + "time.sleep(600 * config.rank)\n")
    finally:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    assert leader.told(f"watch {PATIENCE_S}") == "0 ended with 0"
    assert 0.1 <= float(leader.told("end 0.1")) < PATIENCE_S


def test_what_cannot_be_imported_ends_all_before_a_rank_is_born(lead: Callable[[str], Leader]) -> None:
    assert lead("raise SystemExit(4)").told(f"watch {PATIENCE_S}") == "None ended with 4"


def test_who_leaves_by_itself_is_waited_for_and_who_does_not_is_ended(lead: Callable[[str], Leader]) -> None:
    leader = lead(BORN + "time.sleep(600 * config.rank)\n")
    pids = [pid for pid, *_ in leader.ranks()]
    assert 0.5 <= float(leader.told("end 0.5")) < PATIENCE_S
    assert not any(map(lives, pids))
    assert float(leader.told(f"end {PATIENCE_S}")) < PATIENCE_S, "there is nobody to wait for"


def test_while_all_is_imported_the_end_is_at_once(lead: Callable[[str], Leader]) -> None:
    leader = lead("import time; time.sleep(600)")
    assert float(leader.told(f"end {PATIENCE_S}")) < PATIENCE_S
    assert psutil.Process(leader.process.pid).children() == []


def test_ranks_end_with_their_leader(lead: Callable[[str], Leader]) -> None:
    leader = lead(STAY)
    pids = [pid for pid, *_ in leader.ranks()]
    leader.process.kill()
    leader.process.wait()
    deadline = time.monotonic() + PATIENCE_S
    while any(map(lives, pids)):
        assert time.monotonic() < deadline
        time.sleep(0.01)
