"""Paired timing and peak memory, on jobs whose cost is known."""

import itertools

import numpy as np
import torch

from sigmaens import cost


def test_times_are_paired_and_in_turn():
    ticks = itertools.count()
    calls = []
    jobs = {name: lambda name=name: calls.append(name) for name in "abc"}
    times = cost.paired_times(jobs, rounds=4, warm_up=1, clock=lambda: next(ticks))
    assert {name: list(t) for name, t in times.items()} == {name: [1] * 4 for name in "abc"}
    assert ["".join(calls[i : i + 3]) for i in range(0, 15, 3)] == ["cab", "abc", "bca", "cab", "abc"]


def test_peak_memory_counts_what_is_held_at_once():
    def job():
        a = torch.ones(1000)  # 4000 bytes
        b = a + 1
        del a
        return b + torch.ones(1000)  # b, the ones and the sum

    torch.ones(1)
    assert 3 * 4000 <= cost.peak_memory(job) < 3 * 4000 + 500
    assert cost.peak_memory(lambda: None) == 0
    assert cost.peak_memory(job) == cost.peak_memory(job)


def test_median_interval_holds_the_median():
    values = np.random.default_rng(0).normal(5, 1, 400)
    median, low, high = cost.median_interval(values)
    assert median == np.median(values)
    assert low < median < high
    assert high - low < 0.4
    assert cost.median_interval(np.full(9, 2.0)) == (2, 2, 2)


def test_machine_says_what_times_depend_on():
    assert set(cost.machine()) == {"cpu", "cores", "threads", "torch"}
