"""Time `from sigmaens import *`, every public name, beside `import torch`, each in a fresh process, in turn, ten times.

A process times its own import, so the interpreter's start does not count. The first pair is not counted: it reads
the files from disk.

    python benchmarks/imports.py
"""

from __future__ import annotations

import statistics
import subprocess
import sys

STATEMENTS = ("import torch", "from sigmaens import *")
RUNS = 10
TIMED = "import time; start = time.perf_counter(); {}; print(time.perf_counter() - start)"


def seconds(statement: str) -> float:
    """Return the seconds that an import statement takes in a fresh process."""
    done = subprocess.run(
        [sys.executable, "-c", TIMED.format(statement)], stdout=subprocess.PIPE, text=True, check=True
    )
    return float(done.stdout)


def main() -> None:
    """Measure and print the medians and their difference."""
    pairs = [[seconds(statement) for statement in STATEMENTS] for _ in range(RUNS + 1)][1:]
    torch, sigmaens = (statistics.median(times) for times in zip(*pairs, strict=True))
    print(f"medians of n = {RUNS}: torch {torch:.3f} s, sigmaens {sigmaens:.3f} s")
    print(f"sigmaens, every public name loaded, costs {sigmaens - torch:+.3f} s over torch")


if __name__ == "__main__":
    main()
