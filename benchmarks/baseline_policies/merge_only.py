"""Merged inference only: one adapter at a time."""

from __future__ import annotations

from collections.abc import Sequence

from vlora.config import Options
from vlora.engine.policies.base import Candidate, Choice, Costs, Order
from vlora.ids import BASE


class MergeOnly:
    """Policy that merges the oldest request's adapter and runs all requests of this adapter."""

    uses_costs = False
    merges = True
    orders = (Order.ARRIVAL,)

    def __init__(self, max_batch: int, costs: Costs) -> None:
        self.max_batch = max_batch
        self._costs = costs

    def choose(self, ready: Sequence[Candidate], live: int, now: float) -> Choice:
        slot = ready[0].slot
        same = tuple(r for r in ready if r.slot == slot)[: self.max_batch]
        return Choice(same, slot if self._costs.mergeable(slot) else BASE)


def make(options: Options, costs: Costs) -> MergeOnly:
    """Return the policy, configured by the options."""
    return MergeOnly(options.max_step_requests, costs)
