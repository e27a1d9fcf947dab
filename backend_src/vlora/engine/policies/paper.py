"""Algorithm 1 of the paper (§4.4.3) as published. `credit` is the same with our changes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from vlora.config import Options
from vlora.engine.policies.base import Candidate, Choice, Costs, Order, ordered_union
from vlora.engine.policies.credit import credits_of, merged_order
from vlora.ids import BASE


class PaperPolicy:
    """Algorithm 1 as published, with a constant threshold.

    max_batch: MaxBS, the maximum number of requests in a step.
    theta: θ, the credit in seconds above which a request is starved.
    """

    uses_costs = True
    merges = True
    orders = (Order.WAIT,)

    def __init__(self, max_batch: int, theta: float, costs: Costs) -> None:
        self.max_batch = max_batch
        self._theta = theta
        self._costs = costs

    def choose(self, ready: Sequence[Candidate], live: int, now: float) -> Choice:
        size = self.max_batch
        credit = credits_of(ready, live, self._costs)
        # Line 2: R_starve = [R_i.credit > θ], cut at MaxBS.
        starved = [r for r in ready if credit[r.id] > self._theta][:size]
        # Line 4: R_merge = argmax over adapters of {r ∈ R | r.lora = l}.
        counts = Counter(r.slot for r in ready if r.slot != BASE)
        slots = sorted(counts, key=lambda slot: (-counts[slot], slot))
        candidate = next((slot for slot in slots if self._costs.mergeable(slot)), BASE)
        merged = merged_order(ready, starved, starved, candidate, 0.5 * size, size)
        if merged is None:
            return Choice(ordered_union(starved, ready)[:size], BASE, credits=credit)
        return Choice(merged, candidate, credits=credit)


def make(options: Options, costs: Costs) -> PaperPolicy:
    return PaperPolicy(options.max_step_requests, options.theta_min, costs)
