"""dLoRA's policy (OSDI 24), by its published rule: merged or unmerged batches, and credits.

Merged, the batch is one adapter's; adapters whose requests were passed over gain credit from those
that were served before their turn, and above a threshold they are served first. Knows what
`policy.py` knows.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence

from vlora.engine.policies.base import Candidate, Choice, Costs
from vlora.ids import BASE

CREDIT = 10_000.0
"""Its unit: an adapter begins with so much for each other one, and is served by credit from so much
for each adapter on, until it has lost half a unit."""
THEIRS = (0.015, 0.027, 0.020)
"""Seconds that they profiled: a merged step, an unmerged one, a switch."""
ADD, MULTIPLY = 0.05, 1.1
"""By which the two thresholds of merging move towards each other, and apart."""


class DLora:
    """With a profile of this machine instead of theirs, from the cost model, once there is an
    adapter to take it of."""

    def __init__(self, max_batch: int, costs: Costs) -> None:
        self._size = max_batch
        self._costs = costs
        self._credit: defaultdict[int, float] = defaultdict(float)
        self._known: set[int] = set()
        self._by_credit: set[int] = set()
        self._active: int | None = None
        self._merged_step, self._unmerged_step, self._switch = THEIRS
        self._profiled = False
        self._enter, self._leave = 1.0, self._speed
        self._steps = self._merged_served = self._unmerged_served = 0
        self._would_switch, self._largest = 0, BASE

    def choose(self, ready: Sequence[Candidate], live: int, now: float) -> Choice:
        self._meet(ready)
        fcfs = list(ready[: self._size])
        counts = Counter(r.slot for r in ready if self._costs.mergeable(r.slot))
        ahead = self._ahead(ready)
        if ahead:
            self._to_unmerged()
            chosen = (ahead + [r for r in fcfs if r.slot not in self._by_credit])[: self._size]
            self._settle(fcfs, chosen, 1.0 / self._size)
            return Choice(tuple(chosen), BASE)
        least = -CREDIT * (len(self._known) - 1)
        counts = Counter({slot: n for slot, n in counts.items() if self._credit[slot] >= least})
        if not counts:
            self._to_unmerged()
            return Choice(tuple(fcfs), BASE)
        largest = max(sorted(counts), key=lambda slot: counts[slot])
        slot = self._active
        if slot is not None and counts[slot] >= self._leave * len(fcfs) and counts[slot]:
            self._steps += 1
        elif counts[largest] >= self._enter * len(fcfs):
            self._adjust()
            slot, self._steps = largest, 1
        else:
            if largest != self._largest:
                self._would_switch, self._largest = self._would_switch + 1, largest
            slot = None
        batch = [r for r in ready if r.slot == (largest if slot is None else slot)][: self._size]
        self._merged_served += len(batch)
        self._unmerged_served += len(fcfs)
        if slot is None:
            self._to_unmerged()
            return Choice(tuple(fcfs), BASE)
        self._active = slot
        self._settle(fcfs, batch, 1.0 / (self._speed * self._size))
        return Choice(tuple(batch), slot)

    @property
    def _speed(self) -> float:
        """Time of a merged step over an unmerged one's."""
        return min(1.0, self._merged_step / self._unmerged_step)

    def _meet(self, ready: Sequence[Candidate]) -> None:
        """Adapters seen for the first time; the profile, once there is one to take it of."""
        for slot in {r.slot for r in ready} - self._known:
            self._known.add(slot)
            self._credit[slot] = 0.0
        adapter = next((r for r in ready if self._costs.mergeable(r.slot) and r.slot != BASE), None)
        if not self._profiled and adapter is not None:
            self._profiled = True
            one = [adapter._replace(missing=1)]
            self._merged_step = self._costs.step(one, adapter.slot)
            self._unmerged_step = self._costs.step(one, BASE)
            self._switch = self._costs.switch(BASE, adapter.slot)
            self._leave = self._speed

    def _ahead(self, ready: Sequence[Candidate]) -> list[Candidate]:
        """Requests of the adapters that are served by credit, most credit first."""
        self._by_credit = {
            slot
            for slot in self._known
            if self._credit[slot] >= CREDIT
            or (slot in self._by_credit and self._credit[slot] >= CREDIT / 2)
        }
        order = sorted(self._by_credit, key=lambda slot: -self._credit[slot])
        return [r for slot in order for r in ready if r.slot == slot][: self._size]

    def _settle(self, fcfs: Sequence[Candidate], chosen: Sequence[Candidate], price: float) -> None:
        """Credit from those served before their turn to those passed over."""
        served, due = {r.id for r in chosen}, {r.id for r in fcfs}
        early = [r for r in chosen if r.id not in due]
        passed = [r for r in fcfs if r.id not in served]
        if len(early) != len(passed):
            early = [chosen[0]] * len(passed)
            price /= 2
        for one, other in zip(early, passed, strict=True):
            self._credit[one.slot] -= price
            self._credit[other.slot] += price

    def _to_unmerged(self) -> None:
        if self._active is not None:
            self._adjust()
            self._active, self._steps = None, 1
        else:
            self._steps += 1

    def _adjust(self) -> None:
        """Thresholds by what merged and unmerged batches served since the last change: additive
        where the present mode won, multiplicative where it lost."""
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
                if merged > unmerged and self._enter - ADD > self._leave:
                    self._enter -= ADD
                elif merged < unmerged:
                    self._enter *= MULTIPLY
            elif unmerged > merged and self._leave + ADD < self._enter:
                self._leave += ADD
            elif unmerged < merged:
                self._leave /= MULTIPLY
        self._merged_served = self._unmerged_served = self._would_switch = 0
        self._largest = BASE
