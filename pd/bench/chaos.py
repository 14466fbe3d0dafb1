"""`pd bench chaos`: a cluster under load whose instances are killed, paused and cut off; no client may notice.

Rules
1. One instance of each role is always left alone: what a cluster without any of a role answers is another question.
   There is one router only: what streams through it when it is killed is cut off, and not counted as failed.
2. Answers are compared, token for token, with those of the same cluster before the first fault.
3. The seed is told and taken back. It fixes which faults are tried in which order, not the machine's own time.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import secrets
import shlex
import signal
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
from rich.console import Console
from rich.table import Table

from pd.bench.chaos_cluster import Cluster, Member
from pd.bench.chaos_load import Load, Tally, asks, hear
from pd.bench.chaos_options import ChaosOptions
from pd.runtime.checkpoint import resolve, served_name
from pd.runtime.config import ConfigError

KINDS = ("kill", "rank", "pause", "link", "router")
_START_S = 300.0
_SETTLE_S = 90.0
"""After the last fault: for what was killed to be back, and every page to be free."""
_PATIENCE_S = 180.0
"""For a whole answer; longer is called hung."""
_LONGEST_PAUSE_S = 13.0
"""Beyond what the router waits before it gives an instance up for good (10 s)."""
_NUM_ASKS = 16
_MAX_TOKEN_ID = 250
"""Prompts are of token ids that every vocabulary has."""


@dataclass(slots=True)
class Result:
    seed: int
    tally: Tally
    faults: Counter[str] = field(default_factory=Counter)
    num_health: int = 0
    num_sick: int = 0
    """Looks at the router's /health, and those that were not 200."""
    unfree: list[str] = field(default_factory=list)
    """Instances that were not back with all their pages free at the end."""

    @property
    def is_good(self) -> bool:
        tally = self.tally
        bad = tally.num_wrong + tally.num_hung + tally.num_failed + self.num_sick + len(self.unfree)
        return bad == 0 and tally.num_done > 0


def chaos(options: ChaosOptions) -> int:
    """Run the command: 0 if nobody noticed, else 1. Raises ConfigError."""
    console = Console(highlight=False, markup=False, soft_wrap=True)
    with contextlib.ExitStack() as stack:
        logs = options.logs or stack.enter_context(tempfile.TemporaryDirectory(prefix="pd-chaos-"))
        result = asyncio.run(run_chaos(options, Path(logs), say=console.print))
    for part in _report(result):
        console.print(part)
    return 0 if result.is_good else 1


async def run_chaos(options: ChaosOptions, logs: Path, *, say: Callable[[str], object] = print) -> Result:
    """Start a cluster, learn the right answers, break it under load, and look what is left. Raises ConfigError."""
    kinds = _checked(options)
    seed = secrets.randbits(31) if options.seed is None else options.seed
    say(f"seed {seed}; output of the processes: {logs}")
    model, name = str(resolve(options.model)), served_name(options.model)
    logs.mkdir(parents=True, exist_ok=True)
    given = ("--served-name", name, *shlex.split(options.options or ""))
    cluster = Cluster(model, logs, given, tuple(shlex.split(options.router_options or "")))
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    try:
        await cluster.start(num_prefill=options.num_prefill, num_decode=options.num_decode)
        async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=None)) as session:
            run = _Run(cluster, session, options, seed=seed, kinds=kinds, say=say)
            return await run.go(name)
    finally:
        await cluster.close()


def _checked(options: ChaosOptions) -> tuple[str, ...]:
    kinds = tuple(filter(None, options.faults.split(",")))
    faults = [f"--faults names {kind!r}, must be of {', '.join(KINDS)}" for kind in kinds if kind not in KINDS]
    for option in ("num_prefill", "num_decode", "concurrency", "tokens"):
        if getattr(options, option) < 1:
            faults.append(f"--{option.replace('_', '-')} is {getattr(options, option)}, must be at least 1")
    if options.duration < 0 or options.every <= 0:
        faults.append("--duration and --every are seconds above 0")
    if faults:
        raise ConfigError(*faults, hint="pd bench chaos --help")
    return kinds


class _Run:
    def __init__(
        self,
        cluster: Cluster,
        session: aiohttp.ClientSession,
        options: ChaosOptions,
        *,
        seed: int,
        kinds: tuple[str, ...],
        say: Callable[[str], object],
    ) -> None:
        self._cluster = cluster
        self._session = session
        self._options = options
        self._kinds = kinds
        self._dice = random.Random(seed)
        self._say = say
        self._result = Result(seed, Tally())
        self._healing: set[asyncio.Task[None]] = set()
        self._load: Load | None = None

    async def go(self, model: str) -> Result:
        await self._until_whole(_START_S, "the cluster cannot serve")
        options, seed = self._options, self._result.seed
        bodies = [ask.body(model, options.tokens) for ask in asks(_MAX_TOKEN_ID, count=_NUM_ASKS, seed=seed)]
        load = self._load = Load(self._cluster.url, bodies, [], _PATIENCE_S, self._result.tally)
        for body in bodies:
            heard = await hear(self._session, self._cluster.url, body, patience_s=_PATIENCE_S)
            if heard.fault is not None:
                raise ConfigError(f"no answer before the first fault: {heard.fault}", hint="see the processes' output")
            load.references.append(heard.tokens)
        self._say(f"{len(bodies)} reference answers; {options.concurrency} requests at once for {options.duration:g} s")
        doctor = asyncio.create_task(self._watch_health())
        loading = asyncio.create_task(load.run(self._session, options.concurrency, seed=seed))
        await self._break_things()
        load.is_ending = True
        await loading
        await asyncio.gather(*self._healing)
        await self._look_at_pages()
        doctor.cancel()
        return self._result

    async def _break_things(self) -> None:
        loop = asyncio.get_running_loop()
        until = loop.time() + self._options.duration
        while loop.time() < until:
            await asyncio.sleep(min(self._options.every, max(0.0, until - loop.time())))
            state = await self._cluster.state(self._session)
            whole = {name for name, one in state.items() if one["standing"] == "alive"}
            choices = list(self._choices(whole))
            if choices and self._kinds and loop.time() < until:
                member, kind = self._dice.choice(choices), self._dice.choice(self._kinds)
                if kind == "router":
                    self._kill_router()
                else:
                    self._break(member, kind)

    def _choices(self, alive: set[str]) -> Iterator[Member]:
        """Instances beside whom another of their role is whole."""
        whole = [one for one in self._cluster.instances if one.name in alive and one.broken is None]
        for member in whole:
            if any(other.role == member.role and other is not member for other in whole):
                yield member

    def _break(self, member: Member, kind: str) -> None:
        seconds = self._dice.uniform(0.5, _LONGEST_PAUSE_S)
        ranks = member.ranks()
        if member.process is None or not ranks:
            return
        self._result.faults[kind] += 1
        if kind in ("kill", "rank"):
            pid = member.process.pid if kind == "kill" else self._dice.choice(ranks)
            self._say(f"{kind} -9 {member.name} ({pid})")
            os.kill(pid, signal.SIGKILL)
            return
        pids = self._dice.choice([[member.process.pid], ranks[:1], member.tree()]) if kind == "pause" else []
        self._say(f"{kind} {member.name} {pids or ''} for {seconds:.1f} s")
        member.broken = kind
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        if kind == "link" and member.wire is not None:
            member.wire.cut()
        task = asyncio.create_task(self._heal(member, pids, seconds))
        self._healing.add(task)

    def _kill_router(self) -> None:
        router, load = self._cluster.router, self._load
        if router.process is None or load is None or load.is_router_away:
            return
        self._result.faults["router"] += 1
        self._say(f"router -9 ({router.process.pid})")
        load.num_routers_lost += 1
        load.is_router_away = True
        router.process.kill()
        self._healing.add(asyncio.create_task(self._until_router_is_back(load)))

    async def _until_router_is_back(self, load: Load) -> None:
        """It answers, and knows an instance of each role again."""
        roles = {member.role for member in self._cluster.instances}
        until = asyncio.get_running_loop().time() + _START_S
        while asyncio.get_running_loop().time() < until:
            await asyncio.sleep(0.5)
            state = await self._cluster.state(self._session)
            alive = {name for name, one in state.items() if one["standing"] == "alive"}
            if {member.role for member in self._cluster.instances if member.name in alive} == roles:
                break
        load.is_router_away = False

    async def _heal(self, member: Member, pids: list[int], seconds: float) -> None:
        await asyncio.sleep(seconds)
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
        if member.wire is not None:
            member.wire.mend()
        member.broken = None

    async def _watch_health(self) -> None:
        while True:
            if self._load is not None and self._load.is_router_away:
                await asyncio.sleep(0.1)
                continue
            self._result.num_health += 1
            try:
                async with asyncio.timeout(5), self._session.get(f"{self._cluster.url}/health") as answer:
                    self._result.num_sick += answer.status != 200
            except (OSError, TimeoutError, aiohttp.ClientError):
                self._result.num_sick += 1
            await asyncio.sleep(0.5)

    async def _until_whole(self, within_s: float, otherwise: str) -> None:
        loop = asyncio.get_running_loop()
        until = loop.time() + within_s
        while loop.time() < until:
            state = await self._cluster.state(self._session)
            if {name for name, one in state.items() if one["standing"] == "alive"} >= {
                member.name for member in self._cluster.instances
            }:
                return
            await asyncio.sleep(0.2)
        raise ConfigError(f"{otherwise} after {within_s:g} s", hint="see the processes' output (--logs)")

    async def _look_at_pages(self) -> None:
        """Every instance is back, runs nothing, and has all its pages free; else it is named."""
        loop = asyncio.get_running_loop()
        until = loop.time() + _SETTLE_S
        while True:
            state = await self._cluster.state(self._session)
            self._result.unfree = [
                f"{member.name}: {_standing(state.get(member.name))}"
                for member in self._cluster.instances
                if not _is_free(state.get(member.name))
            ]
            if not self._result.unfree or loop.time() > until:
                return
            await asyncio.sleep(0.2)


def _is_free(instance: dict[str, object] | None) -> bool:
    if instance is None or instance["standing"] != "alive" or instance["num_running"] is None:
        return False
    busy = instance["num_running"] or instance["num_waiting"] or instance["num_assigned"]
    return not busy and instance["num_free_pages"] == instance["num_pages"]


def _standing(instance: dict[str, object] | None) -> str:
    if instance is None:
        return "not there"
    shown = ("standing", "num_running", "num_assigned", "num_free_pages", "num_pages")
    return ", ".join(f"{key} {instance[key]}" for key in shown)


def _report(result: Result) -> Iterator[str | Table]:
    tally = result.tally
    gaps = sorted(tally.gaps_s) or [0.0]
    table = Table("what", "count", box=None, pad_edge=False)
    rows = {
        "faults": ", ".join(f"{kind} {count}" for kind, count in sorted(result.faults.items())) or "none",
        "answers": tally.num_done,
        "wrong tokens": tally.num_wrong,
        "hung": tally.num_hung,
        "failed": tally.num_failed,
        **({"cut off with the router": tally.num_cut_off} if "router" in result.faults else {}),
        "router's /health not 200": f"{result.num_sick} of {result.num_health}",
        "instances without all pages free": "; ".join(result.unfree) or 0,
        "longest silence in an answer": f"median {gaps[len(gaps) // 2]:.2f} s, worst {tally.longest_gap_s:.2f} s",
    }
    for what, count in rows.items():
        table.add_row(what, str(count))
    yield table
    for fault, count in tally.faults.most_common(10):
        yield f"{count} x {fault}"
    yield f"{'nobody noticed' if result.is_good else 'NOT GOOD'}; again with --seed {result.seed}"
