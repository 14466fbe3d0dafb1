"""`pd bench …`: a command for each thing that is measured. What it needs is imported when it runs.

A further measurement is its options (pd/bench/options.py or its own module), a function here that imports its body,
and one line at the end.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial

import typer

from pd.bench.options import LatencyOptions
from pd.cli_options import GroupedHelp, as_command

bench = typer.Typer(
    add_completion=False, rich_markup_mode=None, help="Measure: servers under load, the engine's steps, their parts."
)


def _latency(options: LatencyOptions) -> Callable[[], int]:
    """Time one engine's prefill and decode steps over batch and context, beside what the machine allows."""
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # read when torch is loaded, as for the ranks of pd launch
    from pd.bench.latency import latency

    return partial(latency, options)


bench.command("latency", cls=GroupedHelp)(as_command(_latency, LatencyOptions))
