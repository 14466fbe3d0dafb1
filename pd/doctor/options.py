"""What `pd doctor` takes. Imports nothing heavy: the command line reads it at start."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import typer

_LOOK, _HOSTS, _PLAN = "Checks", "Two hosts", "A launch"


@dataclass(frozen=True, slots=True, kw_only=True)
class DoctorOptions:
    only: Annotated[
        str | None,
        typer.Option(metavar="NAME,…", help="Groups or checks to run, as rdma,nvidia.torch.", rich_help_panel=_LOOK),
    ] = None
    explain: Annotated[
        str | None, typer.Option(metavar="CHECK", help="Say what a check reads and why.", rich_help_panel=_LOOK)
    ] = None
    verbose: Annotated[
        bool, typer.Option("--verbose", help="Show everything read, and each check's time.", rich_help_panel=_LOOK)
    ] = False
    json: Annotated[bool, typer.Option("--json", help="Results as JSON.", rich_help_panel=_LOOK)] = False
    serve: Annotated[
        bool, typer.Option("--serve", help="Answer another host's doctor until Ctrl-C.", rich_help_panel=_HOSTS)
    ] = False
    host: Annotated[str, typer.Option(metavar="ADDRESS", help="Where --serve listens.", rich_help_panel=_HOSTS)] = (
        "127.0.0.1"
    )
    port: Annotated[int, typer.Option(metavar="PORT", help="Of --serve.", rich_help_panel=_HOSTS)] = 8590
    peer: Annotated[
        str | None,
        typer.Option(metavar="HOST[:PORT]", help="Check against a doctor that serves there.", rich_help_panel=_HOSTS),
    ] = None
    model: Annotated[
        str | None,
        typer.Option(metavar="PATH_OR_ID", help="Say what a launch of it would need.", rich_help_panel=_PLAN),
    ] = None
    role: Annotated[
        str, typer.Option(metavar="prefill|decode|colocated", help="Of that launch.", rich_help_panel=_PLAN)
    ] = "colocated"
    tp: Annotated[int, typer.Option(metavar="N", help="Ranks of that launch.", rich_help_panel=_PLAN)] = 1
    page_size: Annotated[int, typer.Option(metavar="TOKENS", help="Of that launch's pages.", rich_help_panel=_PLAN)] = (
        16
    )
    kv_cache_dtype: Annotated[
        str, typer.Option(metavar="auto|fp8_e4m3", help="Of that launch's pages.", rich_help_panel=_PLAN)
    ] = "auto"
