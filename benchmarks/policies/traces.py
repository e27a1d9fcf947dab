"""Seeded traces of the paper's two applications: arrivals, adapters and lengths of requests.

Skewness is the share of requests for the most popular adapter (§6.3). The other adapters share the
rest equally. This module does not depend on models: lengths are numbers of tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

Application = Literal["retrieval", "analytics"]
Arrivals = Literal["poisson", "bursty"]

PAPER_LENGTHS: dict[Application, tuple[int, tuple[int, int]]] = {
    "retrieval": (256, (150, 250)),
    "analytics": (6256, (5, 10)),
}
"""Mean prompt length, and (minimum, maximum) answer length, in tokens (§6.2: 256, 200+; 6256,
5–10).
"""
LENGTH_SPREAD = 0.3
"""Standard deviation of the logarithm of a prompt's length."""
BURST_SIZE = 5
"""Mean number of requests that arrive together in a bursty trace."""


@dataclass(frozen=True)
class TracedRequest:
    """One request of a trace.

    at: seconds from the start of the trace.
    adapter: index of the adapter.
    prompt: number of prompt tokens.
    output: number of tokens of the answer, which no policy knows.
    limit: maximum number of answer tokens that the client asks for.
    """

    at: float
    adapter: int
    prompt: int
    output: int
    limit: int


@dataclass(frozen=True)
class Workload:
    """Distribution of requests.

    scale: number by which the paper's prompt lengths are multiplied and, for "retrieval", also its
        answer lengths.
    """

    application: Application
    skew: float
    adapters: int
    arrivals: Arrivals = "poisson"
    scale: float = 1.0

    def trace(self, seed: int, rate: float, count: int) -> list[TracedRequest]:
        """Return `count` requests at a mean `rate` per second. The rate affects only the times."""
        rng = np.random.default_rng([seed, count])
        mean_prompt, (least, most) = PAPER_LENGTHS[self.application]
        if self.application == "retrieval":
            least, most = (max(1, round(n * self.scale)) for n in (least, most))
        gaps = rng.exponential(1.0, count)
        if self.arrivals == "bursty":
            starts_burst = rng.random(count) < 1 / BURST_SIZE
            gaps = np.where(starts_burst, gaps * BURST_SIZE, 0.0)
        times = np.cumsum(gaps) - gaps[0]
        lengths = (
            mean_prompt * self.scale * rng.lognormal(-(LENGTH_SPREAD**2) / 2, LENGTH_SPREAD, count)
        )
        # The seed decides which adapter is the most popular one, and so the rank used most.
        drawn = rng.choice(self.adapters, count, p=self._shares())
        adapters = (drawn + seed) % self.adapters
        outputs = rng.integers(least, most + 1, count)
        return [
            TracedRequest(float(t) / rate, int(a), max(2, round(float(n))), int(output), most)
            for t, a, n, output in zip(times, adapters, lengths, outputs, strict=True)
        ]

    def _shares(self) -> Sequence[float]:
        if self.adapters == 1:
            return [1.0]
        rest = (1.0 - self.skew) / (self.adapters - 1)
        return [self.skew, *[rest] * (self.adapters - 1)]
