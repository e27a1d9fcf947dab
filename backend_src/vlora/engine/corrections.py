"""Corrections of the cost model's predictions, learned from measured steps.

A step consists of its forward pass and the overhead around it: scheduling, sampling and delivering
outputs. Two factors correct the predicted time of the forward pass:

- The pace is the ratio of measured to predicted time in the last few steps.
- Each step has a kind (see `cost._kind`). The factor of a kind corrects the error that remains
  after the pace in steps of this kind.

The overhead is learned only from the steps of this run, because the measured profile does not
contain it (decision 42).
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field

MAX_ERRORS = 512
"""Number of latest step predictions whose errors are kept."""
PACE_WEIGHT = 0.4
"""Weight of a new measurement in the pace. It is large because other processes on the machine
change the pace within seconds.
"""
KIND_WEIGHT = 0.05
"""Weight of a new measurement in the factor of a kind of steps, which is stable."""
MERGE_WEIGHT = 0.1
"""Weight of a new measurement in the factor of merges."""
KIND_PRIOR = 2
"""Number of assumed measurements with ratio 1 that the factor of each kind starts with."""
OVERHEAD_FORGETTING = 0.02
"""Forgetting factor of the step-overhead estimate: each new step reduces the weight of all earlier
steps by this fraction.
"""
OUTLIER_FACTOR, OUTLIER_SECONDS = 3.0, 1e-3
"""A measured overhead is clipped to OUTLIER_FACTOR times the expected overhead, or to
OUTLIER_SECONDS if that is longer. A longer overhead means that the machine was busy with something
else.
"""

StepKind = tuple[int, ...]
"""Kind of a step. Predictions for steps of the same kind have similar errors."""


@dataclass
class RatioEstimate:
    """Exponential moving average of measured time over predicted time, as a geometric mean.

    weight: weight of a new measurement. The first 1/weight measurements have equal weights instead.
    log: natural logarithm of the average.
    samples: number of measurements so far. An initial value above 0 acts as that many measurements
        of ratio 1.
    """

    weight: float
    log: float = 0.0
    samples: int = 0

    def learn(self, ratio: float) -> None:
        """Add a measurement: a measured time divided by its prediction."""
        self.samples += 1
        self.log += max(self.weight, 1 / self.samples) * (math.log(ratio) - self.log)

    @property
    def factor(self) -> float:
        """Factor to multiply predictions by."""
        return math.exp(self.log)


@dataclass
class StepOverhead:
    """Time of a step outside its forward pass, as a linear function of its number of requests.

    The line is fitted by least squares with exponential forgetting. Times are in seconds.

    weight: sum of the weights of all measurements so far.
    fixed, per_request: intercept and slope of the line.
    """

    weight: float = 0.0
    sums: tuple[float, ...] = (0.0, 0.0, 0.0, 0.0)
    """Weighted sums of requests, requests², seconds, and requests × seconds."""
    fixed: float = 0.0
    per_request: float = 0.0

    def seconds(self, requests: int) -> float:
        """Return the expected overhead in seconds of a step with this number of requests."""
        return self.fixed + self.per_request * requests

    def learn(self, requests: int, seconds: float) -> None:
        """Add the measured overhead of a step, in seconds."""
        if self.weight > 0.0:
            limit = max(OUTLIER_SECONDS, OUTLIER_FACTOR * self.seconds(requests))
            seconds = min(seconds, limit)
        terms = (requests, requests**2, seconds, requests * seconds)
        retained = 1.0 - OVERHEAD_FORGETTING
        self.weight = retained * self.weight + 1.0
        self.sums = tuple(retained * old + new for old, new in zip(self.sums, terms, strict=True))
        n, squares, mean, product = (value / self.weight for value in self.sums)
        spread = squares - n * n
        slope = (product - n * mean) / spread if spread > 1e-6 * squares else 0.0
        self.per_request = min(max(0.0, slope), mean / n)
        self.fixed = mean - self.per_request * n


@dataclass
class Corrections:
    """Everything that a cost model has learned from steps and merges.

    pace: factor for the predicted times of all forward passes.
    merges: factor for the predicted times of all merges.
    overhead: estimate of the time of a step outside its forward pass.
    """

    pace: RatioEstimate = field(default_factory=lambda: RatioEstimate(PACE_WEIGHT))
    merges: RatioEstimate = field(default_factory=lambda: RatioEstimate(MERGE_WEIGHT))
    overhead: StepOverhead = field(default_factory=StepOverhead)
    errors: deque[float] = field(default_factory=lambda: deque(maxlen=MAX_ERRORS))
    """Relative errors of the latest step predictions."""
    _kinds: dict[StepKind, RatioEstimate] = field(default_factory=dict)

    def factor(self, kind: StepKind) -> float:
        """Return the factor by which to multiply the predicted forward pass of a step
        of this kind.
        """
        of_kind = self._kinds.get(kind)
        return self.pace.factor * (1.0 if of_kind is None else of_kind.factor)

    def learn_forward(self, kind: StepKind, ratio: float) -> None:
        """Add a measurement: the time of a forward pass divided by its uncorrected prediction."""
        of_kind = self._kinds.setdefault(kind, RatioEstimate(KIND_WEIGHT, samples=KIND_PRIOR))
        self.pace.learn(ratio / of_kind.factor)
        of_kind.learn(ratio / self.pace.factor)
