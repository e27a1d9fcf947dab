"""Algorithm 1 of the paper (§4.4.3) as published. `credit` is the same with our changes.

Words of the algorithm: R is the set of requests that could be computed. A request whose credit is
above θ is starved. The candidate is the adapter that may be merged.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from vlora.config import Options
from vlora.engine.policies.base import Candidate, Choice, Costs, Order, ordered_union
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


def make(options: Options, costs: Costs) -> PaperPolicy:
    return PaperPolicy(options.max_step_requests, options.theta_min, costs)
