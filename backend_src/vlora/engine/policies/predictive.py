"""The policy that maximizes the predicted gain per second of a step, and merges an adapter if that
saves time.

It goes beyond the paper (decision 43). A request's part of the gain is the share of its remaining
work that the step completes, times its weight. The gain of a step is the sum of these parts.

- A decoding request is added if the step reads its adapter anyway, because a row costs little.
- Any other decoding request causes its adapter to be read. It is added only if it raises the gain
  per second.
- A prompt delays all requests of the step. It is added only if it raises the gain per second.
  Prompts with the least remaining work are tried first.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence

from vlora.config import Options
from vlora.engine.cost import CostModel, applied_adapters
from vlora.engine.policies.base import Candidate, Choice, Order
from vlora.ids import BASE

# A request is urgent if the time to its deadline is at most this multiple of the predicted time of
# its remaining work.
URGENT_FACTOR = 2.0
# Take the smallest chunk with this share of the best gain: others wait meanwhile.
ENOUGH_GAIN = 0.97
FULL_ROWS = 64  # Rows of a step that is assumed to use the processor fully.
# Worth of a prompt row, in rows of an answer: requests decode together only once their prompts are
# complete. On the policy benchmark's traces, 2 to 8 performed equally, less was worse.
PROMPT_WORTH = 2.0
# Expected decode steps shared with the present requests, as a share of the maximum.
SHARED_STEPS = 0.5
MAX_REFUSALS = 64  # Number of rejected prompts after which a step considers no further prompts.
# Prefill chunks to compare with the whole rest. Smaller ones cost more than they gain.
CHUNK_ROWS = (128, 256, 512, 1024, 2048)


class Predictive:
    """The predictive policy (see the module's docstring).

    max_wait: requests that have waited longer than this go first, whatever they cost.
    """

    uses_costs = True
    merges = True
    orders = (Order.WAIT, Order.PRIORITY, Order.DEADLINE)

    def __init__(self, max_batch: int, max_rows: int, max_wait: float, costs: CostModel) -> None:
        self.max_batch = max_batch
        self._max_rows = max_rows
        self._max_wait = max_wait
        self._costs = costs

    def choose(self, ready: Sequence[Candidate], live: int, now: float) -> Choice:
        next_live = self._best_live(ready, live)
        work = _RemainingWork(self._costs)
        overdue: list[Candidate] = []
        urgent: list[Candidate] = []
        decoding: list[Candidate] = []
        prompts: list[Candidate] = []
        for r in ready:
            if r.wait > self._max_wait:
                overdue.append(r)
            elif r.deadline < math.inf and r.deadline - now <= URGENT_FACTOR * work.seconds(r):
                urgent.append(r)
            else:
                (decoding if r.missing == 1 else prompts).append(r)
        overdue.sort(key=lambda r: -r.wait)
        urgent.sort(key=lambda r: r.deadline)
        step = _PlannedStep(self._costs, next_live, self._max_rows, Counter(r.slot for r in ready))
        for r in [*overdue, *urgent][: self.max_batch]:
            step.take(r, r.missing)
        decoding.sort(key=lambda r: (r.priority, r.remaining))
        for r in decoding:
            if len(step.order) == self.max_batch:
                break
            if not step.take_decode_row(r):
                step.consider(r)
        if len(step.order) < self.max_batch:
            self._add_prompts(prompts, work, step)
        return Choice(tuple(step.order), next_live, step.rows)

    def _add_prompts(
        self, prompts: list[Candidate], work: _RemainingWork, step: _PlannedStep
    ) -> None:
        prompts.sort(key=lambda r: (r.priority, work.seconds(r)))
        refused = 0
        for r in prompts:
            if len(step.order) == self.max_batch or refused == MAX_REFUSALS:
                break
            refused += not step.consider(r)

    def _best_live(self, ready: Sequence[Candidate], live: int) -> int:
        """Return the adapter whose merge saves the most time over the remaining work, or BASE.

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
            gain = saved - self._costs.switch(live, slot)
            if gain > best_gain:
                best, best_gain = slot, gain
        return best


class _RemainingWork:
    """Remaining work of requests in seconds if all steps had FULL_ROWS rows. Made once per step."""

    def __init__(self, costs: CostModel) -> None:
        self._costs = costs
        self._row_seconds = costs.products(FULL_ROWS, 1) / FULL_ROWS
        # Predicted seconds per row of a request, by slot, including its adapter.
        self._adapted_row_seconds: dict[int, float] = {}

    def seconds(self, r: Candidate) -> float:
        rows = r.missing + r.remaining
        per_row = self._adapted_row_seconds.get(r.slot)
        if per_row is None:
            per_row = self._row_seconds + self._costs.apply_adapter(r.slot, 1)
            self._adapted_row_seconds[r.slot] = per_row
        return rows * per_row + self._costs.attention(rows, r.context)


class _PlannedStep:
    """A step to which requests are added one by one.

    Whether `consider` adds a request, the time to read its adapter is divided by the adapter's
    requests. Otherwise the first one would bear the whole time.
    """

    def __init__(
        self, costs: CostModel, live: int, max_rows: int, requests_by_slot: Mapping[int, int]
    ) -> None:
        self._costs = costs
        self._live = live
        self._free_rows = max_rows
        self._requests_by_slot = requests_by_slot
        self._lora_calls = costs.lora_calls()
        self._single_step = costs.products(1, 1) + costs.overhead(1)
        # Requests with an adapter applied to their rows.
        self._adapted = sum(n for slot, n in requests_by_slot.items() if slot != live)
        self._read: set[int] = set()  # Slots of the adapters that the requests taken so far use.
        # Seconds per row by slot, for slots whose applied adapters are all in `_read`.
        self._row_seconds: dict[int, float] = {}
        self._applied: dict[int, tuple[tuple[int, float, float], ...]] = {}
        self._row_count = self._answers = self._longest = 0
        self._gain = 0.0
        self._other_seconds = 0.0  # Time of attention and of adapters.
        self.order: list[Candidate] = []
        self.rows: dict[str, int] = {}

    def take_decode_row(self, r: Candidate) -> bool:
        """Take one row of a decoding request if the step reads the request's adapters already and
        has a free row. Returns whether the step reads these adapters.
        """
        seconds = self._row_seconds.get(r.slot)
        if seconds is None:
            applied = self._adapters_of(r.slot)
            if any(slot not in self._read for slot, _, _ in applied):
                return False
            seconds = self._row_seconds[r.slot] = sum(per_row for _, _, per_row in applied)
        if self._free_rows:
            self._add(r, 1, seconds)
        return True

    def consider(self, r: Candidate) -> bool:
        """Take a chunk if that raises the step's gain per second; return whether one was taken."""
        available = min(r.missing, self._free_rows)
        if available == 0:
            return False
        rate = self._gain / self._seconds() if self.order else 0.0
        chunks = (*CHUNK_ROWS[: bisect_left(CHUNK_ROWS, available)], available)
        fixed, per_row = self._adapter_seconds(r.slot, shared=True)
        rates = [(self._rate_with(r, rows, fixed + per_row * rows, rate), rows) for rows in chunks]
        best = max(new_rate for new_rate, _ in rates)
        if best <= rate:
            return False
        enough = rate + ENOUGH_GAIN * (best - rate)
        self.take(r, next(rows for new_rate, rows in rates if new_rate >= enough))
        return True

    def take(self, r: Candidate, rows: int) -> None:
        rows = min(rows, self._free_rows)
        if rows == 0:
            return
        fixed, per_row = self._adapter_seconds(r.slot, shared=False)
        self._read.update(slot for slot, _, _ in self._adapters_of(r.slot))
        self._add(r, rows, fixed + per_row * rows)

    def _add(self, r: Candidate, rows: int, adapter_seconds: float) -> None:
        self._other_seconds += self._costs.attention(rows, r.context) + adapter_seconds
        self._gain += _gain_of(r, rows)
        self._row_count += rows
        self._answers += rows == r.missing
        self._longest = max(self._longest, r.remaining)
        self._free_rows -= rows
        self.order.append(r)
        self.rows[r.id] = rows

    def _seconds(self, rows: int = 0, answers: int = 0, requests: int = 0) -> float:
        products = self._costs.products(self._row_count + rows, self._answers + answers)
        return products + self._other_seconds + self._costs.overhead(len(self.order) + requests)

    def _rate_with(self, r: Candidate, rows: int, adapter_seconds: float, rate: float) -> float:
        """Return the gain per second with these rows; `rate` is the step's without them."""
        gain = _gain_of(r, rows)
        if r.missing == rows and self._gain > 0.0:
            gain += self._sharing_gain(r, rate)
        seconds = self._seconds(rows, rows == r.missing, 1)
        seconds = seconds + adapter_seconds + self._costs.attention(rows, r.context)
        return (self._gain + gain) / seconds

    def _sharing_gain(self, r: Candidate, rate: float) -> float:
        """Return the gain of decoding together with the other requests instead of after them.

        Each later decode step that the request shares saves the fixed cost of a step.
        """
        if r.missing == 1:
            return 0.0
        fixed_share = min(1.0, self._single_step * rate / self._gain)
        shared_steps = min(r.remaining, self._longest)
        return SHARED_STEPS * _weight(r) * fixed_share * shared_steps / (1 + self._longest)

    def _adapter_seconds(self, slot: int, *, shared: bool) -> tuple[float, float]:
        """Return the seconds (fixed, per row) that the adapters of a request in this slot add.

        If `shared`, fixed times are divided among the requests that cause them.
        """
        applied = self._adapters_of(slot)
        fixed = per_row = 0.0
        if applied and not self._read:
            fixed = self._lora_calls / (self._adapted if shared else 1)
        for adapter, read_seconds, row_seconds in applied:
            per_row += row_seconds
            if adapter not in self._read:
                is_live = adapter == self._live
                users = self._adapted if is_live else self._requests_by_slot[adapter]
                fixed += read_seconds / (users if shared else 1)
        return fixed, per_row

    def _adapters_of(self, slot: int) -> tuple[tuple[int, float, float], ...]:
        """Return (adapter, seconds to read it, seconds per row) for a slot's applied adapters."""
        applied = self._applied.get(slot)
        if applied is None:
            costs = self._costs
            applied = tuple(
                (adapter, costs.read_adapter(adapter), costs.apply_adapter(adapter, 1))
                for adapter in applied_adapters(slot, self._live)
            )
            self._applied[slot] = applied
        return applied


def _gain_of(r: Candidate, rows: int) -> float:
    """Return the share of the request's remaining work that the rows complete, times its weight."""
    worth = PROMPT_WORTH if r.missing > 1 else 1.0
    return _weight(r) * worth * rows / (worth * r.missing + r.remaining)


def _weight(r: Candidate) -> float:
    """Return 2 ** −`priority`, with `priority` limited to −8 … 8."""
    return 2.0 ** -float(min(max(r.priority, -8), 8)) if r.priority else 1.0


def make(options: Options, costs: CostModel) -> Predictive:
    return Predictive(
        options.max_step_requests, options.max_num_batched_tokens, options.max_wait_seconds, costs
    )
