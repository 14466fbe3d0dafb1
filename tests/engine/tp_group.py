"""A group of ranks as processes, for tests: `python -m tests.engine.tp_group WHAT TP RENDEZVOUS` prints JSON, a list
with what each rank tells. WHAT is a checkpoint, to answer prompts with, or `gloo` or `auto`: the mesh to try.

A program of its own, which forks its ranks once torch is imported: importing it in each takes longer than all they
compute. It has no threads yet when it forks.
"""

from __future__ import annotations

import json
import multiprocessing
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import torch

from pd.runtime.engine.mesh import Distributed, Mesh, make_mesh
from tests.engine.driving import build_engine, generate, ids_of, prompt_of, rank_config

NUM_TOKENS = 5
PROMPTS = {(): prompt_of(1, seed=1, vocab_size=283), (10,): prompt_of(21, seed=2, vocab_size=283)}
"""By the lengths of the pieces that come before the last."""


def answers(checkpoint: Path, rank: int, tp: int, rendezvous: str) -> list[list[int]]:
    """Greedy tokens to each prompt."""
    engine = build_engine(rank_config(checkpoint, rank=rank, tp=tp, rendezvous=rendezvous))
    try:
        return [ids_of(generate(engine, prompt, NUM_TOKENS, pieces=pieces)) for pieces, prompt in PROMPTS.items()]
    finally:
        engine.close()


def collectives(what: str, rank: int, tp: int, rendezvous: str) -> list[object]:
    """One of each; every rank's numbers are its own."""
    device = torch.device("cpu")
    if what == "gloo":
        mesh: Mesh = Distributed(tp, rank, device=device, rendezvous=rendezvous)
    else:
        mesh = make_mesh(tp, rank, like=torch.empty(0), rendezvous=rendezvous)
    summed = [mesh.all_reduce(torch.arange(float(size)) + rank).tolist() for size in (1, 5)]
    gathered = mesh.gather_to_first(torch.tensor([[rank, 7.0], [rank + 0.5, 8.0]]))
    told = mesh.broadcast(torch.tensor([40 + rank, 50 + rank])).tolist()
    least = mesh.minimum(100 - rank)
    mesh.close()
    return [summed, None if gathered is None else gathered.tolist(), told, least]


def run(what: str, rank: int, tp: int, rendezvous: str) -> object:
    if what in ("gloo", "auto"):
        return collectives(what, rank, tp, rendezvous)
    return answers(Path(what), rank, tp, rendezvous)


def main(what: str, tp: int, rendezvous: str) -> None:
    with ProcessPoolExecutor(tp, mp_context=multiprocessing.get_context("fork")) as pool:
        ranks = [pool.submit(run, what, rank, tp, rendezvous) for rank in range(tp)]
        sys.stdout.write(json.dumps([rank.result(timeout=200) for rank in ranks]))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3])
