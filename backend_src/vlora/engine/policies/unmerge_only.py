"""First come, first served, with no adapter ever merged, as in Punica and S-LoRA."""

from __future__ import annotations

import math
from collections.abc import Sequence

from vlora.config import Options
from vlora.engine.policies.base import Candidate, Choice, Costs, Order
from vlora.ids import BASE


class UnmergeOnly:
    """First come, first served within each priority. Nothing is merged.

    A request that holds pages goes before the waiting ones of its priority, even before older ones
    whose adapter was loaded later.

    max_batch: maximum number of requests in a step.
    max_wait: requests that have waited longer than this many seconds go first, longest wait first,
        whatever their priority. This bounds the waits (decision 41).
    """

    uses_costs = False
    orders = (Order.WAIT, Order.PRIORITY)

    def __init__(self, max_batch: int, max_wait: float = math.inf) -> None:
        self.max_batch = max_batch
        self.max_wait = max_wait

    def choose(self, ready: Sequence[Candidate], live: int, now: float) -> Choice:
        def rank(r: Candidate) -> tuple[float, int, bool]:
            if r.wait > self.max_wait:
                return -r.wait, 0, False
            return 0.0, r.priority, not r.holds_pages

        order = sorted(ready, key=rank)
        return Choice(tuple(order[: self.max_batch]), BASE)


def make(options: Options, costs: Costs) -> UnmergeOnly:
    return UnmergeOnly(options.max_step_requests, options.max_wait_seconds)
