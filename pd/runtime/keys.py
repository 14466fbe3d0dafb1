"""Secrets in files: the cluster's key, and the keys that clients of the HTTP API show.

A file of secrets may be readable by its owner alone: whoever reads it can stand in for any process of the cluster.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import stat
from pathlib import Path

from pd.runtime.config import ConfigError

KEY_NBYTES = 32
_PREFIX = "pd-cluster-key-1 "
_MAX_FILE_NBYTES = 1 << 16
_MIN_API_KEY = 16
"""Characters: shorter ones can be guessed."""


def make_cluster_key(path: Path) -> None:
    """Write a new key into a new file of mode 600. Raises ConfigError if the file exists or cannot be written."""
    try:
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError as error:
        raise ConfigError(
            f"{path} exists", hint="a key in use is not written over: remove it first, or name another file"
        ) from error
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from error
    with os.fdopen(handle, "w") as file:
        file.write(f"{_PREFIX}{secrets.token_hex(KEY_NBYTES)}\n")


def read_cluster_key(path: str | None) -> bytes | None:
    """KEY_NBYTES; None where no file is named. Raises ConfigError."""
    if path is None:
        return None
    text = _read(Path(path), "--cluster-key")
    try:
        key = bytes.fromhex(text.strip().removeprefix(_PREFIX))
    except ValueError:
        key = b""
    if not text.startswith(_PREFIX) or len(key) != KEY_NBYTES:
        raise ConfigError(f"--cluster-key {path} holds no cluster key", hint=f"pd key {path}.new makes one")
    return key


def read_api_keys(path: str | None) -> tuple[str, ...]:
    """One a line, blank lines and those that begin with # left out; empty where no file is named.

    Raises ConfigError.
    """
    if path is None:
        return ()
    lines = [line.strip() for line in _read(Path(path), "--api-key-file").splitlines()]
    keys = tuple(line for line in lines if line and not line.startswith("#"))
    if not keys:
        raise ConfigError(f"--api-key-file {path} holds no key", hint="write one key a line")
    if any(len(key) < _MIN_API_KEY or not key.isascii() or " " in key for key in keys):
        raise ConfigError(
            f"--api-key-file {path}: a key has at least {_MIN_API_KEY} ASCII characters and no space",
            hint="openssl rand -hex 24 makes one",
        )
    return keys


def derived(key: bytes, purpose: str) -> bytes:
    """A key of KEY_NBYTES for one purpose, of up to 16 characters: one that is learnt tells nothing of the others."""
    return hashlib.blake2b(key, digest_size=KEY_NBYTES, person=purpose.encode()).digest()


def _read(path: Path, option: str) -> str:
    try:
        with path.open("rb") as file:
            mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
            data = file.read(_MAX_FILE_NBYTES + 1)
        text = data.decode()
    except OSError as error:
        hint = f"pd key {path} makes one" if isinstance(error, FileNotFoundError) and "cluster" in option else ""
        raise ConfigError(f"{option}: cannot read {path}: {error.strerror}", hint=hint) from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{option}: {path} is no text") from error
    if mode & 0o077:
        raise ConfigError(f"{option}: {path} may be read by others (mode {mode:03o})", hint=f"chmod 600 {path}")
    if len(data) > _MAX_FILE_NBYTES:
        raise ConfigError(f"{option}: {path} has more than {_MAX_FILE_NBYTES} bytes")
    return text
