"""`pd bench …`: a command for each thing that is measured. What it needs is imported when it runs.

A further measurement is its options (pd/bench/options.py or its own module), a function here that imports its body,
and one line at the end.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial

import typer

from pd.bench.chaos_options import ChaosOptions
from pd.bench.options import CompareOptions, LatencyOptions, LoadOptions, ReportOptions, RouterOptions
from pd.bench.transfer_options import TransferOptions
from pd.cli_options import GroupedHelp, as_command

bench = typer.Typer(
    add_completion=False, rich_markup_mode=None, help="Measure: servers under load, the engine's steps, their parts."
)


def _serve(options: LoadOptions) -> Callable[[], int]:
    """Load a server that runs, ours or any other of OpenAI's kind, and tell what its clients see."""
    from pd.bench.serve import serve

    return partial(serve, options)


def _compare(options: CompareOptions) -> Callable[[], int]:
    """Serve colocated and apart on the same cores, one after the other, and say what rate each keeps up with."""
    from pd.bench.compare.command import compare

    return partial(compare, options)


def _report(options: ReportOptions) -> Callable[[], int]:
    """Make one HTML page of results, with plots, that opens without a network."""
    from pd.bench.report.command import report

    return partial(report, options)


def _router(options: RouterOptions) -> Callable[[], int]:
    """Measure what our router adds to a request and a token, with instances that compute nothing."""
    from pd.bench.routing.command import router

    return partial(router, options)


def _latency(options: LatencyOptions) -> Callable[[], int]:
    """Time one engine's prefill and decode steps over batch and context, beside what the machine allows."""
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # read when torch is loaded, as for the ranks of pd launch
    from pd.bench.latency import latency

    return partial(latency, options)


def _transfer(options: TransferOptions) -> Callable[[], int]:
    """Time a request's KV from prefill ranks to decode ranks in another process, beside what no copy beats."""
    from pd.bench.transfer import transfer

    return partial(transfer, options)


def _chaos(options: ChaosOptions) -> Callable[[], int]:
    """Kill, pause and cut off the instances of a cluster under load; tell whether its clients noticed."""
    from pd.bench.chaos import chaos

    return partial(chaos, options)


bench.command("serve", cls=GroupedHelp)(as_command(_serve, LoadOptions))
bench.command("compare", cls=GroupedHelp)(as_command(_compare, CompareOptions))
bench.command("report", cls=GroupedHelp)(as_command(_report, ReportOptions))
bench.command("router", cls=GroupedHelp)(as_command(_router, RouterOptions))
bench.command("latency", cls=GroupedHelp)(as_command(_latency, LatencyOptions))
bench.command("transfer", cls=GroupedHelp)(as_command(_transfer, TransferOptions))
bench.command("chaos", cls=GroupedHelp)(as_command(_chaos, ChaosOptions))
