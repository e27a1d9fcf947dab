"""Interleaved timing: every candidate in every round, medians and their spread.

Knows callables and clocks; nothing of operators.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

MIN_SAMPLE_SECONDS = 4e-4
"""Shorter samples would measure the clock and the loop."""
FEWEST_SAMPLES = 3
WARM_CALLS = 3
"""Before a sample: a cache of the last level that fills by eviction needs more than one pass."""
LONG, VERY_LONG = 5e-3, 4e-2
"""Seconds of a call from which on one pass, or none, is enough: what memory gives in that time is
many times the caches, and the first misses are a small part of it."""


@dataclass(frozen=True)
class Timing:
    """Seconds per call, one value per round."""

    samples: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.samples)

    @property
    def noise(self) -> float:
        """Interquartile range over the median."""
        if len(self.samples) < 2:
            return 0.0
        low, _, high = statistics.quantiles(self.samples, n=4, method="inclusive")
        return (high - low) / self.median

    @property
    def variation(self) -> float:
        """Coefficient of variation: standard deviation over mean (the paper's figure 18)."""
        return statistics.stdev(self.samples) / statistics.fmean(self.samples)


def interleaved(
    candidates: Mapping[str, Callable[[], None]],
    *,
    rounds: int,
    warm: bool,
    budget: float,
    led: bool = False,
) -> dict[str, Timing]:
    """Time all candidates, a sample of each per round, in an order that rotates.

    warm: calls just before each sample bring the candidate's data back into the caches that the
    others have used since. led: one call does, for a candidate that has other data at each call:
    its code is there then and its threads are awake, as in the midst of a step, and its data are
    not (decision 68). budget: seconds per candidate; a slow one gets fewer samples, never
    under FEWEST_SAMPLES, spread over all rounds.
    """
    calls, warm_calls, samples_wanted = {}, {}, {}
    for name, call in candidates.items():
        estimate = _seconds(call, 1)
        if estimate < budget:  # else the first call's own share in it is small
            estimate = _seconds(call, 1)
        calls[name] = max(1, round(MIN_SAMPLE_SECONDS / max(estimate, 1e-9)))
        warm_calls[name] = _warm_calls(estimate) if warm else int(led and estimate < LONG)
        cost = (calls[name] + warm_calls[name]) * estimate
        samples_wanted[name] = min(rounds, max(FEWEST_SAMPLES, int(budget / max(cost, 1e-9))))
    samples: dict[str, list[float]] = {name: [] for name in candidates}
    names = list(candidates)
    for turn in range(rounds):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            if len(samples[name]) * rounds > turn * samples_wanted[name]:
                continue
            for _ in range(warm_calls[name]):
                candidates[name]()
            samples[name].append(_seconds(candidates[name], calls[name]))
    return {name: Timing(tuple(values)) for name, values in samples.items()}


def _warm_calls(seconds: float) -> int:
    return WARM_CALLS if seconds < LONG else 1 if seconds < VERY_LONG else 0


def single_calls(
    candidates: Mapping[str, Callable[[], None]], *, rounds: int, warm_ups: int
) -> dict[str, Timing]:
    """One call a sample, `rounds` samples after `warm_ups`, interleaved (figure 18)."""
    samples: dict[str, list[float]] = {name: [] for name in candidates}
    for turn in range(warm_ups + rounds):
        for name, call in candidates.items():
            seconds = _seconds(call, 1)
            if turn >= warm_ups:
                samples[name].append(seconds)
    return {name: Timing(tuple(values)) for name, values in samples.items()}


def _seconds(call: Callable[[], None], count: int) -> float:
    started = time.perf_counter()
    for _ in range(count):
        call()
    return (time.perf_counter() - started) / count


def geometric_mean(values: list[float]) -> float | None:
    """None for no values: a summary says null, not 1."""
    return statistics.geometric_mean(values) if values else None
