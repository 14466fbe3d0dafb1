"""The command line: options -> configuration -> a role.

What a command needs is imported when it runs, so that help comes at once.
"""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Annotated, Any, cast

import typer
from typer.core import TyperGroup
from typer.main import get_command

import pd
from pd.cli_bench import bench
from pd.cli_options import GroupedHelp, LaunchOptions, ServeOptions, as_command
from pd.doctor.options import DoctorOptions

WRONG_USE = 2
"""Exit status for what a person can mend; the supervisor does not restart after it."""
_UsageError = cast(type[typer.BadParameter], typer.BadParameter.__bases__[0])
"""Of whichever Click is beneath Typer."""

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
"""Without Rich's markup: its help takes 0.2 s more, which is what all the rest of `pd --help` takes."""


_NO_FAREWELL = {"nixl", "mooncake"}
"""With the vendors' verbs libraries loaded, UCX crashes in the interpreter's own farewell, and the status were that."""


def main() -> None:
    """Run the command in sys.argv and exit."""
    arguments = _with_empty_spec(sys.argv[1:])
    if "--help" in arguments or _is_group(arguments):
        typer.echo(help_text(arguments))
        sys.exit(0)
    status = _run(arguments)
    if _NO_FAREWELL & sys.modules.keys():
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    sys.exit(status)


def help_text(arguments: list[str]) -> str:
    """Help for the command that `arguments` begin with.

    Made without parsing them, for which Typer imports pydantic: another 0.1 s.
    """
    command: Any = get_command(app)
    context = typer.Context(command, info_name="pd")
    for word in _named(arguments):
        command = command.commands[word]
        context = typer.Context(command, info_name=word, parent=context)
    return str(command.get_help(context))


def _named(arguments: list[str]) -> list[str]:
    """The words of `arguments` that name a command: `serve`, or `bench` and one of its commands."""
    command, words = get_command(app), []
    for word in arguments:
        if not isinstance(command, TyperGroup) or word not in command.commands:
            break
        command = command.commands[word]
        words.append(word)
    return words


def _is_group(arguments: list[str]) -> bool:
    """Whether nothing, or a group alone, was said: then help is the answer."""
    return arguments in ([], ["bench"])


def _run(arguments: list[str]) -> int:
    """Exit status of the command; a person's mistakes are told here."""
    from pd.runtime.config import ConfigError

    try:
        chosen = _chosen(arguments)
        return int(chosen() if callable(chosen) else chosen or 0)
    except _UsageError as error:
        _complain([error.format_message()], hint=" ".join(["pd", *_named(arguments), "--help"]))
        return WRONG_USE
    except ConfigError as error:
        _complain(str(error).splitlines(), hint=error.hint)
        return WRONG_USE
    except (typer.Abort, KeyboardInterrupt):
        return 130


def _chosen(arguments: list[str]) -> Any:
    """What the command is to run, imported: looking for garbage in what imports make is a quarter of a start."""
    gc.disable()
    try:
        return app(arguments, prog_name="pd", standalone_mode=False)
    finally:
        gc.freeze()  # it stays: no collection looks through it later either
        gc.enable()


# A command chooses what to run and leaves it to `_run`: so a traceback holds none of Typer's fifteen frames.


def _launch(options: LaunchOptions) -> Callable[[], int]:
    """Run one process group: a router, or a prefill, decode or colocated instance."""
    from pd.cli_config import launch_config
    from pd.runtime.config import RouterConfig

    config = launch_config(options)
    if isinstance(config, RouterConfig):
        from pd.runtime.roles import router

        return partial(router.run, config)
    _warn_of_machine()
    from pd.runtime.roles import instance

    return partial(instance.run, config)


def _serve(options: ServeOptions) -> Callable[[], int]:
    """Serve a model on this machine: a router and instances, kept alive until Ctrl-C."""
    from pd.cli_layout import serve_config
    from pd.runtime.roles import supervisor

    return partial(supervisor.run, serve_config(options))


def _doctor(options: DoctorOptions) -> Callable[[], int]:
    """Say whether this machine will serve and how fast, and what mends what is wrong."""
    from pd.doctor.command import doctor

    return partial(doctor, options)


def _key(file: Annotated[Path, typer.Argument(metavar="FILE", help="A file that does not exist yet.")]) -> None:
    """Make a key for --cluster-key: a new file that its owner alone can read."""
    from pd.runtime.keys import make_cluster_key

    make_cluster_key(file)
    typer.echo(f"{file} holds a new cluster key: give every process --cluster-key {file}")


def _drain(
    name: Annotated[str, typer.Argument(metavar="NAME", help="The instance's, as /state shows it.")],
    router: Annotated[
        str, typer.Option(metavar="tcp://HOST:PORT", help="Where instances meet the router.")
    ] = "tcp://127.0.0.1:8500",
    cluster_key: Annotated[str | None, typer.Option(metavar="FILE", help="The cluster's key, if it has one.")] = None,
) -> Callable[[], int]:
    """Have an instance take nothing new, end what it runs, and leave; wait until it has."""
    from pd.runtime.roles.operator import drain

    return partial(drain, name, router=router, cluster_key=cluster_key)


app.command("serve", cls=GroupedHelp)(as_command(_serve, ServeOptions))
app.command("launch", cls=GroupedHelp)(as_command(_launch, LaunchOptions))
app.command("doctor", cls=GroupedHelp)(as_command(_doctor, DoctorOptions))
app.command("drain")(_drain)
app.command("key")(_key)
app.add_typer(bench, name="bench")


@app.callback(invoke_without_command=True)
def _pd(
    version: Annotated[bool, typer.Option("--version", help="Show the version.", is_eager=True)] = False,
) -> None:
    """Serve large language models with prefill and decode apart."""
    if version:
        typer.echo(f"pd {pd.__version__}")
        raise typer.Exit


def _with_empty_spec(arguments: list[str]) -> list[str]:
    """A bare `--colocated` means `--colocated=`: Typer knows no option whose value may be left out."""
    return [
        f"{word}=" if word == "--colocated" and ("=" not in after or after.startswith("-")) else word
        for word, after in zip(arguments, [*arguments[1:], ""], strict=False)
    ]


def _warn_of_machine() -> None:
    """What this machine lacks, before it shows as something else."""
    from pd.doctor.at_start import warnings
    from pd.doctor.local import ThisMachine

    for warning in warnings(ThisMachine()):
        typer.echo(f"warning: {warning}", err=True)


def _complain(faults: Iterable[str], *, hint: str) -> None:
    """`error:` lines, a blank line, `hint:`, on standard error."""
    from rich.console import Console

    console = Console(stderr=True, highlight=False, soft_wrap=True)
    for fault in faults:
        console.print("[bold red]error[/]:", end=" ")
        console.print(fault, markup=False)
    if hint:
        console.print("\n[bold cyan]hint[/]:", end=" ")
        console.print(hint, markup=False)


if __name__ == "__main__":
    main()
