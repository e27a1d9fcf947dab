"""Scheduling policies of other systems. `register` makes them valid values of an option.

`merge_only` merges the oldest request's adapter and runs all requests of this adapter.

`dlora` (OSDI 24) chooses between merged and unmerged batches. A merged batch holds the requests of
one adapter. An adapter gains credit when its requests are passed over, and pays credit when its
requests are served before their position in the queue. Adapters whose credit exceeds a threshold
are served first.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence

from vlora.config import Options
from vlora.engine.policies.base import Candidate, Choice, Costs, Order, register_policy
from vlora.ids import BASE

CREDIT = 10_000.0
"""One unit of credit. An adapter with one unit is served first until it has less than half a unit.
An adapter is not merged while its debt exceeds n units, where n is the number of other known
adapters.
"""
PUBLISHED_SECONDS = (0.015, 0.027, 0.020)
"""Seconds that dLoRA's authors measured: a merged step, an unmerged step, a change of mode."""
ADDITIVE_STEP, MULTIPLICATIVE_STEP = 0.05, 1.1
"""Change of a merging threshold. If the two thresholds approach each other, one of them changes by
this amount. If they separate, one is multiplied or divided by this factor."""


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


class DLora:
    """Policy of dLoRA with the step times of this machine.

    The step times come from the cost model when the first mergeable adapter arrives. Until then the
    published times are used.
    """

    uses_costs = True
    merges = True
    orders = (Order.ARRIVAL,)

    def __init__(self, max_batch: int, costs: Costs) -> None:
        self.max_batch = max_batch
        self._costs = costs
        self._credit: defaultdict[str, float] = defaultdict(float)
        self._known: set[str] = set()
        self._by_credit: set[str] = set()
        self._active: str | None = None
        self._merged_step, self._unmerged_step, self._switch = PUBLISHED_SECONDS
        self._profiled = False
        # Minimum share of a batch's requests that the largest adapter needs to be merged, and that
        # the live adapter needs to stay merged.
        self._enter, self._leave = 1.0, self._speed
        self._steps = self._merged_served = self._unmerged_served = 0
        self._would_switch = 0
        self._largest: str | None = None

    def choose(self, ready: Sequence[Candidate], live: int, now: float) -> Choice:
        self._note_new_adapters(ready)
        fcfs = list(ready[: self.max_batch])
        slots = {_name(r): r.slot for r in ready if self._costs.mergeable(r.slot)}
        counts = Counter(_name(r) for r in ready if _name(r) in slots)
        credited = self._credited(ready)
        if credited:
            self._to_unmerged()
            chosen = credited + [r for r in fcfs if _name(r) not in self._by_credit]
            chosen = chosen[: self.max_batch]
            self._settle(fcfs, chosen, 1.0 / self.max_batch)
            return Choice(tuple(chosen), BASE)
        least = -CREDIT * (len(self._known) - 1)
        counts = Counter({name: n for name, n in counts.items() if self._credit[name] >= least})
        if not counts:
            self._to_unmerged()
            return Choice(tuple(fcfs), BASE)
        largest = max(sorted(counts), key=lambda name: counts[name])
        active = self._active
        if active is not None and counts[active] >= max(1, self._leave * len(fcfs)):
            self._steps += 1
        elif counts[largest] >= self._enter * len(fcfs):
            self._adjust()
            active, self._steps = largest, 1
        else:
            if largest != self._largest:
                self._would_switch, self._largest = self._would_switch + 1, largest
            active = None
        merged = largest if active is None else active
        batch = [r for r in ready if _name(r) == merged][: self.max_batch]
        self._merged_served += len(batch)
        self._unmerged_served += len(fcfs)
        if active is None:
            self._to_unmerged()
            return Choice(tuple(fcfs), BASE)
        self._active = active
        self._settle(fcfs, batch, 1.0 / (self._speed * self.max_batch))
        return Choice(tuple(batch), slots[active])

    @property
    def _speed(self) -> float:
        return min(1.0, self._merged_step / self._unmerged_step)

    def _note_new_adapters(self, ready: Sequence[Candidate]) -> None:
        """Give new adapters zero credit. At the first mergeable one, get the step times."""
        for name in {_name(r) for r in ready} - self._known:
            self._known.add(name)
            self._credit[name] = 0.0
        adapter = next((r for r in ready if self._costs.mergeable(r.slot) and r.slot != BASE), None)
        if not self._profiled and adapter is not None:
            self._profiled = True
            one_row = [adapter._replace(missing=1)]
            (self._merged_step,) = self._costs.steps(one_row, adapter.slot)
            (self._unmerged_step,) = self._costs.steps(one_row, BASE)
            self._switch = self._costs.switch(BASE, adapter.slot)
            self._leave = self._speed

    def _credited(self, ready: Sequence[Candidate]) -> list[Candidate]:
        """Return the requests of adapters with enough credit, highest credit first."""
        self._by_credit = {
            name
            for name in self._known
            if self._credit[name] >= CREDIT
            or (name in self._by_credit and self._credit[name] >= CREDIT / 2)
        }
        order = sorted(self._by_credit, key=lambda name: -self._credit[name])
        return [r for name in order for r in ready if _name(r) == name][: self.max_batch]

    def _settle(self, fcfs: Sequence[Candidate], chosen: Sequence[Candidate], price: float) -> None:
        """Move credit from adapters that were served early to those that were passed over.

        price: credit that one request served early pays to one that was passed over.
        """
        served, due = {r.id for r in chosen}, {r.id for r in fcfs}
        early = [r for r in chosen if r.id not in due]
        passed = [r for r in fcfs if r.id not in served]
        if len(early) != len(passed):
            early = [chosen[0]] * len(passed)
            price /= 2
        for payer, payee in zip(early, passed, strict=True):
            self._credit[_name(payer)] -= price
            self._credit[_name(payee)] += price

    def _to_unmerged(self) -> None:
        """Choose unmerged mode for this step, and count the step.

        If the previous step was merged, adjust the thresholds and restart the count at one.
        """
        if self._active is not None:
            self._adjust()
            self._active, self._steps = None, 1
        else:
            self._steps += 1

    def _adjust(self) -> None:
        """Adjust the merging thresholds before a change of mode.

        Since the last change, the policy has counted the requests that each mode served or would
        have served. If the mode that ends has the higher number per second, the thresholds approach
        each other. If it has the lower number, they separate.
        """
        merged_time = self._merged_step * self._steps
        unmerged_time = self._unmerged_step * self._steps
        if self._active is not None:
            merged_time += self._switch
        else:
            unmerged_time += self._switch
            merged_time += self._switch * self._would_switch
        if merged_time > 0 and unmerged_time > 0:
            merged = self._merged_served / merged_time
            unmerged = self._unmerged_served / unmerged_time
            if self._active is not None:
                if merged > unmerged and self._enter - ADDITIVE_STEP > self._leave:
                    self._enter -= ADDITIVE_STEP
                elif merged < unmerged:
                    self._enter *= MULTIPLICATIVE_STEP
            elif unmerged > merged and self._leave + ADDITIVE_STEP < self._enter:
                self._leave += ADDITIVE_STEP
            elif unmerged < merged:
                self._leave /= MULTIPLICATIVE_STEP
        self._merged_served = self._unmerged_served = self._would_switch = 0
        self._largest = None


def _name(r: Candidate) -> str:
    # Credit is counted by name, because a slot can pass to another adapter.
    return r.adapter or ""


def register() -> None:
    """Make the baselines valid values of the option `policy`."""
    register_policy("merge_only", "benchmarks.baseline_policies:make_merge_only")
    register_policy("dlora", "benchmarks.baseline_policies:make_dlora")


def make_merge_only(options: Options, costs: Costs) -> MergeOnly:
    return MergeOnly(options.max_step_requests, costs)


def make_dlora(options: Options, costs: Costs) -> DLora:
    return DLora(options.max_step_requests, costs)
