"""A machine written down: a JSON file of what the checks would read. For tests, and for machines nobody here has.

Keys of the file (all but `about` and `sources` optional)
  about      one sentence: which machine
  sources    where its texts come from, and what was composed from documentation
  like       another file beside it, to start from; this file's entries then replace that one's
  without    path prefixes, command prefixes and variables of `like` that this machine lacks
  files      path -> text. Folders follow from the paths. A `{0..7}` or `{a,b}` in a key stands for each
  links      path -> where it leads
  access     path -> absent | denied | read | read-write (files: read; /dev entries say theirs)
  space      path -> [bytes, bytes free]
  commands   "command and arguments" -> [exit code, output]
  answers    "module arguments" -> the answer, or {"why": missing | failed | crashed | slow, "reason": text}
  env        variables
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TypeVar

import msgspec

from pd.doctor.local import natural
from pd.doctor.machine import Access, AnswerT, Output, Silence, Space, Why

V = TypeVar("V")


class Recording(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    about: str
    sources: tuple[str, ...]
    like: str | None = None
    without: tuple[str, ...] = ()
    files: dict[str, str] = {}
    links: dict[str, str] = {}
    access: dict[str, Access] = {}
    space: dict[str, Space] = {}
    commands: dict[str, Output] = {}
    answers: dict[str, msgspec.Raw] = {}
    env: dict[str, str] = {}
    expect: dict[str, tuple[str, ...]] = {}
    """Check id -> status, then words that the result must hold."""


class Recorded:
    """Answers from a `Recording`; what it does not mention is not there."""

    def __init__(self, recording: Recording) -> None:
        self._recording = recording
        self._folders: dict[str, set[str]] = {}
        for path in (*recording.files, *recording.links, *recording.access):
            parts = path.split("/")
            for depth in range(1, len(parts)):
                self._folders.setdefault("/".join(parts[:depth]), set()).add(parts[depth])

    @property
    def env(self) -> Mapping[str, str]:
        return self._recording.env

    def read(self, path: str) -> str | None:
        for candidate in (path, self._followed(path)):
            if candidate in self._recording.files and self.access(candidate) is not Access.DENIED:
                return self._recording.files[candidate].strip()
        return None

    def list(self, path: str) -> tuple[str, ...]:
        names = self._folders.get(path.rstrip("/"), set()) | self._folders.get(self._followed(path).rstrip("/"), set())
        return tuple(sorted(names, key=natural))

    def access(self, path: str) -> Access:
        if path in self._recording.access:
            return self._recording.access[path]
        return Access.READ if self._is_known(path) else Access.ABSENT

    def resolve(self, path: str) -> str | None:
        followed = self._followed(path)
        return followed if followed != path or self._is_known(path) else None

    def _followed(self, path: str) -> str:
        """The longest linked prefix is followed, once."""
        parts = path.split("/")
        for depth in range(len(parts), 1, -1):
            target = self._recording.links.get("/".join(parts[:depth]))
            if target is not None:
                return "/".join([target, *parts[depth:]])
        return path

    def _is_known(self, path: str) -> bool:
        folder, _, name = path.rpartition("/")
        return name in self._folders.get(folder, ()) or path.rstrip("/") in self._folders

    def space(self, path: str) -> Space | None:
        return self._recording.space.get(path)

    def run(self, *command: str) -> Output | None:
        return self._recording.commands.get(" ".join(command))

    def ask(self, wanted: type[AnswerT], *arguments: str) -> AnswerT | Silence:
        raw = self._recording.answers.get(" ".join((wanted.module(), *arguments)))
        if raw is None:
            return Silence(Why.MISSING, f"No module named {wanted.module()}")
        if b'"why"' in bytes(raw):
            return msgspec.json.decode(raw, type=Silence)
        return msgspec.json.decode(raw, type=wanted)


def load(path: Path) -> Recording:
    """Read a file and what it is `like`. Raises msgspec.ValidationError, naming the key, for a malformed one."""
    recording = msgspec.json.decode(path.read_bytes(), type=Recording)
    files = dict(_expanded(recording.files))
    mine = msgspec.structs.replace(
        recording, files=files, links=dict(_expanded(recording.links)), access=dict(_expanded(recording.access))
    )
    if recording.like is None:
        return mine
    base = load(path.parent / recording.like)
    gone = recording.without
    merged = {
        name: {**_kept(getattr(base, name), gone), **getattr(mine, name)}
        for name in ("files", "links", "access", "space", "commands", "answers", "env")
    }
    return msgspec.structs.replace(mine, **merged)


def _kept(entries: dict[str, V], gone: tuple[str, ...]) -> dict[str, V]:
    return {key: value for key, value in entries.items() if not key.startswith(gone)} if gone else entries


def _expanded(entries: dict[str, V]) -> Iterator[tuple[str, V]]:
    for key, value in entries.items():
        for one in _brace(key):
            yield one, value


def _brace(text: str) -> Iterator[str]:
    """`a{0..2}b` -> a0b a1b a2b; `a{x,y}` -> ax ay; several braces combine."""
    found = re.search(r"\{(?:(\d+)\.\.(\d+)|([^{}]*,[^{}]*))\}", text)
    if found is None:
        yield text
        return
    first, last, names = found.groups()
    each = names.split(",") if names else [str(i) for i in range(int(first), int(last) + 1)]
    for one in each:
        yield from _brace(text[: found.start()] + one + text[found.end() :])
