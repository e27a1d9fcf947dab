"""First come, first served, with no adapter ever merged, as in Punica and S-LoRA."""

from __future__ import annotations

import math
from collections.abc import Sequence

from vlora.config import Options
from vlora.engine.policies.base import Candidate, Choice, Costs, Order
from vlora.ids import BASE


class UnmergeOnly:
    """Computes requests in order of arrival within each priority, and never merges an adapter.

    Within a priority, requests that hold pages come before all waiting ones.

    max_wait: seconds of waiting after which a request goes first, longest wait first, whatever its
        priority (decision 41).
    """

    uses_costs = False
    merges = False
    orders = (Order.WAIT, Order.PRIORITY)

    def __init__(self, max_batch: int, max_wait: float = math.inf) -> None:
        self.max_batch = max_batch
        self.max_wait = max_wait

    def choose(self, ready: Sequence[Candidate], live: int, now: float) -> Choice:
        def rank(r: Candidate) -> tuple[float, int, bool]:
            if r.wait > self.max_wait:
                return -r.wait, 0, False
            return 0.0, r.priority, not r.holds_pages

        return Choice(tuple(sorted(ready, key=rank)[: self.max_batch]), BASE)


def make(options: Options, costs: Costs) -> UnmergeOnly:
    return UnmergeOnly(options.max_step_requests, options.max_wait_seconds)
