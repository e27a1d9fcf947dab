"""Algorithm 1 of the paper (§4.4.3) with our changes (decision 41), each a comment at its line.

Words of the algorithm: R is the set of requests that could be computed. A request whose credit is
above θ is starved. The candidate is the adapter that may be merged.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Sequence

from vlora.config import Options
from vlora.engine.policies.base import Candidate, Choice, Costs, Order, ordered_union
from vlora.ids import BASE


class CreditPolicy:
    """Algorithm 1 with a threshold that grows with the load, and bounded waits.

    max_batch: MaxBS, the maximum number of requests in a step.
    theta_min: lower bound of the threshold θ in seconds.
    theta_factor: θ is at least theta_factor · median wait.
    max_wait: upper bound of θ in seconds.
    """

    uses_costs = True
    merges = True
    orders = (Order.WAIT,)

    def __init__(
        self, max_batch: int, theta_min: float, theta_factor: float, max_wait: float, costs: Costs
    ) -> None:
        self.max_batch = max_batch
        self._theta_min = theta_min
        self._theta_factor = theta_factor
        self._max_wait = max_wait
        self._costs = costs

    def choose(self, ready: Sequence[Candidate], live: int, now: float) -> Choice:
        size = self.max_batch
        credit = credits_of(ready, live, self._costs)
        theta = self._theta(ready)
        starved = [r for r in ready if credit[r.id] > theta]
        # Starved requests go by credit instead of by arrival.
        starved = sorted(starved, key=lambda r: -credit[r.id])[:size]
        candidate = self._candidate(ready, live)
        # Starved requests of the candidate do not count against its merge: they need no deLoRA.
        others = [r for r in starved if r.slot != candidate]
        # MaxBS is replaced by min(MaxBS, |R|). Otherwise nothing would be merged at low load.
        half = 0.5 * min(size, len(ready))
        merged = merged_order(ready, starved, others, candidate, half, size)
        if merged is None:
            return Choice(ordered_union(starved, ready)[:size], BASE, credits=credit)
        return Choice(merged, candidate, credits=credit)

    def _theta(self, ready: Sequence[Candidate]) -> float:
        # With a constant θ, all requests would be starved under overload, and every step would be
        # unmerged. With the upper bound, a request that has waited that long is always starved.
        median_wait = statistics.median(r.wait for r in ready)
        return min(max(self._theta_min, self._theta_factor * median_wait), self._max_wait)

    def _candidate(self, ready: Sequence[Candidate], live: int) -> int:
        """Return the adapter with the most requests, preferably the live one, or BASE."""
        counts = Counter(r.slot for r in ready)
        slots = sorted(counts, key=lambda slot: (-counts[slot], slot != live, slot))
        return next((s for s in slots if s == BASE or self._costs.mergeable(s)), BASE)


def credits_of(ready: Sequence[Candidate], live: int, costs: Costs) -> dict[str, float]:
    """Return the credit of each request by its id, in seconds.

    It is the request's wait, plus the predicted time of its next step in the present mode, plus the
    predicted time of a switch to its adapter.
    """
    switches = {slot: costs.switch(live, slot) for slot in {r.slot for r in ready}}
    steps = costs.steps(ready, live)
    return {r.id: r.wait + step + switches[r.slot] for r, step in zip(ready, steps, strict=True)}


def merged_order(
    ready: Sequence[Candidate],
    starved: Sequence[Candidate],
    others: Sequence[Candidate],
    candidate: int,
    half: float,
    size: int,
) -> tuple[Candidate, ...] | None:
    """Return the requests of a step with the candidate merged, or None for an unmerged step.

    starved, others: starved requests in order, and those of them that count against the merge.
    half: half of the requests that could be in the step.
    size: MaxBS.
    """
    merge = [r for r in ready if r.slot == candidate]
    # Line 5: |R_starve| / MaxBS < 0.5 and |R_merge| / MaxBS > 0.5; otherwise lines 13–15.
    if not (len(others) < half < len(merge)):
        return None
    if not others:
        # Lines 6–8: merged.
        return ordered_union(starved, merge)[:size]
    # Lines 9–12: mixture. deLoRA follows from `live`, by the signs of the segments.
    taken = {r.id for r in others}
    own = ordered_union([r for r in starved if r.slot == candidate], merge)
    return (*others, *[r for r in own if r.id not in taken][: size - len(others)])


def make(options: Options, costs: Costs) -> CreditPolicy:
    return CreditPolicy(
        options.max_step_requests,
        options.theta_min,
        options.theta_factor,
        options.max_wait_seconds,
        costs,
    )
