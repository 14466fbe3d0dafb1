"""Results as JSON lines: the first says what was run and where, the others what was seen. Pure but for the file."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import msgspec

from pd.runtime.config import ConfigError

FORMAT = 1
"""Of the lines; a reader refuses others."""


class Lines:
    """A file that grows by a line a result, each written out at once: what is interrupted keeps what it has. The first
    line replaces what was there."""

    def __init__(self, file: IO[bytes] | None, path: str = "") -> None:
        self._file = file
        self._path = path
        self._has_begun = False

    def put(self, kind: str, **values: object) -> None:
        """Raises ConfigError where it cannot be written."""
        if self._file is None:
            return
        try:
            self._write(self._file, msgspec.json.encode({"kind": kind, **values}) + b"\n")
        except OSError as error:
            raise ConfigError(f"cannot write {self._path}: {error.strerror}") from error

    def _write(self, file: IO[bytes], line: bytes) -> None:
        if not self._has_begun and stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            file.truncate()
        self._has_begun = True
        while line:
            line = line[file.write(line) :]


@contextlib.contextmanager
def written(path: str | None) -> Iterator[Lines]:
    """Lines into `path`; into nothing for None. Raises ConfigError before anything is measured, and leaves alone what
    was there until the first line: a run that does not begin takes no results away."""
    if path is None:
        yield Lines(None)
        return
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o666)
    except OSError as error:
        raise ConfigError(
            f"cannot write {path}: {error.strerror}", hint="--output takes a file in a folder that exists"
        ) from error
    with open(descriptor, "wb", buffering=0) as file:  # what could not be written is not tried again at its end
        yield Lines(file, path)


def read(path: Path) -> list[dict[str, object]]:
    """Every line of a result. Raises ValueError naming the line that is none."""
    found: list[dict[str, object]] = []
    for number, line in enumerate(path.read_bytes().splitlines(), 1):
        if not line.strip():
            continue
        try:
            value = msgspec.json.decode(line, type=dict[str, object])
        except (msgspec.DecodeError, msgspec.ValidationError) as error:
            raise ValueError(f"{path}:{number}: no JSON object: {error}") from error
        if "kind" not in value:
            raise ValueError(f"{path}:{number}: no result of pd bench: it has no kind")
        found.append(value)
    if not found:
        raise ValueError(f"{path} is empty")
    if found[0].get("format", FORMAT) != FORMAT:
        raise ValueError(f"{path}: format {found[0]['format']}, this pd reads {FORMAT}")
    return found
