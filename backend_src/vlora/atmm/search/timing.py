"""Samples of one candidate's times, and the order in which candidates take turns."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Timing:
    """Seconds per call, one value per sample."""

    samples: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.samples)

    @property
    def noise(self) -> float:
        """Interquartile range divided by the median."""
        if len(self.samples) < 2:
            return 0.0
        low, _, high = statistics.quantiles(self.samples, n=4, method="inclusive")
        return (high - low) / self.median


def rotated(names: Sequence[str], number: int) -> list[str]:
    """Return the names rotated to start at index `number` modulo their count."""
    first = number % len(names)
    return [*names[first:], *names[:first]]
