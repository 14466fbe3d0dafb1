"""What the commands of `pd bench` take. Imports nothing heavy: the command line reads it at start."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

import typer

from pd.options import DEVICE, Device, Dtype, Model, Output

_SIZES = "Sizes"


@dataclass(frozen=True, slots=True, kw_only=True)
class LatencyOptions:
    """Of `pd bench latency`."""

    model: Model = None
    dtype: Dtype = "auto"
    device: Device = "auto"
    threads: Annotated[
        int | None, typer.Option(metavar="N", help="CPU threads. [default: all cores]", rich_help_panel=DEVICE)
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
    output: Output = None


_SERVER, _TRAFFIC, _LOOKS, _GOALS = "Server", "Traffic", "Requests", "Goals"


@dataclass(frozen=True, slots=True, kw_only=True)
class TrafficOptions:
    """What is asked and judged, of `pd bench serve` and `pd bench compare`."""

    dataset: Annotated[
        str,
        typer.Option(
            metavar="KIND[:FILE][,KEY=VALUE…]",
            help="random, shared-prefix, multi-turn; of a file: sharegpt, mooncake, azure, jsonl.",
            rich_help_panel=_TRAFFIC,
        ),
    ] = "random"
    arrival: Annotated[
        str,
        typer.Option(
            metavar="KIND[,KEY=VALUE…]",
            help="poisson; gamma,shape=0.25; constant; ramp,to=RATE,over=60; trace,scale=1.",
            rich_help_panel=_TRAFFIC,
        ),
    ] = "poisson"
    num_requests: Annotated[
        int | None,
        typer.Option(
            metavar="N", help="Conversations to send. [default: 100, or all of a file]", rich_help_panel=_TRAFFIC
        ),
    ] = None
    duration: Annotated[
        float | None, typer.Option(metavar="SECONDS", help="Send for so long.", rich_help_panel=_TRAFFIC)
    ] = None
    warmup: Annotated[
        int, typer.Option(metavar="N", help="Requests before, which do not count.", rich_help_panel=_TRAFFIC)
    ] = 2
    seed: Annotated[int, typer.Option(metavar="N", help="Of prompts and arrivals.", rich_help_panel=_TRAFFIC)] = 0
    chat: Annotated[
        bool, typer.Option("--chat", help="Chat completions, in place of completions.", rich_help_panel=_LOOKS)
    ] = False
    allow_eos: Annotated[
        bool,
        typer.Option("--allow-eos", help="Answers may end by themselves, before max_tokens.", rich_help_panel=_LOOKS),
    ] = False
    extra: Annotated[
        str | None, typer.Option(metavar="JSON", help="Further fields of every request.", rich_help_panel=_LOOKS)
    ] = None
    tokenizer: Annotated[
        str | None,
        typer.Option(metavar="DIRECTORY", help="To count texts' tokens, and check usage.", rich_help_panel=_LOOKS),
    ] = None
    timeout: Annotated[float, typer.Option(metavar="SECONDS", help="Of a whole answer.", rich_help_panel=_LOOKS)] = (
        600.0
    )
    slo: Annotated[
        str | None,
        typer.Option(
            metavar="NAME:MS,…",
            help="Goals: ttft, tpot, itl (the longest gap), e2e; as ttft:500,tpot:50.",
            rich_help_panel=_GOALS,
        ),
    ] = None
    output: Output = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadOptions(TrafficOptions):
    """Of `pd bench serve`."""

    url: Annotated[
        str, typer.Option(metavar="http://HOST:PORT", help="Any OpenAI-compatible server.", rich_help_panel=_SERVER)
    ] = "http://127.0.0.1:8000"
    model: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="As the server calls it. [default: its first]", rich_help_panel=_SERVER),
    ] = None
    rate: Annotated[
        float | None,
        typer.Option(metavar="N", help="Arrivals a second, however many are open.", rich_help_panel=_TRAFFIC),
    ] = None
    concurrency: Annotated[
        int | None,
        typer.Option(metavar="N", help="In place of a rate: so many open at once.", rich_help_panel=_TRAFFIC),
    ] = None


_SHAPES = "What is compared"


@dataclass(frozen=True, slots=True, kw_only=True)
class CompareOptions(TrafficOptions):
    """Of `pd bench compare`."""

    model: Model = None
    prefill: Annotated[
        list[str],
        typer.Option(metavar="[KEY=VALUE,…]", help="Of the side apart, as in pd serve.", rich_help_panel=_SHAPES),
    ] = field(default_factory=list)
    decode: Annotated[
        list[str],
        typer.Option(metavar="[KEY=VALUE,…]", help="Likewise.", rich_help_panel=_SHAPES),
    ] = field(default_factory=list)
    colocated: Annotated[
        list[str],
        typer.Option(
            metavar="[KEY=VALUE,…]", help="Of the other side. [default: one on all cores]", rich_help_panel=_SHAPES
        ),
    ] = field(default_factory=list)
    vs: Annotated[
        list[str],
        typer.Option(
            metavar="COMMAND",
            help="Another server beside them; {port} and {model} are filled in.",
            rich_help_panel=_SHAPES,
        ),
    ] = field(default_factory=list)
    cores: Annotated[
        str | None,
        typer.Option(metavar="0-3,6", help="Of each server, in turn. [default: all]", rich_help_panel=_SHAPES),
    ] = None
    options: Annotated[
        str | None,
        typer.Option(metavar="ARGUMENTS", help="Further ones of pd serve, for both shapes.", rich_help_panel=_SHAPES),
    ] = None
    rates: Annotated[str, typer.Option(metavar="N,…", help="Arrivals a second to try.", rich_help_panel=_TRAFFIC)] = (
        "0.5,1,2,4"
    )
    duration: Annotated[
        float | None, typer.Option(metavar="SECONDS", help="Send for so long at each rate.", rich_help_panel=_TRAFFIC)
    ] = 30.0
    repeats: Annotated[
        int, typer.Option(metavar="N", help="Of the whole, each with a seed of its own.", rich_help_panel=_TRAFFIC)
    ] = 2
    target: Annotated[
        float, typer.Option(metavar="SHARE", help="Of requests that must meet the goals.", rich_help_panel=_GOALS)
    ] = 0.9


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportOptions:
    """Of `pd bench report`."""

    results: Annotated[list[str], typer.Argument(metavar="FILE…", help="What serve and compare wrote with --output.")]
    html: Annotated[str, typer.Option(metavar="FILE", help="The page to write.", rich_help_panel=_GOALS)] = (
        "report.html"
    )
    title: Annotated[str | None, typer.Option(metavar="TEXT", help="Of the page.", rich_help_panel=_GOALS)] = None
    slo: Annotated[
        str | None,
        typer.Option(metavar="NAME:MS,…", help="Other goals than the runs had.", rich_help_panel=_GOALS),
    ] = None


_LOAD, _ROUTERS = "Load", "What is compared"


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterOptions:
    """Of `pd bench router`."""

    model: Annotated[
        str | None,
        typer.Argument(metavar="[MODEL]", help="Whose tokenizer to use. [default: SmolLM2-135M-Instruct]"),
    ] = None
    requests: Annotated[
        int, typer.Option(metavar="N", help="Of one token each, 64 at once.", rich_help_panel=_LOAD)
    ] = 2000
    streams: Annotated[int, typer.Option(metavar="N", help="Long answers at once.", rich_help_panel=_LOAD)] = 256
    tokens: Annotated[int, typer.Option(metavar="N", help="Of each of them.", rich_help_panel=_LOAD)] = 128
    step_ms: Annotated[float, typer.Option(metavar="MS", help="Between their tokens.", rich_help_panel=_LOAD)] = 20.0
    rounds: Annotated[int, typer.Option(metavar="N", help="Turns of everything.", rich_help_panel=_LOAD)] = 1
    vs: Annotated[
        list[str],
        typer.Option(
            metavar="COMMAND",
            help="Another router beside ours; {port}, and {backend} or {prefill} and {decode} (URLs), are filled in.",
            rich_help_panel=_ROUTERS,
        ),
    ] = field(default_factory=list)
    output: Output = None
