"""Time `from sigmaens import *` beside `from torch import *`, each in a fresh process, in turn, ten times.

A process times its own import, so the interpreter's start does not count. The first pair is not counted: it reads
the files from disk.

    python benchmarks/imports.py
"""

from __future__ import annotations

import statistics
import subprocess
import sys

MODULES = ("torch", "sigmaens")
RUNS = 10
TIMED = "import time; start = time.perf_counter(); from {} import *; print(time.perf_counter() - start)"


def seconds(module: str) -> float:
    """Return the seconds that importing `module` takes in a fresh process."""
    done = subprocess.run([sys.executable, "-c", TIMED.format(module)], stdout=subprocess.PIPE, text=True, check=True)
    return float(done.stdout)


def main() -> None:
    """Measure and print the medians and their difference."""
    pairs = [[seconds(module) for module in MODULES] for _ in range(RUNS + 1)][1:]
    torch, sigmaens = (statistics.median(times) for times in zip(*pairs, strict=True))
    print(f"medians of n = {RUNS}: torch {torch:.3f} s, sigmaens {sigmaens:.3f} s")
    print(f"sigmaens, every public name loaded, costs {sigmaens - torch:+.3f} s over torch")


if __name__ == "__main__":
    main()
