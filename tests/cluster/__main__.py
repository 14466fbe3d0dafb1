"""`python -m tests.cluster --seed N [--trace]`, or `--seeds COUNT`: the simulated cluster from a shell."""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter

from tests.cluster.run import explain, simulate
from tests.cluster.scenario import Profile


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.cluster", description=__doc__)
    parser.add_argument("--profile", choices=[profile.value for profile in Profile], default=None)
    parser.add_argument("--seed", type=int, default=None, help="run this one")
    parser.add_argument("--seeds", type=int, default=100, help="run so many of each profile")
    parser.add_argument("--first", type=int, default=0, help="begin with this one")
    parser.add_argument("--trace", action="store_true", help="print everything that happened")
    given = parser.parse_args()
    profiles = [Profile(given.profile)] if given.profile else list(Profile)
    if given.seed is None:
        return _run_many(profiles, range(given.first, given.first + given.seeds))
    outcome = simulate(given.seed, profiles[0], is_traced=given.trace)
    sys.stdout.write("\n".join(outcome.lines) + "\n")
    sys.stdout.write(f"{outcome.endings} {outcome.violation or 'all is well'}\n")
    return 0 if outcome.violation is None else 1


def _run_many(profiles: list[Profile], seeds: range) -> int:
    num_failed = 0
    for profile in profiles:
        began = time.perf_counter()
        endings: Counter[str] = Counter()
        num_events = 0
        failed = []
        for seed in seeds:
            outcome = simulate(seed, profile)
            endings += outcome.endings
            num_events += outcome.num_events
            if outcome.violation is not None:
                failed.append(outcome)
        seconds = time.perf_counter() - began
        sys.stdout.write(
            f"{profile.value:8} {len(seeds)} seeds, {num_events} lines, {seconds:.1f} s: {dict(endings)}\n"
        )
        for outcome in failed[:10]:
            sys.stdout.write(f"  seed {outcome.seed}: {outcome.violation}\n")
        if failed:
            sys.stdout.write(explain(failed[0]) + "\n")
        num_failed += len(failed)
    sys.stdout.write(f"{num_failed} failed\n")
    return 1 if num_failed else 0


if __name__ == "__main__":
    sys.exit(main())
