"""First come, first served, in steps as short as throughput allows, merging an adapter if it pays.

It goes beyond the paper (decision 42). The rows of a prompt delay each answer that is decoded in
the same step. Above some number of rows, a step computes no more rows per second. So prompts are
computed one after another, in the smallest chunks that cost no more than a given share of the
throughput. Requests keep the order of `unmerge_only`: none waits for a later one.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence

from vlora.config import Options
from vlora.engine.cost import CostModel, Part
from vlora.engine.policies.base import Candidate, Choice, Order, service_rank
from vlora.ids import BASE

CHUNK_ROWS = (16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
# Weight of the latest merge in the trust, its limits, and how fast a step restores it towards 1.
TRUST_WEIGHT, TRUST_LIMITS, TRUST_RECOVERY = 0.3, (-1.0, 1.5), 0.0005


class Predictive:
    """The predictive policy (see the module's docstring).

    max_wait: requests that have waited longer than this go first, whatever their priority.
    throughput_loss: share of the throughput that shorter steps may cost.
    merging: the choice of the adapter to merge, which also measures its gains.
    """

    uses_costs = True
    merges = True
    orders = (Order.WAIT, Order.PRIORITY, Order.DEADLINE)

    def __init__(
        self,
        max_batch: int,
        max_rows: int,
        max_wait: float,
        throughput_loss: float,
        costs: CostModel,
    ) -> None:
        self.max_batch = max_batch
        self.merging = GainfulMerging(costs)
        self._max_rows = max_rows
        self._max_wait = max_wait
        self._loss = throughput_loss
        self._costs = costs

    def choose(self, ready: Sequence[Candidate], live: int, now: float) -> Choice:
        order = sorted(ready, key=lambda r: service_rank(r, now, self._max_wait, self._costs))
        order = order[: self.max_batch]
        decoding = [r for r in order if r.missing == 1]
        prompts = [r for r in order if r.missing > 1]
        rows = {r.id: 1 for r in decoding}
        available = self._prompt_rows(decoding, prompts, live)
        for r in prompts:
            if count := min(r.missing, available):
                rows[r.id] = count
                available -= count
        chosen = tuple(r for r in order if r.id in rows)
        return Choice(chosen, self.merging.choose(ready, chosen, rows, live), rows)

    def _prompt_rows(
        self, decoding: Sequence[Candidate], prompts: Sequence[Candidate], live: int
    ) -> int:
        """Return how many rows of prompts a step with these decoding requests should have."""
        most = min(self._max_rows - len(decoding), sum(r.missing for r in prompts))
        if most <= 0:
            return 0
        # What each step costs, however few rows it has.
        fixed = self._costs.overhead(1)
        fixed += self._costs.adapters(Counter(r.slot for r in [*decoding, prompts[0]]), live)
        fixed += sum(self._costs.attention(1, r.context) for r in [*decoding, prompts[0]])

        def row_seconds(count: int) -> float:
            rows = len(decoding) + count
            return (self._costs.products(rows, 1) + fixed) / rows

        longest = (1 + self._loss) * row_seconds(most)
        few = (count for count in CHUNK_ROWS if count < most and row_seconds(count) <= longest)
        # A prompt that delays no answer is not divided.
        least = 0 if decoding else prompts[0].missing
        return max(next(few, most), min(least, most))


class GainfulMerging:
    """Chooses the adapter to merge by the predicted gain, corrected by the gains of earlier merges.

    predicted_gain, realised_gain: seconds that all ended merges were predicted to save, and have
        saved, after the time of the switches.
    """

    def __init__(self, costs: CostModel) -> None:
        self.predicted_gain = 0.0
        self.realised_gain = 0.0
        self._costs = costs
        # Factor of predicted savings: an average of realised over predicted gains.
        self._trust = 1.0
        self._merged = BASE
        self._predicted = self._realised = self._peak = 0.0

    def choose(
        self,
        ready: Sequence[Candidate],
        chosen: Sequence[Candidate],
        rows: Mapping[str, int],
        live: int,
    ) -> int:
        """Return the adapter that should be live in a step with these rows, or BASE."""
        best, gain, steps = self._best(ready, live)
        if best != BASE:
            parts = [Part(r.slot, rows[r.id], r.context, rows[r.id] == r.missing) for r in chosen]
            measured, profiled = self._costs.saving(parts, best)
            gain += steps * (measured - profiled)
            if gain <= 0.0 or (best == self._merged and self._disappoints()):
                best = BASE
        if self._merged not in (BASE, best):
            self._learn()
        if best not in (BASE, self._merged):
            self._predicted = gain
            self._realised = self._peak = -self._costs.switch(live, best)
        self._merged = best
        if best != BASE:
            self._realised += measured
            self._peak = max(self._peak, self._realised)
        self._trust += TRUST_RECOVERY * (1.0 - self._trust)
        return best

    def _disappoints(self) -> bool:
        """Return whether the present merge has lost as much as another one would cost."""
        # This bounds the loss of a wrong prediction, whatever caused it.
        loss = self._peak - self._realised
        return self._merged != BASE and loss > self._costs.merge(self._merged)

    def _learn(self) -> None:
        least, most = TRUST_LIMITS
        ratio = min(max(self._realised / self._predicted, least), most)
        self._trust += TRUST_WEIGHT * (ratio - self._trust)
        self.predicted_gain += self._predicted
        self.realised_gain += self._realised

    def _best(self, ready: Sequence[Candidate], live: int) -> tuple[int, float, int]:
        """Return the adapter whose merge saves the most time over the remaining work, or BASE, the
        seconds that it saves by the profile, and in how many steps.

        A merge saves reading the adapter and applying it to the rows of its own requests. It also
        saves the calls of the LoRA operator in steps without other adapters. It costs the switch,
        and the subtraction of the adapter from the rows of all other requests.
        """
        rows: defaultdict[int, int] = defaultdict(int)
        steps: defaultdict[int, int] = defaultdict(int)
        for r in ready:
            rows[r.slot] += r.missing + r.remaining
            steps[r.slot] = max(steps[r.slot], 1 + r.remaining)
        total = sum(rows.values())
        second, longest = sorted([0, 0, *steps.values()])[-2:]
        best, best_gain = BASE, 0.0
        for slot in sorted({*rows, live} - {BASE}, key=lambda slot: slot != live):
            if not self._costs.mergeable(slot):
                continue
            other_steps = second if steps[slot] == longest else longest
            saved = self._costs.apply_adapter(slot, 2 * rows[slot] - total)
            per_step = self._costs.read_adapter(slot) + self._costs.lora_calls()
            saved += per_step * (steps[slot] - other_steps)
            trusted = max(min(self._trust, 1.0), 0.0) * saved if saved > 0.0 else saved
            gain = trusted - self._costs.switch(live, slot)
            if gain > best_gain:
                best, best_gain = slot, gain
        return best, best_gain, steps[best]


def make(options: Options, costs: CostModel) -> Predictive:
    return Predictive(
        options.max_step_requests,
        options.max_num_batched_tokens,
        options.max_wait_seconds,
        options.throughput_loss,
        costs,
    )
