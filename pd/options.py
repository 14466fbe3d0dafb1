"""Options that several commands share, each written once. Imports nothing heavy: the command line reads it at start."""

from __future__ import annotations

from typing import Annotated

import typer

MODEL, DEVICE = "Model", "Device"
"""Panels of help."""

Model = Annotated[
    str | None,
    typer.Argument(metavar="[MODEL]", help="A Hugging Face directory or hub id. [default: SmolLM2-135M-Instruct]"),
]
Dtype = Annotated[
    str,
    typer.Option(
        metavar="auto|float32|bfloat16|float16", help="Of weights, and of KV unless told.", rich_help_panel=MODEL
    ),
]
Device = Annotated[str, typer.Option(metavar="auto|cpu|cuda", help="cuda is ROCm's name too.", rich_help_panel=DEVICE)]
Output = Annotated[
    str | None, typer.Option(metavar="FILE", help="Write results there, as JSON lines.", rich_help_panel="Results")
]
