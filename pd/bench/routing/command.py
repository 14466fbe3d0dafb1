"""`pd bench router`: what our router costs a request and a token, beside other routers and none.

Behind our router stands an instance that computes nothing; behind others an HTTP server that says the same at once, and
that server is measured alone as well. One client drives them all, in turns, so what differs is the router. CPU time of
its processes is read beside, since that is what a shared machine blurs least.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from dataclasses import asdict

import uvloop

from pd.bench.compare.shape import Shape
from pd.bench.environment import environment, in_words
from pd.bench.lines import FORMAT, Lines, written
from pd.bench.load.drive import Traffic
from pd.bench.load.tables import console
from pd.bench.options import RouterOptions
from pd.bench.routing.measure import WARM, Side, loads
from pd.bench.routing.servers import asks_prefill, before, null_http, other_router, our_router
from pd.bench.routing.table import cpu_us, table
from pd.runtime.checkpoint import resolve
from pd.runtime.config import ConfigError

_INCOMPLETE = 1
"""Exit status where another router could not be measured."""


def router(options: RouterOptions) -> int:
    """Run the command. Raises ConfigError for wrong use, and if our own router fails."""
    others = _checked(options)
    model = str(resolve(options.model))
    with written(options.output) as lines, asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_Comparison(options, lines).run(model, others))


def _checked(options: RouterOptions) -> list[Shape]:
    faults = [
        f"--{name.replace('_', '-')} is {value}, must be above 0"
        for name in ("requests", "streams", "tokens", "step_ms", "rounds")
        if (value := getattr(options, name)) <= 0
    ]
    others: list[Shape] = []
    for command in options.vs:
        try:
            others.append(other_router(command))
        except ValueError as error:
            faults.append(str(error))
    if faults:
        raise ConfigError(*faults, hint="pd bench router --help")
    return others


class _Comparison:
    def __init__(self, options: RouterOptions, lines: Lines) -> None:
        self._options = options
        self._lines = lines
        self._out = console()
        self._faults: dict[str, ConfigError] = {}  # of other routers, by name

    async def run(self, model: str, others: Sequence[Shape]) -> int:
        found = environment()
        self._lines.put("router", format=FORMAT, options=asdict(self._options), environment=found)
        async with self._sides(model, others) as (direct, routers):
            try:
                await self._turns(direct, routers)
            finally:  # Ctrl-C too: what was measured is told
                self._out.print(in_words(found), soft_wrap=True)
                self._out.print(table(direct, routers))
                self._tell_faults([direct, *routers])
        return _INCOMPLETE if self._faults else 0

    @contextlib.asynccontextmanager
    async def _sides(self, model: str, others: Sequence[Shape]) -> AsyncIterator[tuple[Side, list[Side]]]:
        """All at once: those whose turn it is not cost next to nothing."""
        step_s = self._options.step_ms / 1e3
        async with contextlib.AsyncExitStack() as stack:
            direct = Side("direct", await stack.enter_async_context(null_http(step_s)))
            routers = [Side("router", await stack.enter_async_context(our_router(model, step_s)))]
            prefill = direct.server
            if any(map(asks_prefill, others)):
                prefill = await stack.enter_async_context(null_http(step_s))
            for shape in others:
                name = _free_name(shape.name, [side.name for side in (direct, *routers)] + [*self._faults])
                starting = before(shape, model, backend=direct.server.url, prefill=prefill.url)
                try:
                    routers.append(Side(name, await stack.enter_async_context(starting)))
                except ConfigError as error:
                    self._leave_out(name, error)
            yield direct, routers

    async def _turns(self, direct: Side, routers: Sequence[Side]) -> None:
        """A B C, C B A, …, load by load, so that a drift of the machine meets all."""
        for turn in range(self._options.rounds):
            for what, traffic in loads(self._options).items():
                for side in [direct, *routers][:: -1 if turn % 2 else 1]:
                    if side.fault is None:
                        await self._turn(side, what, traffic, is_ours=side in (direct, routers[0]))

    async def _turn(self, side: Side, what: str, traffic: Traffic, *, is_ours: bool) -> None:
        tally = await side.turn(what, traffic)
        if side.fault is not None:
            if is_ours:
                raise side.fault
            self._leave_out(side.name, side.fault)
        elif tally is not None and what != WARM:
            summary = tally.summary().json()
            self._lines.put(
                "load", server=side.name, what=what, cpu_s=tally.cpu_s, cpu_us=cpu_us(what, tally), summary=summary
            )

    def _leave_out(self, name: str, fault: ConfigError) -> None:
        self._faults[name] = fault
        self._lines.put("left out", server=name, faults=str(fault).splitlines(), hint=fault.hint)

    def _tell_faults(self, sides: Sequence[Side]) -> None:
        for side in sides:
            for what, tally in side.found.items():
                if errors := tally.summary().errors:
                    self._out.print(f"failed: {side.name}: {what}: {errors}", markup=False)
        for name, fault in self._faults.items():
            self._out.print(f"\n{name} is left out: {fault}", markup=False, soft_wrap=True)
            if fault.hint:
                self._out.print(f"hint: {fault.hint}", markup=False, soft_wrap=True)


def _free_name(name: str, taken: Sequence[str]) -> str:
    """`name`, or with a number."""
    number = 1
    found = name
    while found in taken:
        number += 1
        found = f"{name} {number}"
    return found
