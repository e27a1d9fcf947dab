"""Corrections of the cost model's predictions, learned from measured steps.

A step consists of its forward pass and of the overhead around it (scheduling, sampling, delivering
outputs). The prediction of the forward pass is corrected by the machine's present pace, which is
that of the last few steps of any kind, and by how steps of the same kind differ from all steps. The
overhead is learned from steps alone (decision 53).
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field

MAX_ERRORS = 512
"""Number of latest predictions whose errors are stored."""
PACE_WEIGHT = 0.4
"""Weight of a new measurement in the pace of all steps, which other processes on the machine change
within seconds."""
KIND_WEIGHT = 0.05
"""Weight of a new measurement in the correction of one kind of steps, which is stable."""
MERGE_WEIGHT = 0.1
"""Weight of a new measurement in the correction of merges."""
KIND_PRIOR = 2
"""Number of measurements after which a kind of steps is trusted as much as all steps."""
OVERHEAD_FORGETTING = 0.02
"""Forgetting factor of the step-overhead estimate."""
OUTLIER_FACTOR, OUTLIER_SECONDS = 3.0, 1e-3
"""An overhead above both this multiple of the expected one and this many seconds is counted as the
larger of the two limits: the machine was busy with something else."""

StepKind = tuple[int, ...]
"""Kind of steps whose predictions have similar errors."""


@dataclass
class RatioEstimate:
    """Exponential moving average of measured over predicted time, as a geometric mean.

    weight: final weight of a new measurement.
    samples: number of measurements so far. A start above 0 gives the ratio 1 that much trust.
    """

    weight: float
    log: float = 0.0
    samples: int = 0

    def learn(self, ratio: float) -> None:
        """Add a measurement."""
        self.samples += 1
        self.log += max(self.weight, 1 / self.samples) * (math.log(ratio) - self.log)

    @property
    def factor(self) -> float:
        """Factor by which predictions are to be multiplied."""
        return math.exp(self.log)


@dataclass
class StepOverhead:
    """Time of a step outside its forward pass, as a line over the number of its requests.

    The line is fitted by least squares with exponential forgetting.
    """

    weight: float = 0.0
    sums: tuple[float, ...] = (0.0, 0.0, 0.0, 0.0)
    """Weighted sums of requests, requests², seconds, and requests × seconds."""
    fixed: float = 0.0
    per_request: float = 0.0

    def seconds(self, requests: int) -> float:
        """Return the expected overhead of a step of this many requests."""
        return self.fixed + self.per_request * requests

    def learn(self, requests: int, seconds: float) -> None:
        """Add the measured overhead of a step."""
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
    """Everything that a cost model has learned from steps. A deep copy learns separately."""

    pace: RatioEstimate = field(default_factory=lambda: RatioEstimate(PACE_WEIGHT))
    merges: RatioEstimate = field(default_factory=lambda: RatioEstimate(MERGE_WEIGHT))
    overhead: StepOverhead = field(default_factory=StepOverhead)
    errors: deque[float] = field(default_factory=lambda: deque(maxlen=MAX_ERRORS))
    """Relative errors of the latest step predictions."""
    _kinds: dict[StepKind, RatioEstimate] = field(default_factory=dict)

    def factor(self, kind: StepKind) -> float:
        """Return the factor for the forward pass of a step of this kind."""
        of_kind = self._kinds.get(kind)
        return self.pace.factor * (1.0 if of_kind is None else of_kind.factor)

    def learn_forward(self, kind: StepKind, ratio: float) -> None:
        """Add the measured over the uncorrected time of a forward pass."""
        of_kind = self._kinds.setdefault(kind, RatioEstimate(KIND_WEIGHT, samples=KIND_PRIOR))
        self.pace.learn(ratio / of_kind.factor)
        of_kind.learn(ratio / self.pace.factor)
