"""Build the CPU operators where they and a compiler are; say so where not. Plain PyTorch serves without them."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys

OPS = "pd.runtime.engine.cpu_ops"


def main() -> int:
    if importlib.util.find_spec(OPS) is None:
        return 0
    if not any(shutil.which(compiler) for compiler in ("c++", "g++", "clang++")):
        say("no C++ compiler: the CPU runs plain PyTorch, which is slower. Install g++ and run `make install` again")
        return 0
    done = subprocess.run([sys.executable, "-m", OPS, "build"], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        say("the CPU operators could not be built: the CPU runs plain PyTorch, which is slower. The last lines said:")
        say(*(done.stdout + done.stderr).splitlines()[-10:])
    return 0


def say(*lines: str) -> None:
    sys.stderr.writelines(f"note: {line}\n" for line in lines)


if __name__ == "__main__":
    sys.exit(main())
