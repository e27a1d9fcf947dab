"""Algorithm 1 of the paper (§4.4.3), as published (`paper`) and with our changes (`credit`)."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from vlora.config import Options
from vlora.engine.policies.base import Candidate, Choice, Costs, Order, ordered_union
from vlora.ids import BASE


@dataclass(frozen=True)
class CreditConfig:
    """Constants of Algorithm 1, and one switch for each of our changes to it (decision 41).

    A request whose credit is above θ is starved. The candidate is the adapter that may be merged:
    the one with the most requests. R is the set of requests that could be computed. Line 5 merges
    the candidate if fewer than half of MaxBS requests are starved, and more than half of MaxBS
    requests use the candidate.

    max_batch: MaxBS, the maximum number of requests in a step.
    theta_min: lower bound of θ in seconds. In the paper, θ is this constant.
    theta_factor: θ is at least theta_factor · median wait. With a constant θ, all requests would be
        starved under overload, and every step would be unmerged.
    max_wait: upper bound of θ in seconds. A request that has waited this long is always starved, so
        waits are bounded.
    compare_to_ready: in line 5, replace MaxBS by min(MaxBS, |R|). With MaxBS, nothing would ever be
        merged at low load.
    exclude_own_starved: in line 5, do not count starved requests that use the candidate. If the
        candidate is merged, they need no deLoRA.
    ties_keep_live: if the live adapter is among those with the most requests, it is the candidate.
    base_is_candidate: the base model may be the candidate; no weights are merged for it.
    sort_by_credit: order starved requests by descending credit instead of by arrival.
    """

    max_batch: int
    theta_min: float = 1.0
    theta_factor: float = 0.0
    max_wait: float = math.inf
    compare_to_ready: bool = False
    exclude_own_starved: bool = False
    ties_keep_live: bool = False
    base_is_candidate: bool = False
    sort_by_credit: bool = False


def default_credit(
    max_batch: int, theta_min: float, theta_factor: float, max_wait: float
) -> CreditConfig:
    """Return the configuration with all our changes to Algorithm 1 switched on."""
    return CreditConfig(
        max_batch,
        theta_min,
        theta_factor,
        max_wait,
        compare_to_ready=True,
        exclude_own_starved=True,
        ties_keep_live=True,
        base_is_candidate=True,
        sort_by_credit=True,
    )


class CreditPolicy:
    """Algorithm 1 of the paper (§4.4.3).

    The credit of a request is a time in seconds: its wait, plus the predicted time of its next step
    in the present mode, plus the predicted time of a switch to its adapter.
    """

    uses_costs = True
    orders = (Order.WAIT,)

    def __init__(self, config: CreditConfig, costs: Costs) -> None:
        self._config = config
        self.max_batch = config.max_batch
        self._costs = costs

    def choose(self, ready: Sequence[Candidate], live: int, now: float) -> Choice:
        config, size = self._config, self._config.max_batch
        credit = self._credits(ready, live)
        theta = max(config.theta_min, config.theta_factor * _median_wait(ready))
        theta = min(theta, config.max_wait)
        # Line 2: R_starve = [R_i.credit > θ], cut at MaxBS.
        starved = [r for r in ready if credit[r.id] > theta]
        if config.sort_by_credit:
            starved.sort(key=lambda r: -credit[r.id])
        starved = starved[:size]
        # Line 4: R_merge = argmax over adapters of {r ∈ R | r.lora = l}.
        candidate = self._candidate(ready, live)
        merge = [r for r in ready if r.slot == candidate]
        others = [r for r in starved if not (config.exclude_own_starved and r.slot == candidate)]
        half = 0.5 * (min(size, len(ready)) if config.compare_to_ready else size)
        # Line 5: |R_starve| / MaxBS < 0.5 and |R_merge| / MaxBS > 0.5.
        if len(others) < half and len(merge) > half:
            if not others:
                # Lines 6–8: merged.
                return Choice(ordered_union(starved, merge)[:size], candidate, credits=credit)
            # Lines 9–12: mixture. deLoRA follows from `live`, by the signs of the segments.
            taken = {r.id for r in others}
            own = ordered_union([r for r in starved if r.slot == candidate], merge)
            rest = [r for r in own if r.id not in taken][: size - len(others)]
            return Choice((*others, *rest), candidate, credits=credit)
        # Lines 13–15: unmerged.
        return Choice(ordered_union(starved, ready)[:size], BASE, credits=credit)

    def _credits(self, ready: Sequence[Candidate], live: int) -> dict[str, float]:
        switches = {slot: self._costs.switch(live, slot) for slot in {r.slot for r in ready}}
        steps = self._costs.steps(ready, live)
        return {
            r.id: r.wait + step + switches[r.slot] for r, step in zip(ready, steps, strict=True)
        }

    def _candidate(self, ready: Sequence[Candidate], live: int) -> int:
        """Return the mergeable adapter with the largest number of requests, or BASE."""
        counts = Counter(r.slot for r in ready)
        prefer_live = self._config.ties_keep_live

        def rank(slot: int) -> tuple[int, bool, int]:
            return -counts[slot], not (prefer_live and slot == live), slot

        for slot in sorted(counts, key=rank):
            if self._config.base_is_candidate if slot == BASE else self._costs.mergeable(slot):
                return slot
        return BASE


def _median_wait(ready: Sequence[Candidate]) -> float:
    return statistics.median(r.wait for r in ready)


def make_credit(options: Options, costs: Costs) -> CreditPolicy:
    """Return Algorithm 1 with our changes, configured by the options."""
    return CreditPolicy(
        default_credit(
            options.max_step_requests,
            options.theta_min,
            options.theta_factor,
            options.max_wait_seconds,
        ),
        costs,
    )


def make_paper(options: Options, costs: Costs) -> CreditPolicy:
    """Return Algorithm 1 as published."""
    return CreditPolicy(CreditConfig(options.max_step_requests, options.theta_min), costs)
