"""`pd bench serve`: load on a server that runs, and what its clients see."""

from __future__ import annotations

import asyncio
from dataclasses import asdict

import uvloop

from pd.bench.environment import environment, in_words
from pd.bench.lines import FORMAT, Lines, written
from pd.bench.load.plan import Wanted, check
from pd.bench.load.session import Ran, connect, teller
from pd.bench.load.tables import console, figures, notes
from pd.bench.options import LoadOptions

OK, ALL_FAILED, INTERRUPTED = 0, 1, 130
"""Exit statuses; wrong use is a ConfigError."""


def serve(options: LoadOptions) -> int:
    """Run the command. Raises ConfigError for wrong use, an absent server and a wrong model."""
    wanted = check(options, *_faults(options), command="pd bench serve")
    with written(options.output) as lines, asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_run(options, wanted, lines))


def _faults(options: LoadOptions) -> list[str]:
    faults = []
    if options.rate is not None and not 0 < options.rate < float("inf"):
        faults.append(f"--rate is {options.rate:g}, must be above 0")
    if options.concurrency is not None and options.concurrency < 1:
        faults.append(f"--concurrency is {options.concurrency}, must be at least 1")
    if options.rate is not None and options.concurrency is not None:
        faults.append("--rate and --concurrency exclude each other: a bound on what is open would hide what waits")
    if options.rate is None and options.concurrency is None and not options.arrival.startswith("trace"):
        faults.append("nothing says how much: --rate 2 (arrivals a second) or --concurrency 8 (open at once)")
    return faults


async def _run(options: LoadOptions, wanted: Wanted, lines: Lines) -> int:
    if options.concurrency is not None:
        traffic = wanted.closed_loop(options.concurrency)
    else:
        traffic = wanted.open_loop(options.rate, seed=options.seed)
    session = await connect(options.url, options.model)
    out, errors = console(), console(stderr=True)
    found = environment()
    try:
        lines.put(
            "run", format=FORMAT, name=options.dataset, options=asdict(options), model=session.model, environment=found
        )
        say, end = teller(errors)
        try:
            say("warming up")
            await session.warm_up(wanted)
            ran = await session.run(wanted.form(session.model), traffic, wanted.goals, lines, say=say)
        finally:
            end()
    finally:
        session.close()
    out.print(f"{session.model} at {session.server.url}; {in_words(found)}", soft_wrap=True)
    out.print(figures(ran.summary))
    for note in [*wanted.shortages(), *notes(ran.summary, ran.outcomes)]:
        out.print(note, soft_wrap=True, markup=False)
    return _status(ran)


def _status(ran: Ran) -> int:
    if ran.was_interrupted:
        return INTERRUPTED
    return OK if ran.summary.num_ok else ALL_FAILED
