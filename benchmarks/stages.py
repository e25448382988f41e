"""Time every stage of the pipeline: `dvc repro --force`, and how long each stage took, as a table for the README.

python benchmarks/stages.py [--markdown benchmarks/stages.md]
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import time
from pathlib import Path

from sigmaens.cost import machine

RUNNING = re.compile(r"Running stage '(\w+)")


def main() -> int:
    """Run the pipeline, print the table, and write it to a file if asked to."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--markdown", type=Path, metavar="PATH", help="write the table here too")
    path = parser.parse_args().markdown
    start = time.perf_counter()
    marks: list[tuple[str, float]] = []
    command = [sys.executable, "-m", "dvc", "repro", "--force"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        for line in process.stdout:
            print(line, end="", flush=True)
            if found := RUNNING.match(line):
                marks.append((found[1], time.perf_counter()))
    if process.returncode:
        return process.returncode
    end = time.perf_counter()
    seconds: dict[str, list[float]] = {}
    for (name, begun), (_, done) in zip(marks, [*marks[1:], ("", end)], strict=True):
        seconds.setdefault(name, []).append(done - begun)
    about = machine()
    lines = [
        f"{about['cpu']}, {about['cores']} cores, torch {about['torch']}, one run: {(end - start) / 60:.1f} minutes.",
        "",
        "| stage | cells | seconds |",
        "| --- | --- | --- |",
        *(f"| {name} | {len(times)} | {sum(times):.0f} |" for name, times in seconds.items()),
    ]
    print("\n".join(lines))
    if path is not None:
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
