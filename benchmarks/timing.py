"""Interleaved timing: each round takes a sample of every candidate.

This module times functions. It does not depend on what they compute.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterable, Mapping

from vlora.atmm.search.timing import Timing, rotated

MIN_SAMPLE_SECONDS = 4e-4
"""Minimum duration of a sample. Shorter samples would mostly measure the clock and the loop."""
MIN_SAMPLES = 3
WARM_CALLS = 3
"""Number of calls before a warm sample. A last-level victim cache needs several passes to fill."""
LONG_SECONDS, VERY_LONG_SECONDS = 5e-3, 4e-2
"""Durations of a call. From LONG_SECONDS on, one warm call before a sample is enough. From
VERY_LONG_SECONDS on, none is needed: such calls move many times the size of the caches."""


def interleaved(
    candidates: Mapping[str, Callable[[], None]],
    *,
    rounds: int,
    warm: bool,
    budget: float,
    lead: bool = False,
) -> dict[str, Timing]:
    """Time all candidates, one sample of each per round, in an order that rotates.

    warm: whether untimed calls before each sample load the candidate's data into the caches again,
        since other candidates ran in between.
    lead: whether one call precedes each sample, unless a call takes LONG_SECONDS or more. This is
        for candidates that read new data at each call: the code is then in the caches and the
        threads are awake, but the data are not in the caches, as within a step (decision 68).
    budget: seconds per candidate. A slow candidate gets fewer samples, at least MIN_SAMPLES,
        spread over all rounds.
    """
    calls, warm_calls, sample_counts = {}, {}, {}
    for name, call in candidates.items():
        estimate = _seconds(call, 1)
        if estimate < budget:  # Otherwise the first call's overhead is a small part of the time.
            estimate = _seconds(call, 1)
        calls[name] = max(1, round(MIN_SAMPLE_SECONDS / max(estimate, 1e-9)))
        warm_calls[name] = _warm_calls(estimate) if warm else int(lead and estimate < LONG_SECONDS)
        cost = (calls[name] + warm_calls[name]) * estimate
        sample_counts[name] = min(rounds, max(MIN_SAMPLES, int(budget / max(cost, 1e-9))))
    samples: dict[str, list[float]] = {name: [] for name in candidates}
    for number in range(rounds):
        for name in rotated(list(candidates), number):
            if len(samples[name]) * rounds > number * sample_counts[name]:
                continue
            for _ in range(warm_calls[name]):
                candidates[name]()
            samples[name].append(_seconds(candidates[name], calls[name]))
    return {name: Timing(tuple(values)) for name, values in samples.items()}


def median_or_nan(values: Iterable[float]) -> float:
    """Return the median, or NaN for no values, as in a run that was interrupted."""
    known = list(values)
    return statistics.median(known) if known else math.nan


def rounded_mean(values: Iterable[float | None], digits: int = 3) -> float | None:
    """Return the geometric mean of the values that are not None, or None if there is none."""
    known = [value for value in values if value is not None]
    return round(statistics.geometric_mean(known), digits) if known else None


def medians_in(timings: Mapping[str, Timing], unit: float, digits: int) -> dict[str, float]:
    """Return the median of each timing, multiplied by `unit` (1e3 for ms) and rounded."""
    return {name: round(timing.median * unit, digits) for name, timing in timings.items()}


def noises(timings: Mapping[str, Timing], digits: int = 3) -> dict[str, float]:
    """Return the noise of each timing, rounded."""
    return {name: round(timing.noise, digits) for name, timing in timings.items()}


def _warm_calls(seconds: float) -> int:
    if seconds < LONG_SECONDS:
        return WARM_CALLS
    return 1 if seconds < VERY_LONG_SECONDS else 0


def _seconds(call: Callable[[], None], count: int) -> float:
    """Return the seconds per call, over `count` calls in a row."""
    started = time.perf_counter()
    for _ in range(count):
        call()
    return (time.perf_counter() - started) / count
