"""Writes down what the checks read on this machine: `python -m tests.doctor.record ABOUT > machines/name.json`."""

from __future__ import annotations

import sys
from collections.abc import Mapping

import msgspec

from pd.doctor.catalog import CHECKS
from pd.doctor.check import examine
from pd.doctor.local import ThisMachine
from pd.doctor.machine import Access, AnswerT, Output, Silence, Space


class Recorder:
    """Passes everything on to this machine, and keeps what was there."""

    def __init__(self) -> None:
        self._machine = ThisMachine()
        self.found: dict[str, dict[str, object]] = {
            key: {} for key in ("files", "links", "access", "space", "commands", "answers")
        }

    @property
    def env(self) -> Mapping[str, str]:
        return {}

    def read(self, path: str) -> str | None:
        text = self._machine.read(path)
        if text is not None:
            self.found["files"][path] = text
        return text

    def list(self, path: str) -> tuple[str, ...]:
        names = self._machine.list(path)
        for name in names:
            self.found["access"].setdefault(f"{path.rstrip('/')}/{name}", Access.READ)
        return names

    def access(self, path: str) -> Access:
        access = self._machine.access(path)
        if access is not Access.ABSENT:
            self.found["access"][path] = access
        return access

    def resolve(self, path: str) -> str | None:
        where = self._machine.resolve(path)
        if where is not None and where != path:
            self.found["links"][path] = where
        return where

    def space(self, path: str) -> Space | None:
        space = self._machine.space(path)
        if space is not None:
            self.found["space"][path] = space
        return space

    def run(self, *command: str) -> Output | None:
        output = self._machine.run(*command)
        if output is not None:
            self.found["commands"][" ".join(command)] = output
        return output

    def ask(self, wanted: type[AnswerT], *arguments: str) -> AnswerT | Silence:
        answer = self._machine.ask(wanted, *arguments)
        self.found["answers"][" ".join((wanted.module(), *arguments))] = answer
        return answer


def main() -> None:
    recorder = Recorder()
    for check in CHECKS:
        examine(check, recorder)
    written = {"about": sys.argv[1], "sources": ["recorded by tests/doctor/record.py"], **recorder.found}
    sys.stdout.buffer.write(msgspec.json.format(msgspec.json.encode(written), indent=1) + b"\n")


if __name__ == "__main__":
    main()
