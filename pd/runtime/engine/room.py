"""What one rank's device has, what the model takes of it, and what to say where that is too much. Sizes in bytes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from pd.runtime.config import ConfigError


@dataclass(frozen=True, slots=True)
class Room:
    where: str  # the device, for a person
    free: int  # before the weights
    whole: int
    weights: int  # of this rank
    tp: int

    def check_weights(self) -> None:
        """Raises ConfigError where they do not fit."""
        if self.weights >= self.free:
            raise ConfigError(
                f"the model does not fit: a rank of tp {self.tp} needs {_show(self.weights)} for weights, {self.where} "
                f"has {_show(self.free)} free of {_show(self.whole)}",
                hint="raise --tp, end what else runs on this GPU (nvidia-smi or rocm-smi shows it), or choose another "
                "with CUDA_VISIBLE_DEVICES or HIP_VISIBLE_DEVICES",
            )

    def pool_fault(self, num_pages: int, *, page_size: int, page_nbytes: int, max_model_len: int | None) -> ConfigError:
        """`num_pages` are to be had, and they are too few."""
        needed = -(-(max_model_len or 1) // page_size)
        pages = f"{needed} page{'' if needed == 1 else 's'}"
        wanted = f"max_model_len is {max_model_len}, which takes {pages}" if max_model_len else "at least one is needed"
        return ConfigError(
            f"the KV pool is too small: {num_pages} pages of {page_size} tokens; {wanted}, "
            f"{_show(needed * page_nbytes)} a rank of tp {self.tp}. {self.where} had {_show(self.free)} free before "
            f"{_show(self.weights)} of weights",
            hint="raise --num-pages or --kv-memory, or lower --max-model-len; a larger --tp leaves each rank more room",
        )


def out_of_memory(error: torch.OutOfMemoryError) -> ConfigError:
    """A GPU's allocator has said so: while weights, pool and graphs are made, or in a step."""
    said = str(error).split(" If reserved")[0].split(" Process ")[0]
    return ConfigError(
        said,
        hint="lower --kv-memory (what it leaves is for activations and graphs; 0.9 of what weights leave unless told), "
        "--max-prefill-tokens or --max-running, or end what else runs on this GPU",
    )


def measure(device: torch.device, *, weights: int, tp: int) -> Room:
    """Before the weights are loaded."""
    if device.type == "cuda":
        free, whole = torch.cuda.mem_get_info(device)
        return Room(f"{device} ({torch.cuda.get_device_name(device)})", free, whole, weights, tp)
    free = free_nbytes(device)
    return Room("this host", free, free, weights, tp)


def free_nbytes(device: torch.device) -> int:
    """Raises ConfigError where the system does not tell."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise ConfigError("this system does not tell its free memory", hint="say --num-pages or --kv-memory in bytes")


def _show(nbytes: int) -> str:
    return f"{nbytes / 2**30:.1f} GiB" if nbytes >= 1 << 30 else f"{nbytes / 2**20:.1f} MiB"
