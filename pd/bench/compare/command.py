"""`pd bench compare`: colocated and apart on the same cores, the same traffic, rate by rate: what each keeps up with.

Rules
1. One server at a time has all the cores; repeats take turns, so that a drift of the machine meets all of them.
2. Every (rate, repeat) has a seed of its own, the same for all servers: nobody meets a prompt twice, and all meet the
   same prompts at the same times.
3. Far beyond its capacity a server is not tried further: a rate that is left out counts as broken.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace

import uvloop

from pd.bench import specs
from pd.bench.compare.shape import Shape, foreign, ours, running
from pd.bench.compare.verdict import verdict
from pd.bench.environment import environment, in_words
from pd.bench.lines import FORMAT, Lines, written
from pd.bench.load.plan import Wanted, check
from pd.bench.load.session import Ran, Session, connect, teller
from pd.bench.load.tables import console
from pd.bench.options import CompareOptions
from pd.runtime.checkpoint import resolve
from pd.runtime.config import ConfigError

_INCOMPLETE, _INTERRUPTED = 1, 130
"""Exit statuses beside 0."""
_HOPELESS = 0.5  # of the target: beyond it higher rates only take time
_GPUS = ("/dev/nvidiactl", "/dev/kfd")


@dataclass(slots=True)
class Sweep:
    """One server's runs by rate, in the order of repeats. Owned by the command."""

    shape: Shape
    runs: dict[float, list[Ran]] = field(default_factory=dict)


def compare(options: CompareOptions) -> int:
    """Run the command. Raises ConfigError for wrong use, and for a server that cannot be started."""
    wanted, rates, shapes = _checked(options)
    model = str(resolve(options.model))
    with written(options.output) as lines, asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_Comparison(options, wanted, lines).run(model, rates, shapes))


def _checked(options: CompareOptions) -> tuple[Wanted, tuple[float, ...], list[Shape]]:
    faults: list[str] = []
    rates: tuple[float, ...] = ()
    shapes: list[Shape] = []
    try:
        rates = tuple(sorted(set(specs.rates("--rates", options.rates))))
    except ValueError as error:
        faults.append(str(error))
    if options.slo is None:
        faults.append("--slo is missing: what a good answer is, as in --slo ttft:2000,tpot:100")
    if options.repeats < 1:
        faults.append(f"--repeats is {options.repeats}, must be at least 1")
    if not 0 < options.target <= 1:
        faults.append(f"--target is {options.target:g}, must be above 0 and at most 1")
    if options.arrival.startswith("trace"):
        faults.append("--arrival trace has its own rate; a sweep needs others: poisson, gamma, constant")
    try:
        shapes = _shapes(options)
    except ValueError as error:
        faults.append(str(error))
    return check(options, *faults, command="pd bench compare"), rates, shapes


def _shapes(options: CompareOptions) -> list[Shape]:
    """Raises ValueError."""
    allowed = sorted(os.sched_getaffinity(0))
    cores = specs.cores("--cores", options.cores, allowed) if options.cores is not None else allowed
    further = options.options.split() if options.options else []
    apart = [f"--prefill={one}" for one in options.prefill] + [f"--decode={one}" for one in options.decode]
    colocated = [f"--colocated={one}" for one in options.colocated or [""]]
    return [
        ours("colocated", colocated, cores=cores, further=further),
        ours("apart", apart, cores=cores, further=further),
        *(foreign(command, cores=cores) for command in options.vs),
    ]


class _Comparison:
    def __init__(self, options: CompareOptions, wanted: Wanted, lines: Lines) -> None:
        self._options = options
        self._wanted = wanted
        self._lines = lines
        self._out = console()
        self._errors = console(stderr=True)
        self._found = environment()

    async def run(self, model: str, rates: Sequence[float], shapes: Sequence[Shape]) -> int:
        options = self._options
        self._out.print(in_words(self._found), soft_wrap=True)
        for note in _notes(options):
            self._out.print(note, soft_wrap=True)
        about = {"options": asdict(options), "environment": self._found, "shapes": [shape.name for shape in shapes]}
        self._lines.put("compare", format=FORMAT, **about)
        sweeps = [Sweep(shape) for shape in shapes]
        status = 0
        for repeat, sweep in _turns(sweeps, options.repeats):
            try:
                if await self._sweep(sweep, model, rates, repeat):
                    status = _INTERRUPTED
                    break
            except ConfigError as error:
                if not any(one.runs for one in sweeps):
                    raise
                status = _INCOMPLETE  # what others have done is worth telling
                self._out.print(f"{sweep.shape.name} is left out of repeat {repeat + 1}: {error}", markup=False)
        for line in verdict({one.shape.name: one.runs for one in sweeps}, self._wanted.goals, options.target):
            self._out.print(line, soft_wrap=isinstance(line, str))
        return status

    async def _sweep(self, sweep: Sweep, model: str, rates: Sequence[float], repeat: int) -> bool:
        """All rates against one life of a server. Returns whether it was interrupted."""
        say, end = teller(self._errors, f"{sweep.shape.name}: ")
        try:
            say("starting")
            async with self._serving(sweep.shape, model, repeat) as session:
                for place, rate in enumerate(rates):
                    seed = self._options.seed + 1000 * repeat + place
                    self._begin(sweep.shape, rate, repeat, seed=seed, model=session.model)
                    traffic, form = self._wanted.open_loop(rate, seed=seed), self._wanted.form(session.model)
                    ran = await session.run(form, traffic, self._wanted.goals, self._lines, say=say)
                    if ran.was_interrupted:
                        return True
                    sweep.runs.setdefault(rate, []).append(ran)
                    self._tell(sweep.shape, rate, ran)
                    if (ran.summary.attainment or 0.0) < _HOPELESS * self._options.target:
                        break
        finally:
            end()
        return False

    @contextlib.asynccontextmanager
    async def _serving(self, shape: Shape, model: str, repeat: int) -> AsyncIterator[Session]:
        """A server that has started and is warm. What it says of itself is told once."""
        async with running(shape, model) as server:
            self._lines.put("server", name=shape.name, command=shape.command, cores=shape.cores, said=server.said)
            for line in server.said if repeat == 0 else ():
                self._out.print(f"{shape.name}: {line}", style="dim", markup=False, soft_wrap=True)
            session = await connect(server.url, None)
            try:
                await session.warm_up(self._wanted)
                yield session
            finally:
                session.close()

    def _begin(self, shape: Shape, rate: float, repeat: int, *, seed: int, model: str) -> None:
        options = asdict(replace(self._options, seed=seed))
        self._lines.put(
            "run",
            name=shape.name,
            rate=rate,
            repeat=repeat,
            model=model,
            cores=shape.cores,
            options=options,
            environment=self._found,
        )

    def _tell(self, shape: Shape, rate: float, ran: Ran) -> None:
        found = ran.summary
        share = (found.attainment or 0.0) * 100
        self._out.print(
            f"{shape.name:12} {rate:6.2f}/s  {found.num_ok} of {found.num_requests}  goodput {found.goodput_s:.2f}/s "
            f"({share:.0f} %)  TTFT p50 {found.ttft.p50 * 1e3:.0f} p99 {found.ttft.p99 * 1e3:.0f}  "
            f"ITL p50 {found.itl.p50 * 1e3:.1f} p99 {found.itl.p99 * 1e3:.1f} ms",
            soft_wrap=True,
        )


def _turns(sweeps: Sequence[Sweep], repeats: int) -> Iterator[tuple[int, Sweep]]:
    """A B, B A, A B …"""
    for repeat in range(repeats):
        for sweep in sweeps[:: -1 if repeat % 2 else 1]:
            yield repeat, sweep


def _notes(options: CompareOptions) -> list[str]:
    """On GPUs ranks are the resource, and the layouts say how many."""
    if not any(map(os.path.exists, _GPUS)):
        return []
    apart = specs.ranks(options.prefill or [""]) + specs.ranks(options.decode or [""])
    colocated = specs.ranks(options.colocated or [""])
    if apart == colocated:
        return []
    return [f"note: unequal: {apart} ranks apart, {colocated} colocated; say --colocated tp=… so that they are equal"]
