"""`python -m pd.doctor.ask MODULE [ARGUMENT…]`: one answer as JSON on standard output, whatever the library prints."""

from __future__ import annotations

import importlib
import os
import sys

import msgspec

from pd.doctor.local import MISSING


def main() -> int:
    """0: answered. 3: not installed. 1: raised; the last line of standard error says what."""
    name, *arguments = sys.argv[1:]
    answer_to = os.dup(1)
    os.dup2(2, 1)  # libraries greet on standard output
    try:
        answer = importlib.import_module(f"pd.doctor.ask.{name}").answer(*arguments)
    except ModuleNotFoundError as error:
        print(f"No module named {error.name}", file=sys.stderr)  # noqa: T201
        return MISSING
    with os.fdopen(answer_to, "wb") as pipe:
        pipe.write(msgspec.json.encode(answer))
    sys.stderr.flush()
    os._exit(0)  # some libraries (Debian's ibverbs-providers under UCX) crash on the way out


if __name__ == "__main__":
    sys.exit(main())
