"""What `pd bench transfer` takes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import typer

from pd.options import Output

_WHAT, _HOW = "What is moved", "How"


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferOptions:
    backend: Annotated[
        str | None,
        typer.Option(
            metavar="NAME,…",
            help="shm, tcp, nixl, mooncake, fake. [default: those that are here]",
            rich_help_panel=_HOW,
        ),
    ] = None
    transfer_param: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY=VALUE", help="Of the one backend given; may be repeated.", rich_help_panel=_HOW),
    ] = None
    prefill_tp: Annotated[str, typer.Option(metavar="N,…", help="Source ranks.", rich_help_panel=_WHAT)] = "1,2"
    decode_tp: Annotated[str, typer.Option(metavar="N,…", help="Destination ranks.", rich_help_panel=_WHAT)] = "1,2"
    tokens: Annotated[str, typer.Option(metavar="N,…", help="Tokens of a request.", rich_help_panel=_WHAT)] = (
        "128,2048,8192"
    )
    model_shape: Annotated[
        str,
        typer.Option(
            metavar="NAME|KEY=N,…",
            help="A model whose KV it is, or layers=,heads=,kv-heads=,head-dim=.",
            rich_help_panel=_WHAT,
        ),
    ] = "smollm2-135m"
    page_size: Annotated[int, typer.Option(metavar="TOKENS", help="A page, on both sides.", rich_help_panel=_WHAT)] = 16
    seconds: Annotated[
        float, typer.Option(metavar="S", help="Spent on each line of the table, at least.", rich_help_panel=_HOW)
    ] = 0.5
    output: Output = None
