"""Seeded traces of the paper's two applications: who asks when, through which adapter, how much.

Skewness is the share of the most wanted adapter (§6.3); the others share the rest. Knows nothing of
models: lengths are tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

Application = Literal["retrieval", "analytics"]
Arrivals = Literal["poisson", "bursty"]

PAPER: dict[Application, tuple[int, tuple[int, int]]] = {
    "retrieval": (256, (150, 250)),
    "analytics": (6256, (5, 10)),
}
"""Prompt tokens, and the fewest and most of an answer (§6.2: 256 and 200+; 6256 and 5–10)."""
SPREAD = 0.3
"""Standard deviation of the logarithm of a prompt's length."""
BURST = 5
"""Requests that come together in bursty traces, on average."""


@dataclass(frozen=True)
class Asked:
    """at: seconds from the start. adapter: its index. limit: the most tokens that the client lets
    the answer have; output: those that it will have, which no policy is told."""

    at: float
    adapter: int
    prompt: int
    output: int
    limit: int


@dataclass(frozen=True)
class Workload:
    """scale: prompts and, in retrieval, answers are so many times the paper's."""

    application: Application
    skew: float
    adapters: int
    arrivals: Arrivals = "poisson"
    scale: float = 1.0

    def trace(self, seed: int, rate: float, count: int) -> list[Asked]:
        """`count` requests at `rate` a second on average; the same requests at any rate."""
        drawn = np.random.default_rng([seed, count])
        words, (least, most) = PAPER[self.application]
        if self.application == "retrieval":
            least, most = (max(1, round(n * self.scale)) for n in (least, most))
        gaps = drawn.exponential(1.0, count)
        if self.arrivals == "bursty":
            first = drawn.random(count) < 1 / BURST
            gaps = np.where(first, gaps * BURST, 0.0)
        at = np.cumsum(gaps) - gaps[0]
        lengths = words * self.scale * drawn.lognormal(-(SPREAD**2) / 2, SPREAD, count)
        # The most wanted one has another rank with another seed.
        adapters = (drawn.choice(self.adapters, count, p=self._shares()) + seed) % self.adapters
        outputs = drawn.integers(least, most + 1, count)
        return [
            Asked(float(t) / rate, int(a), max(2, round(float(n))), int(said), most)
            for t, a, n, said in zip(at, adapters, lengths, outputs, strict=True)
        ]

    def _shares(self) -> Sequence[float]:
        if self.adapters == 1:
            return [1.0]
        rest = (1.0 - self.skew) / (self.adapters - 1)
        return [self.skew, *[rest] * (self.adapters - 1)]
