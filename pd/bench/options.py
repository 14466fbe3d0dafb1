"""What the commands of `pd bench` take. Imports nothing heavy: the command line reads it at start."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import typer

_MODEL, _SIZES = "Model", "Sizes"


@dataclass(frozen=True, slots=True, kw_only=True)
class LatencyOptions:
    """Of `pd bench latency`."""

    model: Annotated[
        str | None,
        typer.Argument(metavar="[MODEL]", help="A Hugging Face directory or hub id. [default: SmolLM2-135M-Instruct]"),
    ] = None
    dtype: Annotated[
        str, typer.Option(metavar="auto|float32|bfloat16|float16", help="Of weights and KV.", rich_help_panel=_MODEL)
    ] = "auto"
    device: Annotated[
        str, typer.Option(metavar="auto|cpu|cuda", help="cuda is ROCm's name too.", rich_help_panel=_MODEL)
    ] = "auto"
    threads: Annotated[
        int | None, typer.Option(metavar="N", help="CPU threads. [default: all cores]", rich_help_panel=_MODEL)
    ] = None
    prompts: Annotated[
        str, typer.Option(metavar="TOKENS,…", help="Prompt lengths to prefill.", rich_help_panel=_SIZES)
    ] = "128,512,2048"
    batches: Annotated[str, typer.Option(metavar="N,…", help="Requests decoded together.", rich_help_panel=_SIZES)] = (
        "1,4,16"
    )
    contexts: Annotated[
        str, typer.Option(metavar="TOKENS,…", help="KV each of them attends to.", rich_help_panel=_SIZES)
    ] = "256,1024"
    rounds: Annotated[
        int, typer.Option(metavar="N", help="Turns of everything; the best counts.", rich_help_panel=_SIZES)
    ] = 3
    output: Annotated[
        str | None, typer.Option(metavar="FILE", help="Write results there, as JSON lines.", rich_help_panel=_SIZES)
    ] = None
