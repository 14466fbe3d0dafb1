"""Reads one rank's slices of a Hugging Face safetensors checkpoint.

Rules
1. Names and shapes are checked from the files' headers before a byte of weights is read; all faults at once.
2. A slice is read as a slice: a rank never holds another's part, not even for a moment.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from pd.runtime.config import ConfigError
from pd.runtime.engine.shards import Part

log = logging.getLogger("pd.weights")

INDEX = "model.safetensors.index.json"
SHOWN_FAULTS = 8
MAX_SAMPLED = 1024
"""Tensors that a fingerprint looks into: 0.1 s, where all of a large mixture of experts, 90,000, would take minutes of
a network's file system. Training for longer changes nearly all tensors; merged adapters change a kind of them in every
layer, and of such models up to 1024 tensors are looked at each."""
FLOAT8, SCALES = "F8_E4M3", "_scale_inv"
"""A float8 weight is itself times its scales, one a block of it, in a tensor of its name and this behind it."""
DTYPES: Mapping[str, torch.dtype] = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
"""What safetensors call the element types we read."""


class Header(NamedTuple):
    file: Path
    dtype: str  # safetensors' word
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The headers of a directory's safetensors, by tensor name."""

    directory: Path
    headers: Mapping[str, Header]

    def check(self, needed: Mapping[str, Part], unread: tuple[str, ...] = ()) -> None:
        """Raises ConfigError naming tensors that are missing, of another shape, or of a type we do not read.

        Warns of those that are not needed, but for those whose names begin as `unread` says.
        """
        faults = [fault for name, part in needed.items() if (fault := self._fault(name, part))]
        if faults:
            more = [f"and {len(faults) - SHOWN_FAULTS} more"] if len(faults) > SHOWN_FAULTS else []
            raise ConfigError(
                *(f"{self.directory}: {fault}" for fault in faults[:SHOWN_FAULTS]),
                *more,
                hint="config.json and the safetensors do not belong together, or the download is incomplete",
            )
        if unused := [name for name in self._unused(needed) if not name.startswith(unread)]:
            log.warning("%s: %d tensors are not used, %s first", self.directory, len(unused), unused[0])

    def fingerprint(self, about: str) -> str:
        """16 hex digits over `about`, every tensor's name, type and shape, and some of what is in them: that alone
        tells two revisions of a model apart."""
        told = [about, *(f"{n} {h.dtype} {h.shape}" for n, h in sorted(self.headers.items()))]
        told += (f"{name} {digest}" for name, digest in sorted(self._samples()))
        return hashlib.sha256("\n".join(told).encode()).hexdigest()[:16]

    def _samples(self) -> Iterator[tuple[str, str]]:
        """Name and hash of the row in the middle of each tensor, or of MAX_SAMPLED that their names' hashes choose."""
        read = (*DTYPES, FLOAT8)
        names = sorted(name for name, header in self.headers.items() if header.dtype in read and header.shape)
        chosen = sorted(names, key=lambda name: hashlib.sha256(name.encode()).digest())[:MAX_SAMPLED]
        by_file = sorted(chosen, key=lambda name: self.headers[name].file)
        for file, some in itertools.groupby(by_file, key=lambda name: self.headers[name].file):
            with safe_open(file, framework="pt") as source:
                for name in some:
                    middle = [slice(size // 2, size // 2 + 1) for size in self.headers[name].shape[:-1]]
                    row = source.get_slice(name)[(*middle, slice(None))].contiguous()
                    yield name, hashlib.sha256(row.view(torch.uint8).numpy()).hexdigest()

    def _fault(self, name: str, part: Part) -> str | None:
        header = self.headers.get(name)
        if header is None:
            return f"tensor {name} is missing"
        if header.shape != part.shape:
            return f"tensor {name} has shape {list(header.shape)}, config.json says {list(part.shape)}"
        if header.dtype == FLOAT8 and part.scale_block is not None:
            blocks = tuple(-(-size // by) for size, by in zip(part.shape, part.scale_block, strict=True))
            scales = self.headers.get(name + SCALES)
            if scales is None or scales.shape != blocks or scales.dtype not in DTYPES:
                there = "missing" if scales is None else f"{scales.dtype} {list(scales.shape)}"
                return f"tensor {name + SCALES}, of shape {list(blocks)} to go with float8, is {there}"
            return None
        if header.dtype not in DTYPES:
            return f"tensor {name} is of type {header.dtype}; {', '.join(DTYPES)} are supported"
        return None

    def _unused(self, needed: Mapping[str, Part]) -> list[str]:
        harmless = ("rotary_emb.inv_freq", "lm_head.weight")
        used = needed.keys() | {name + SCALES for name, part in needed.items() if part.scale_block is not None}
        return [name for name in self.headers if name not in used and not name.endswith(harmless)]


def open_checkpoint(directory: Path) -> Checkpoint:
    """Read the headers. Raises ConfigError if there are no safetensors or one cannot be read."""
    headers: dict[str, Header] = {}
    for file in _files(directory):
        try:
            with safe_open(file, framework="pt") as source:
                for name in source.keys():  # noqa: SIM118 - not a dict
                    part = source.get_slice(name)
                    headers[name] = Header(file, part.get_dtype(), tuple(part.get_shape()))
        except (OSError, SafetensorError) as error:
            raise ConfigError(f"{file} cannot be read: {error}", hint="download it again") from error
    return Checkpoint(directory, headers)


def _files(directory: Path) -> list[Path]:
    index = directory / INDEX
    if index.exists():
        try:
            names = sorted(set(json.loads(index.read_bytes())["weight_map"].values()))
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            raise ConfigError(f"{index} is no safetensors index: {error!r}") from error
        if missing := [name for name in names if not (directory / name).exists()]:
            raise ConfigError(*(f"{directory} has no {name}, which its index names" for name in missing))
        return [directory / name for name in names]
    if files := sorted(directory.glob("*.safetensors")):
        return files
    others = sorted(p.name for pattern in ("*.bin", "*.gguf", "*.pth") for p in directory.glob(pattern))
    found = f", only {', '.join(others[:3])}" if others else ""
    raise ConfigError(
        f"{directory} holds no *.safetensors{found}",
        hint="weights are read from safetensors alone: save_pretrained of transformers writes them",
    )


class Reader:
    """Reads a rank's parts, one by one, as tensors of one dtype, or float32 if they are wide.

    A context manager: it owns the open files.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        needed: Mapping[str, Part],
        *,
        dtype: torch.dtype,
        device: torch.device,
        report: Callable[[int, int], None],
    ) -> None:
        self._checkpoint = checkpoint
        self._needed = needed
        self._dtype = dtype
        self._device = device
        self._report = report
        self._done = 0
        self._total = sum(part.nbytes(dtype.itemsize) for part in needed.values())
        self._stack = contextlib.ExitStack()
        self._sources: dict[Path, safe_open] = {}

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    @property
    def nbytes(self) -> int:
        """Of all parts, in the model's dtype."""
        return self._total

    def read(self, name: str) -> Tensor:
        """This rank's part of a tensor."""
        return self.stack([name])

    def stack(self, names: Iterable[str]) -> Tensor:
        """This rank's parts of several tensors, one below the other in a new tensor."""
        stacked = torch.cat([self._slice(name) for name in names])
        self._done += stacked.nbytes
        self._report(self._done, self._total)
        return stacked.to(self._device)

    def find(self, names: Iterable[str]) -> Tensor | None:
        """As `stack`, where this rank has any of it; None where the model has no such tensors or it is another's."""
        held = [name for name in names if name in self._needed and self._needed[name].held]
        return self.stack(held) if held else None

    def _slice(self, name: str) -> Tensor:
        header, part = self._checkpoint.headers[name], self._needed[name]
        source = self._open(header.file).get_slice(name)  # type: ignore[no-untyped-call]
        held = slice(part.held.start, part.held.stop)
        taken: Tensor = source[held] if part.dim == 0 else source[:, held]
        if header.dtype == FLOAT8:
            taken = taken.to(torch.float32) * self._scales(name, part)
        return taken.to(torch.float32 if part.is_wide else self._dtype)

    def _scales(self, name: str, part: Part) -> Tensor:
        """Of every element that is held."""
        assert part.scale_block is not None
        file = self._checkpoint.headers[name + SCALES].file
        scales: Tensor = self._open(file).get_tensor(name + SCALES).to(torch.float32)  # type: ignore[no-untyped-call]
        held = [part.held if dim == part.dim else range(size) for dim, size in enumerate(part.shape)]
        rows, columns = (torch.arange(r.start, r.stop) // by for r, by in zip(held, part.scale_block, strict=True))
        return scales[rows][:, columns]

    def _open(self, file: Path) -> safe_open:
        if file not in self._sources:
            self._sources[file] = self._stack.enter_context(safe_open(file, framework="pt"))
        return self._sources[file]
