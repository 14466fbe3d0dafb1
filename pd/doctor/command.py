"""`pd doctor`: options -> checks -> a report and an exit status."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import fields
from itertools import groupby

import msgspec
from rich.console import Console
from rich.text import Text

from pd.doctor.answers import Hosts, Mooncake, Nixl, Packages, Torch
from pd.doctor.catalog import CHECKS, HEADINGS
from pd.doctor.check import Check, Examined, examine, select
from pd.doctor.checks.needs import Launch, needs_checks
from pd.doctor.checks.peer import peer_checks
from pd.doctor.facts import gather
from pd.doctor.local import ThisMachine
from pd.doctor.machine import Machine
from pd.doctor.options import DoctorOptions
from pd.doctor.peer.serve import Service
from pd.doctor.peer.visit import parse
from pd.doctor.report import explain, group_report, summary
from pd.doctor.result import Status
from pd.runtime.config import ConfigError

READY, NOT_READY = 0, 1
"""Exit statuses; wrong use is a ConfigError, which the command line turns into 2."""


def doctor(options: DoctorOptions) -> int:
    """Run the command. Raises ConfigError for wrong use."""
    checks = _chosen(options)
    console = _console()
    if options.explain:
        explain(_find(options.explain, checks), console)
        return READY
    with contextlib.closing(ThisMachine()) as machine:
        if options.serve:
            return _serve(options, machine, console)
        return _look(options, checks, machine, console)


def _look(options: DoctorOptions, checks: Sequence[Check], machine: ThisMachine, console: Console) -> int:
    began = time.monotonic()
    if len(checks) == len(CHECKS):  # a whole run needs them all
        machine.foresee(Torch, Nixl, Packages, Hosts, Mooncake)
    examined = _run_silently(checks, machine) if options.json else _run(checks, machine, console, options.verbose)
    if options.json:
        sys.stdout.write(as_json(examined) + "\n")
    else:
        console.print()
        console.print(summary(examined, time.monotonic() - began))
    return NOT_READY if any(e.result.status is Status.FAIL for e in examined) else READY


def as_json(examined: Sequence[Examined]) -> str:
    """An object: ready, and a list of checks with everything that the report would show."""
    rows = [
        {
            "check": e.check.id,
            "title": e.check.title,
            "status": e.result.status.value,
            "read": e.result.read,
            "means": e.result.means,
            "fix": e.result.fix,
            "details": e.result.details,
            "seconds": round(e.seconds, 4),
        }
        for e in examined
    ]
    ready = all(e.result.status is not Status.FAIL for e in examined)
    return msgspec.json.format(msgspec.json.encode({"ready": ready, "checks": rows}), indent=2).decode()


def _chosen(options: DoctorOptions) -> tuple[Check, ...]:
    """A visit or a model narrows the run to itself, unless --only says more."""
    named = [name.strip() for name in (options.only or "").split(",") if name.strip()]
    only = [name for word in named for name in _SEVERAL.get(word, (word,))]
    if faults := list(_misplaced(options, only)):
        raise ConfigError(*faults, hint="pd doctor --help")
    extra: tuple[Check, ...] = ()
    try:
        if options.peer:
            parse(options.peer)
            extra += peer_checks(options.peer)
        if options.model:
            launch = Launch(options.model, options.role, options.tp, options.page_size, options.kv_cache_dtype)
            extra += needs_checks(launch)
        if extra and not only and not options.explain:
            return extra
        if options.explain and not extra:
            extra = (*peer_checks("HOST"), *needs_checks(Launch("MODEL", "colocated", 1, 16)))
        return select((*CHECKS, *extra), only, others=("gpu (both)", "peer (with --peer)", "model (with --model)"))
    except ValueError as error:
        raise ConfigError(str(error), hint="pd doctor --help") from error


_SEVERAL = {"gpu": ("nvidia", "amd")}
"""Words for several groups."""
_OF = {"serve": ("host", "port"), "model": ("role", "tp", "page_size")}
"""Options that say something of another one."""


def _misplaced(options: DoctorOptions, only: Sequence[str]) -> Iterator[str]:
    """What would be ignored in silence."""
    for entry in fields(options):
        for owner, names in _OF.items():
            if entry.name in names and not getattr(options, owner) and getattr(options, entry.name) != entry.default:
                yield f"--{entry.name.replace('_', '-')} is of --{owner}, which is not given"
    if options.serve and options.peer:
        yield "--serve and --peer exclude each other: one host serves, the other visits it"
    for group, value in (("peer", options.peer), ("model", options.model)):
        if not value and (named := [name for name in only if name.partition(".")[0] == group]):
            yield f"--only {','.join(named)} needs --{group}"


def _find(name: str, checks: Sequence[Check]) -> Check:
    for check in checks:
        if check.id == name:
            return check
    near = [c.id for c in checks if name in c.id or c.group == name.partition(".")[0]]
    raise ConfigError(f"no check {name!r}", hint="one of " + ", ".join(near or sorted({c.group for c in checks})))


def _console() -> Console:
    """No colour where NO_COLOR is set or standard output is no terminal; COLUMNS is obeyed."""
    return Console(highlight=False, no_color=True if os.environ.get("NO_COLOR") else None, soft_wrap=False)


def _run_silently(checks: Sequence[Check], machine: Machine) -> list[Examined]:
    return [examine(check, machine) for check in checks]


def _run(checks: Sequence[Check], machine: Machine, console: Console, verbose: bool) -> list[Examined]:
    """Each group is printed when its last check is done; what runs now is shown below on a terminal."""
    done: list[Examined] = []
    for group, members in groupby(checks, key=lambda c: c.group):
        found = []
        with console.status("") as status:
            for check in members:
                status.update(Text(f"{HEADINGS.get(group, group)}: {check.title}", style="dim"))
                found.append(examine(check, machine))
        console.print(group_report(group, found, verbose=verbose))
        done += found
    return done


def _serve(options: DoctorOptions, machine: Machine, console: Console) -> int:
    try:
        service = Service(options.host, options.port, gather(machine))
    except OSError as error:
        fault = f"cannot listen on {options.host}:{options.port}: {error.strerror or error}"
        raise ConfigError(fault, hint="--host takes an address of this host, --port a free port") from error
    host, port = service.address
    console.print(f"serving on {host}:{port}; on the other host: pd doctor --peer {host}:{port}")
    console.print("anyone who reaches this port can read versions and make this host receive data; Ctrl-C ends it")
    try:
        service.serve()
    except KeyboardInterrupt:
        service.close()
    return READY
