"""`python -m tests.cluster --seed N [--trace]`, or `--seeds COUNT`: the simulated cluster from a shell."""

from __future__ import annotations

import argparse
import sys

from tests.cluster.faults import FAULTS
from tests.cluster.many import all_first_failing, run_many
from tests.cluster.run import explain, simulate
from tests.cluster.scenario import Profile, Size


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.cluster", description=__doc__)
    parser.add_argument("--profile", choices=[profile.value for profile in Profile], help="instead of the seed's own")
    parser.add_argument("--size", choices=[size.value for size in Size], help="instead of the seed's own")
    parser.add_argument("--seed", type=int, help="run this one")
    parser.add_argument("--seeds", type=int, default=1000, help="run so many")
    parser.add_argument("--first", type=int, default=0, help="begin with this one")
    parser.add_argument("--processes", type=int, help="run in so many; by default in one a core")
    parser.add_argument("--planted", metavar="WORDS", nargs="?", const="", help="which seed shows each planted fault")
    parser.add_argument("--trace", action="store_true", help="with --seed: print everything that happened")
    given = parser.parse_args()
    profile = Profile(given.profile) if given.profile else None
    size = Size(given.size) if given.size else None
    if given.planted is not None:
        return _plant([name for name in FAULTS if given.planted in name])
    if given.seed is None:
        seeds = range(given.first, given.first + given.seeds)
        tally = run_many(seeds, profile, size, num_processes=given.processes, say=_say)
        for outcome in tally.failed[:3]:
            _say(explain(outcome))
        _say(tally.told())
        return 1 if tally.failed else 0
    outcome = simulate(given.seed, profile, size, is_traced=given.trace)
    _say("\n".join(outcome.lines))
    _say(f"{dict(outcome.endings)} {dict(outcome.happened)}\n{outcome.violation or 'all is well'}")
    return 0 if outcome.violation is None else 1


def _plant(names: list[str]) -> int:
    num_unseen = 0
    for name, seen in all_first_failing(names):
        num_unseen += seen is None
        what = f"seed {seen.seed}: {(seen.violation or '')[:120]}" if seen else "NOT SEEN"
        _say(f"{name}: {what}")
    return 1 if num_unseen else 0


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
