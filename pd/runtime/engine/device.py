"""Which device a rank computes on, and making it a thread's own."""

from __future__ import annotations

import torch

from pd.runtime.config import ConfigError


def device_of(word: str, rank: int) -> torch.device:
    """Raises ConfigError for a word that is none, or a GPU that is not there."""
    has_gpu = torch.cuda.is_available()
    match word:
        case "cpu":
            return torch.device("cpu")
        case "auto" if not has_gpu:
            return torch.device("cpu")
        case "auto" | "cuda" if has_gpu:
            num_gpus = torch.cuda.device_count()
            if rank >= num_gpus:
                raise ConfigError(
                    f"rank {rank} has no GPU of its own: torch sees {num_gpus}, and two ranks of one instance cannot "
                    "share one",
                    hint="a smaller --tp, or more GPUs in CUDA_VISIBLE_DEVICES or HIP_VISIBLE_DEVICES",
                )
            return torch.device("cuda", rank)
        case "cuda":
            raise ConfigError(
                f"device cuda: torch {torch.__version__} sees no GPU",
                hint="--device cpu, or a torch built for CUDA or ROCm on a machine that has one",
            )
        case _:
            raise ConfigError(f"device {word!r} is unknown", hint="auto, cpu or cuda (also ROCm's)")


def enter(device: torch.device) -> None:
    """Make a GPU this thread's own: each thread begins with the first one, where it would leave a context of half a
    GiB and where libraries that ask for the current device would look for our memory. Nothing on a CPU.
    """
    if device.type == "cuda":
        torch.cuda.set_device(device)
        torch.cuda.current_stream().synchronize()  # the context is made now, before a library asks for it
