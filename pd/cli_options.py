"""What `pd launch` and `pd serve` take: every option once, with its type, default and help.

A command's options are the fields of a dataclass; `as_command` turns them into the parameters Typer reads. So
one value goes from the command line to `cli_config`, and an option that two commands share is written once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import MISSING, Field, dataclass, field, fields
from inspect import Parameter, Signature
from typing import Annotated, Any, ClassVar, Protocol, TypeVar, get_type_hints

import typer
from typer.core import TyperCommand

from pd.options import DEVICE, MODEL, Device, Dtype, Model

_WHAT, _MODEL, _DEVICE = "What", MODEL, DEVICE
_KV, _STEPS, _NETWORK = "KV cache", "Steps", "Network and transfer"
_DOCTOR = ("Checks", "Two hosts", "A launch")
_PANELS = (None, _WHAT, _MODEL, _DEVICE, _KV, _STEPS, _NETWORK, *_DOCTOR)
"""The order in which help shows them; a panel that is not here stands after these, as its command has them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedOptions:
    """Of both commands. A default of None is derived at start, and the start-up line says what was chosen."""

    served_name: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="As clients say the model. [default: directory or hub id]", rich_help_panel=_MODEL
        ),
    ] = None
    log: Annotated[
        str,
        typer.Option(
            metavar="requests|instances", help="instances: no lines of requests that go well.", rich_help_panel=_WHAT
        ),
    ] = "requests"
    dtype: Dtype = "auto"
    max_model_len: Annotated[
        int | None,
        typer.Option(
            metavar="TOKENS",
            help="Prompt + answer. [default: the model's limit, or the pool's]",
            rich_help_panel=_MODEL,
        ),
    ] = None
    device: Device = "auto"
    kernels: Annotated[
        str,
        typer.Option(
            metavar="auto|triton|torch",
            help="auto: Triton's on a GPU; else C++ where built, PyTorch's.",
            rich_help_panel=_DEVICE,
        ),
    ] = "auto"
    no_graphs: Annotated[
        bool, typer.Option("--no-graphs", help="Launch each decode step kernel by kernel.", rich_help_panel=_DEVICE)
    ] = False
    threads: Annotated[
        int | None,
        typer.Option(metavar="N", help="CPU threads a rank. [default: cores over ranks]", rich_help_panel=_DEVICE),
    ] = None
    cores: Annotated[
        str | None,
        typer.Option(metavar="0-3,6", help="CPU cores to use. [default: all allowed ones]", rich_help_panel=_DEVICE),
    ] = None
    page_size: Annotated[int, typer.Option(metavar="TOKENS", help="Of one page.", rich_help_panel=_KV)] = 16
    num_pages: Annotated[
        int | None, typer.Option(metavar="N", help="A rank. [default: from --kv-memory]", rich_help_panel=_KV)
    ] = None
    kv_memory: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE",
            help="A rank's pool: bytes, 4GiB, or a fraction such as 0.8 of what is free. "
            "[default: 0.9 on a GPU, 2GiB on a CPU]",
            rich_help_panel=_KV,
        ),
    ] = None
    kv_cache_dtype: Annotated[
        str,
        typer.Option(
            metavar="auto|fp8_e4m3", help="auto: as --dtype. fp8_e4m3: twice bfloat16's tokens.", rich_help_panel=_KV
        ),
    ] = "auto"
    no_prefix_cache: Annotated[
        bool, typer.Option("--no-prefix-cache", help="Compute every prompt whole.", rich_help_panel=_KV)
    ] = False
    max_running: Annotated[
        int, typer.Option(metavar="N", help="Requests computed at once, an instance.", rich_help_panel=_STEPS)
    ] = 256
    max_prefill_tokens: Annotated[
        int, typer.Option(metavar="TOKENS", help="Prompt tokens of one step.", rich_help_panel=_STEPS)
    ] = 2048
    transfer: Annotated[
        str,
        typer.Option(
            metavar="auto|shm|tcp|nixl|mooncake",
            help="How KV moves. auto: shm on one host, else what proves fastest.",
            rich_help_panel=_NETWORK,
        ),
    ] = "auto"
    transfer_devices: Annotated[
        str | None,
        typer.Option(metavar="NAME,…", help="Network interfaces for KV.", rich_help_panel=_NETWORK),
    ] = None
    transfer_param: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY=VALUE",
            help="Of nixl (backend, and its own) or mooncake (protocol); may be repeated.",
            rich_help_panel=_NETWORK,
        ),
    ] = None
    move: Annotated[
        str,
        typer.Option(
            metavar="auto|direct|packed",
            help="KV as it lies, or through staging in the peer's arrangement.",
            rich_help_panel=_NETWORK,
        ),
    ] = "auto"
    stream_layers: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="KV of so many layers starts while later ones compute. [default: of all, after the step]",
            rich_help_panel=_NETWORK,
        ),
    ] = None
    reserve: Annotated[
        str,
        typer.Option(
            metavar="early|late",
            help="Decode takes pages before prefill begins, or when it is done.",
            rich_help_panel=_NETWORK,
        ),
    ] = "early"
    direction: Annotated[
        str,
        typer.Option(
            metavar="push|pull",
            help="Prefill writes KV into decode's pages, or decode reads it.",
            rich_help_panel=_NETWORK,
        ),
    ] = "push"
    verify_kv: Annotated[
        bool,
        typer.Option(
            "--verify-kv", help="Compare digests of KV sent and KV landed before it is used.", rich_help_panel=_NETWORK
        ),
    ] = False
    host: Annotated[str, typer.Option(metavar="ADDRESS", help="Where to listen.", rich_help_panel=_NETWORK)] = (
        "127.0.0.1"
    )
    cluster_key: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="The one key of all the cluster's processes (pd key FILE makes it): links are locked with it.",
            rich_help_panel=_NETWORK,
        ),
    ] = None
    insecure: Annotated[
        bool,
        typer.Option("--insecure", help="Let others reach the links without a key.", rich_help_panel=_NETWORK),
    ] = False
    max_attempts: Annotated[
        int,
        typer.Option(
            metavar="N", help="Router only: tries of one request, when instances fail.", rich_help_panel=_STEPS
        ),
    ] = 5
    deadline: Annotated[
        float,
        typer.Option(metavar="SECONDS", help="Router only: for a whole answer; then it fails.", rich_help_panel=_STEPS),
    ] = 600.0
    api_key_file: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="Router only: keys that HTTP clients must show, one a line. [default: none]",
            rich_help_panel=_NETWORK,
        ),
    ] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchOptions(SharedOptions):
    role: Annotated[
        str,
        typer.Option(metavar="prefill|decode|colocated|router", help="What to be.", rich_help_panel=_WHAT),
    ]
    name: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="Unique in the cluster. [default: role, host and process id]", rich_help_panel=_WHAT
        ),
    ] = None
    model: Annotated[
        str | None,
        typer.Option(
            metavar="PATH_OR_ID",
            help="A Hugging Face directory or hub id. [default: SmolLM2-135M-Instruct]",
            rich_help_panel=_MODEL,
        ),
    ] = None
    tp: Annotated[
        int, typer.Option(metavar="N", help="Ranks, up to the model's query heads.", rich_help_panel=_DEVICE)
    ] = 1
    port: Annotated[
        int | None,
        typer.Option(
            metavar="PORT",
            help="HTTP of a router [default: 8000]; handoffs of others [default: any]",
            rich_help_panel=_NETWORK,
        ),
    ] = None
    router: Annotated[
        str,
        typer.Option(
            metavar="tcp://HOST:PORT",
            help="Where instances meet the router; the router binds it.",
            rich_help_panel=_NETWORK,
        ),
    ] = "tcp://127.0.0.1:8500"


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeOptions(SharedOptions):
    model: Model = None
    prefill: Annotated[
        list[str],
        typer.Option(
            metavar="[KEY=VALUE,…]",
            help="A prefill instance: tp, name, num-pages, threads, cores. Repeatable. [default: tp=1]",
            rich_help_panel=_WHAT,
        ),
    ] = field(default_factory=list)
    decode: Annotated[
        list[str],
        typer.Option(metavar="[KEY=VALUE,…]", help="A decode instance, likewise.", rich_help_panel=_WHAT),
    ] = field(default_factory=list)
    colocated: Annotated[
        list[str],
        typer.Option(
            metavar="[KEY=VALUE,…]",
            help="An instance that does both, instead of the two.",
            rich_help_panel=_WHAT,
        ),
    ] = field(default_factory=list)
    restart: Annotated[
        str,
        typer.Option(metavar="always|never", help="What to do when a process dies.", rich_help_panel=_WHAT),
    ] = "always"
    port: Annotated[int, typer.Option(metavar="PORT", help="HTTP. 0: any free one.", rich_help_panel=_NETWORK)] = 8000


class Dataclass(Protocol):
    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]


Options = TypeVar("Options", bound=Dataclass)
Result = TypeVar("Result")


class GroupedHelp(TyperCommand):
    """A command whose help shows its options by panel."""

    def format_options(self, context: Any, formatter: Any) -> None:
        panels = [getattr(param, "rich_help_panel", None) for param in self.params]
        for panel in dict.fromkeys((*_PANELS, *panels)):
            members = [param for param in self.params if getattr(param, "rich_help_panel", None) == panel]
            records = [param.get_help_record(context) for param in members]
            if lines := [record for record in records if record is not None]:
                with formatter.section(panel or "Arguments"):
                    formatter.write_dl(lines)


def as_command(body: Callable[[Options], Result], options: type[Options]) -> Callable[..., Result]:
    """`body` as Typer wants a command: a keyword parameter for each field of `options`, in help's order."""
    hints = get_type_hints(options, include_extras=True)
    parameters = [
        Parameter(
            entry.name,
            Parameter.KEYWORD_ONLY,
            annotation=hints[entry.name],
            default=_default(entry.default, entry.default_factory),
        )
        for entry in fields(options)
    ]

    def call(**values: object) -> Result:
        return body(options(**values))  # Typer has checked them

    call.__name__, call.__doc__ = body.__name__, body.__doc__
    call.__annotations__ = hints
    call.__signature__ = Signature(sorted(parameters, key=_panel))  # type: ignore[attr-defined]
    return call


def as_arguments(options: SharedOptions) -> list[str]:
    """The command line that gives `options` back: what differs from the defaults."""
    arguments = []
    for entry in fields(options):
        value = getattr(options, entry.name)
        flag = "--" + entry.name.replace("_", "-")
        if value is True:
            arguments.append(flag)
        elif isinstance(value, list):
            arguments += [f"{flag}={one}" for one in value]
        elif value != entry.default:
            arguments.append(f"{flag}={value}")  # in one word, so that a value may begin with a dash
    return arguments


def _default(value: object, factory: object) -> object:
    if callable(factory):
        return factory()
    return Parameter.empty if value is MISSING else value


def _panel(parameter: Parameter) -> int:
    panel = parameter.annotation.__metadata__[0].rich_help_panel
    return _PANELS.index(panel) if panel in _PANELS else len(_PANELS)
