"""Who runs in the next step, and with which adapter in the weights: Algorithm 1 and the baselines.

Pure: values in, a `Choice` out; no torch, no clock but the one given, no pages. An allocator walks
the order afterwards and gives pages and rows (`scheduler.py`).
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from vlora.ids import BASE


class Candidate(NamedTuple):
    """A request that the next step could compute: waiting or running, its adapter resident.

    wait: seconds ready but not scheduled, in all; it does not grow while running and never resets.
    missing: known tokens to be computed. context: tokens computed. left: the most it may still say
    after them. holds: it has pages. deadline: on the engine's clock. priority: lower goes first.
    """

    id: str
    slot: int
    arrival: float = 0.0
    wait: float = 0.0
    missing: int = 1
    context: int = 0
    left: int = 0
    holds: bool = False
    deadline: float = math.inf
    priority: int = 0


class Choice(NamedTuple):
    """order: who runs, first to be given pages and rows first. live: the adapter in the weights, or
    BASE. rows: prompt rows by request, where it gets fewer than the step has room for. credits:
    seconds by request, where the policy has them."""

    order: tuple[Candidate, ...]
    live: int
    rows: dict[str, int] | None = None
    credits: dict[str, float] | None = None


class Costs(Protocol):
    """What policies ask about time; seconds."""

    def step(self, ready: Sequence[Candidate], live: int) -> float:
        """Of a step that computes all that these miss, with this adapter in the weights."""
        ...

    def switch(self, live: int, to: int) -> float:
        """Of putting adapter `to` in the weights instead of `live`."""
        ...

    def mergeable(self, slot: int) -> bool:
        """Whether this adapter may be in the weights at all."""
        ...


class Policy(Protocol):
    def choose(self, ready: Sequence[Candidate], live: int, now: float) -> Choice:
        """ready: at least one, in order of arrival. live: what is in the weights now."""
        ...


@dataclass(frozen=True)
class CreditConfig:
    """Algorithm 1 with its constants, and our departures from it, each of them a name.

    max_batch: MaxBS, requests of a step. theta_min: θ in seconds.

    theta_factor: θ is at least so many times the median wait. The paper's θ is a constant; with
        one, every overload is unmerged.
    max_wait: whoever has waited so long is starved whatever θ has become: the bound on waits.
    by_ready: both tests compare with half of min(MaxBS, |R|), since with MaxBS alone low load never
        merges.
    own_need_none: starved requests of the candidate need no deLoRA and do not count in the first
        test.
    ties_keep_live: of two adapters with as many requests the live one is the candidate.
    base_merges: the base is a candidate, with no weights to merge.
    by_credit: the starved go by credit, highest first, and not by arrival.
    """

    max_batch: int
    theta_min: float = 1.0
    theta_factor: float = 0.0
    max_wait: float = math.inf
    by_ready: bool = False
    own_need_none: bool = False
    ties_keep_live: bool = False
    base_merges: bool = False
    by_credit: bool = False


def ours(max_batch: int, theta_min: float, theta_factor: float, max_wait: float) -> CreditConfig:
    """The rule with all our departures."""
    return CreditConfig(max_batch, theta_min, theta_factor, max_wait, True, True, True, True, True)


class Credit:
    """Algorithm 1 (§4.4.3). A request's credit: its wait, the predicted next step of it in the
    present mode, and the predicted switch to its adapter."""

    def __init__(self, rule: CreditConfig, costs: Costs) -> None:
        self._rule = rule
        self._costs = costs

    def choose(self, ready: Sequence[Candidate], live: int, now: float) -> Choice:
        rule, size = self._rule, self._rule.max_batch
        credit = self._credits(ready, live)
        theta = min(max(rule.theta_min, rule.theta_factor * _median_wait(ready)), rule.max_wait)
        # 2: R_starve = [R_i.credit > θ]; MaxBS cuts it.
        starved = [r for r in ready if credit[r.id] > theta]
        if rule.by_credit:
            starved.sort(key=lambda r: -credit[r.id])
        starved = starved[:size]
        # 4: R_merge = argmax over adapters of {r ∈ R | r.lora = l}.
        candidate = self._candidate(ready, live)
        merge = [r for r in ready if r.slot == candidate]
        others = [r for r in starved if not (rule.own_need_none and r.slot == candidate)]
        half = 0.5 * (min(size, len(ready)) if rule.by_ready else size)
        # 5: |R_starve| / MaxBS < 0.5 and |R_merge| / MaxBS > 0.5.
        if len(others) < half and len(merge) > half:
            if not others:
                # 6–8: merged.
                return Choice(_first(starved, merge)[:size], candidate, credits=credit)
            # 9–12: mixture; deLoRA follows from `live`, by the signs of the segments.
            room = size - len(others)
            mine = _first([r for r in starved if r.slot == candidate], merge)
            rest = [r for r in mine if r not in others][:room]
            return Choice((*others, *rest), candidate, credits=credit)
        # 13–15: unmerged.
        return Choice(_first(starved, ready)[:size], BASE, credits=credit)

    def _credits(self, ready: Sequence[Candidate], live: int) -> dict[str, float]:
        """By request; requests alike in adapter and rows have the same predictions."""
        predicted: dict[tuple[int, int], float] = {}
        found = {}
        for r in ready:
            key = (r.slot, r.missing)
            if key not in predicted:
                step = self._costs.step([r], live)
                predicted[key] = step + self._costs.switch(live, r.slot)
            found[r.id] = r.wait + predicted[key]
        return found

    def _candidate(self, ready: Sequence[Candidate], live: int) -> int:
        """The adapter of most requests that may be merged; BASE where there is none."""
        counts = Counter(r.slot for r in ready)
        allowed = [
            slot
            for slot in sorted(counts)
            if (slot == BASE and self._rule.base_merges)
            or (slot != BASE and self._costs.mergeable(slot))
        ]
        if not allowed:
            return BASE
        keep = self._rule.ties_keep_live
        return max(allowed, key=lambda slot: (counts[slot], keep and slot == live))


def _first(these: Sequence[Candidate], everyone: Sequence[Candidate]) -> tuple[Candidate, ...]:
    """`these` that are among everyone, then everyone else."""
    known, among = {r.id for r in these}, {r.id for r in everyone}
    return (*(r for r in these if r.id in among), *(r for r in everyone if r.id not in known))


def _median_wait(ready: Sequence[Candidate]) -> float:
    return statistics.median(r.wait for r in ready)


class UnmergeOnly:
    """Punica's and S-LoRA's way: nothing in the weights; first come, first served, among those of
    one priority. Who has pages keeps them, though an older one's adapter has come meanwhile.
    max_wait: whoever has waited so many seconds goes first: the bound on waits.

    The scheduler does the same by itself where all have one priority, and shows it nobody."""

    def __init__(self, max_batch: int, max_wait: float = math.inf) -> None:
        self.size = max_batch
        self.max_wait = max_wait

    def choose(self, ready: Sequence[Candidate], live: int, now: float) -> Choice:
        order = sorted(ready, key=lambda r: (r.wait <= self.max_wait, r.priority, not r.holds))
        return Choice(tuple(order[: self.size]), BASE)


class MergeOnly:
    """One adapter at a time, the oldest request's, and all requests of it."""

    def __init__(self, max_batch: int, costs: Costs) -> None:
        self._size = max_batch
        self._costs = costs

    def choose(self, ready: Sequence[Candidate], live: int, now: float) -> Choice:
        slot = ready[0].slot
        same = tuple(r for r in ready if r.slot == slot)[: self._size]
        return Choice(same, slot if self._costs.mergeable(slot) else BASE)
