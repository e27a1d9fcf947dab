"""Algorithm 1 of the paper (§4.4.3). docs/policies.md explains each difference."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from vlora.config import Options
from vlora.engine.policies.base import (
    NOT_PRESSING,
    Candidate,
    Choice,
    Costs,
    Order,
    service_rank,
)
from vlora.ids import BASE
from vlora.offline.premerge import premerged_adapter


class PaperPolicy:
    """Algorithm 1. A request is starved if its credit exceeds θ.

    max_batch: MaxBS, the maximum number of requests in a step.
    theta_steps: θ, as a multiple of the longest next step of a request, with its switch.
    max_wait: seconds of waiting after which a request goes first.
    premerged: adapter that the base weights contain (`vlora premerge`), if any. Its requests and
        those of the base model are one group, which is merged without a switch.
    """

    uses_costs = True
    merges = True
    orders = (Order.WAIT, Order.PRIORITY, Order.DEADLINE)

    def __init__(
        self,
        max_batch: int,
        theta_steps: float,
        max_wait: float,
        costs: Costs,
        premerged: str | None = None,
    ) -> None:
        self.max_batch = max_batch
        self._theta_steps = theta_steps
        self._max_wait = max_wait
        self._costs = costs
        self._premerged = premerged

    def choose(self, ready: Sequence[Candidate], live: int, now: float) -> Choice:
        ranks = {r.id: service_rank(r, now, self._max_wait, self._costs) for r in ready}
        ready = sorted(ready, key=lambda r: ranks[r.id])
        own = self._own_seconds(ready, live)
        # With a constant θ, a prompt whose prefill takes longer would be starved at its arrival.
        theta = self._theta_steps * max(own)
        credit = {r.id: r.wait + seconds for r, seconds in zip(ready, own, strict=True)}
        # Line 2. Overdue requests and those with urgent deadlines are starved too.
        starved = [r for r in ready if credit[r.id] > theta or ranks[r.id][:2] < NOT_PRESSING]
        starved = starved[: self.max_batch]
        merged = self._most_requested(ready, live)
        # Line 5. MaxBS is replaced by min(MaxBS, |R|), else nothing would be merged at low load.
        half = 0.5 * min(self.max_batch, len(ready))
        own_adapter = [r for r in ready if self._merged_slot(r) == merged]
        # Only requests of other adapters starve in merged mode (§4.4.2).
        others = sum(self._merged_slot(r) != merged for r in starved)
        if merged is not None and others < half < len(own_adapter):
            # Lines 6–12: a mixture if a request in the step has another adapter, else merged.
            return Choice(self._batch(starved, own_adapter), merged, credits=credit)
        # Lines 13–15: unmerged.
        return Choice(self._batch(starved, ready), BASE, credits=credit)

    def _own_seconds(self, ready: Sequence[Candidate], live: int) -> list[float]:
        """Return the seconds of each request's next step and of a switch to its adapter."""
        switches = {slot: self._costs.switch(live, slot) for slot in {r.slot for r in ready}}
        steps = self._costs.steps(ready, live)
        return [step + switches[r.slot] for r, step in zip(ready, steps, strict=True)]

    def _merged_slot(self, r: Candidate) -> int:
        """Return the slot of the live adapter with which the request is merged."""
        return BASE if r.adapter is not None and r.adapter == self._premerged else r.slot

    def _most_requested(self, ready: Sequence[Candidate], live: int) -> int | None:
        """Line 4: return the mergeable adapter with the most requests, or None."""
        counts = Counter(self._merged_slot(r) for r in ready)
        if self._premerged is None:
            del counts[BASE]
        slots = [slot for slot in counts if self._costs.mergeable(slot)]
        # Of equal ones the live one, as it needs no switch.
        return max(slots, key=lambda slot: (counts[slot], slot == live, -slot), default=None)

    def _batch(
        self, starved: Sequence[Candidate], rest: Sequence[Candidate]
    ) -> tuple[Candidate, ...]:
        taken = {r.id for r in starved}
        return (*starved, *[r for r in rest if r.id not in taken])[: self.max_batch]


def make(options: Options, costs: Costs) -> PaperPolicy:
    return PaperPolicy(
        options.max_step_requests,
        options.theta_steps,
        options.max_wait_seconds,
        costs,
        premerged_adapter(options.model, options.adapters),
    )
