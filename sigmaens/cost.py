"""What a method costs: time in paired rounds, and peak memory, of a training step and of a prediction."""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import torch

__all__ = ["machine", "median_interval", "paired_times", "peak_memory"]


def paired_times(
    jobs: Mapping[object, Callable[[], object]],
    rounds: int,
    warm_up: int = 2,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[object, np.ndarray]:
    """Time jobs in turn, round after round, so that whatever else the machine does hits them alike.

    The first job of a round moves on from round to round.

    Args:
        jobs: What to time, by name.
        rounds: Number of timed rounds.
        warm_up: Rounds before those, not timed.
        clock: `time.perf_counter`, or `time.process_time` to leave out the time spent waiting for a core.

    Returns:
        Seconds, shape (rounds,), by name: a round's times belong together.
    """
    names = list(jobs)
    times: dict[object, list[float]] = {name: [] for name in names}
    for turn in range(-warm_up, rounds):
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            start = clock()
            jobs[name]()
            elapsed = clock() - start
            if turn >= 0:
                times[name].append(elapsed)
    return {name: np.array(elapsed) for name, elapsed in times.items()}


def median_interval(values: np.ndarray, resamples: int = 2000) -> tuple[float, float, float]:
    """Return the median of values (N,) and its 95 % bootstrap interval."""
    rng = np.random.default_rng(0)
    medians = np.median(rng.choice(values, (resamples, len(values))), axis=1)
    low, high = np.quantile(medians, [0.025, 0.975])
    return float(np.median(values)), float(low), float(high)


def peak_memory(job: Callable[[], object]) -> int:
    """Return the most bytes that torch held on the CPU at once during a job, beyond what it held before.

    Counted from torch's own allocations, so the same from run to run.
    """
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        job()
    events = [e for e in profiler.profiler.kineto_results.events() if e.name() == "[memory]"]
    changes = [event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]
    return int(max(np.cumsum(changes), default=0))


def machine() -> dict[str, str | int]:
    """Describe what times depend on."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.is_file() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return {
        "cpu": names[0] if names else platform.processor() or platform.machine(),
        "cores": len(names) or torch.get_num_threads(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
    }
