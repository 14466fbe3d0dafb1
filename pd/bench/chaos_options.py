"""What `pd bench chaos` takes. Imports nothing heavy: the command line reads it at start."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import typer

from pd.options import Model

_FAULTS, _LOAD = "Faults", "Load"


@dataclass(frozen=True, slots=True, kw_only=True)
class ChaosOptions:
    """Of `pd bench chaos`."""

    model: Model = None
    duration: Annotated[float, typer.Option(metavar="SECONDS", help="Of faults.", rich_help_panel=_FAULTS)] = 60.0
    every: Annotated[float, typer.Option(metavar="SECONDS", help="Between faults.", rich_help_panel=_FAULTS)] = 4.0
    faults: Annotated[
        str, typer.Option(metavar="KIND,…", help="Of kill, rank, pause, link, router.", rich_help_panel=_FAULTS)
    ] = "kill,rank,pause,link"
    seed: Annotated[
        int | None, typer.Option(metavar="N", help="Of the faults. [default: drawn, and told]", rich_help_panel=_FAULTS)
    ] = None
    num_prefill: Annotated[int, typer.Option(metavar="N", help="Prefill instances.", rich_help_panel=_LOAD)] = 2
    num_decode: Annotated[int, typer.Option(metavar="N", help="Decode instances.", rich_help_panel=_LOAD)] = 2
    concurrency: Annotated[int, typer.Option(metavar="N", help="Requests open at once.", rich_help_panel=_LOAD)] = 32
    tokens: Annotated[int, typer.Option(metavar="N", help="Of each answer.", rich_help_panel=_LOAD)] = 64
    options: Annotated[
        str | None, typer.Option(metavar="ARGUMENTS", help="Of pd launch, for the instances.", rich_help_panel=_LOAD)
    ] = None
    router_options: Annotated[
        str | None, typer.Option(metavar="ARGUMENTS", help="Of pd launch, for the router.", rich_help_panel=_LOAD)
    ] = None
    logs: Annotated[
        str | None, typer.Option(metavar="DIRECTORY", help="Keep the processes' output there.", rich_help_panel=_LOAD)
    ] = None
