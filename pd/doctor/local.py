"""The machine this process runs on, behind the seam."""

from __future__ import annotations

import gzip
import os
import re
import subprocess
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache

import msgspec

from pd.doctor.asking import Asker
from pd.doctor.machine import Access, Answer, AnswerT, Output, Silence, Space, Why

COMMAND_S = 5.0
"""nvidia-smi with a sleeping driver takes 2 to 3 s."""
ASK_S = 30.0
"""Importing torch from a cold network disk takes tens of seconds; anything longer hangs."""
LARGEST_FILE = 1 << 20
"""Bytes. /proc/sys refuses reads of 4 MiB at once; /proc/kallsyms, which is larger, is searched by a command."""


class ThisMachine:
    """Each command and each library is asked once and remembered: several checks look at the same answer."""

    def __init__(self) -> None:
        self.run = cache(self._run)
        self._ask_once = cache(self._ask)
        self._asker = Asker()
        self._threads = ThreadPoolExecutor(2)
        self._asking: dict[str, Future[bytes | Silence]] = {}

    def close(self) -> None:
        """Ask nothing more, and wait for nobody."""
        self._asker.close()
        self._threads.shutdown(wait=False, cancel_futures=True)

    @property
    def env(self) -> Mapping[str, str]:
        return os.environ

    def read(self, path: str) -> str | None:
        try:
            with gzip.open(path) if path.endswith(".gz") else open(path, "rb") as file:
                return file.read(LARGEST_FILE).decode(errors="replace").strip()
        except OSError:
            return None

    def list(self, path: str) -> tuple[str, ...]:
        try:
            return tuple(sorted(os.listdir(path), key=natural))
        except OSError:
            return ()

    def access(self, path: str) -> Access:
        if not os.path.lexists(path):
            return Access.ABSENT
        if os.access(path, os.R_OK | os.W_OK):
            return Access.READ_WRITE
        return Access.READ if os.access(path, os.R_OK) else Access.DENIED

    def resolve(self, path: str) -> str | None:
        return os.path.realpath(path) if os.path.exists(path) else None

    def space(self, path: str) -> Space | None:
        try:
            found = os.statvfs(path)
        except OSError:
            return None
        return Space(found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize)

    def ask(self, wanted: type[AnswerT], *arguments: str) -> AnswerT | Silence:
        begun = None if arguments else self._asking.get(wanted.module())
        answer = begun.result() if begun else self._ask_once(wanted.module(), *arguments)
        if isinstance(answer, Silence):
            return answer
        try:
            return msgspec.json.decode(answer, type=wanted)
        except msgspec.MsgspecError as error:
            return Silence(Why.FAILED, f"unreadable answer: {error}")

    def foresee(self, *wanted: type[Answer]) -> None:
        """Begin to ask libraries now, beside whatever comes before their answers are needed."""
        for one in wanted:
            self._asking[one.module()] = self._threads.submit(self._ask, one.module())

    def _run(self, *command: str) -> Output | None:
        environment = {**os.environ, "LC_ALL": "C"}
        try:
            done = subprocess.run(
                command, capture_output=True, timeout=COMMAND_S, env=environment, stdin=subprocess.DEVNULL
            )
        except (OSError, subprocess.TimeoutExpired):
            return None
        return Output(done.returncode, (done.stdout + done.stderr).decode(errors="replace").strip())

    def _ask(self, module: str, *arguments: str) -> bytes | Silence:
        return self._asker.ask(module, *arguments, within_s=ASK_S)


def natural(name: str) -> list[tuple[int, str]]:
    """Sort key: runs of digits by value."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name)]
