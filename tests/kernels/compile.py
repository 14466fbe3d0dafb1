"""Compiles what is shipped for targets without a device: `python -m tests.kernels.compile sm_90` prints what it takes.

One line of JSON a launch. Each is compiled in a child process, since a compiler may abort instead of raising.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import sys
import warnings
from collections.abc import Callable, Sequence

from tests.kernels.dry_run import record, remember_versions
from tests.kernels.shipped import SHIPPED, WIDE


def main(targets: Sequence[str], *, is_wide: bool) -> None:
    warnings.simplefilter("ignore")
    remember_versions(targets)
    launches = SHIPPED | WIDE if is_wide else SHIPPED
    for target, (name, launch) in itertools.product(targets, launches.items()):
        told = {"name": name, "target": target, **_in_a_child(launch, target)}
        sys.stdout.write(json.dumps(told) + "\n")
        sys.stdout.flush()


def _in_a_child(launch: Callable[[], object], target: str) -> dict[str, object]:
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        try:
            told: dict[str, object] = {"kernels": [dataclasses.asdict(c) for c in record(launch, target)]}
        except Exception as error:  # noqa: BLE001 (whatever it is, the parent must hear it)
            told = {"error": f"{type(error).__name__}: {error}"[-400:]}
        os.write(writer, json.dumps(told).encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        told = pipe.read()
    status = os.waitpid(child, 0)[1]
    return json.loads(told) if told else {"error": f"the compiler died with status {status}"}


if __name__ == "__main__":
    main([word for word in sys.argv[1:] if word != "--wide"], is_wide="--wide" in sys.argv)
