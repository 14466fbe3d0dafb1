"""A group of ranks as processes: `python -m tests.engine.tp_group CHECKPOINT TP RENDEZVOUS` prints each rank's answers.

A program of its own, which forks its ranks once torch is imported: importing it in each takes longer than all they
compute. It has no threads yet when it forks.
"""

from __future__ import annotations

import json
import multiprocessing
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

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


def main(checkpoint: Path, tp: int, rendezvous: str) -> None:
    with ProcessPoolExecutor(tp, mp_context=multiprocessing.get_context("fork")) as pool:
        ranks = [pool.submit(answers, checkpoint, rank, tp, rendezvous) for rank in range(tp)]
        sys.stdout.write(json.dumps([rank.result(timeout=200) for rank in ranks]))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
