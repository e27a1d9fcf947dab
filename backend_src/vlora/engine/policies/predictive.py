"""The policy that asks the cost model what a step earns per second and what a merge saves.

This goes beyond the paper (decisions 43 and 58). A request's lateness grows every second until the
request ends, counted from its arrival or past its deadline. Requests that are decoding continue,
because one more row is a small part of a step's cost. Prompts, least remaining work first, and
adapters that the step does not read yet are added if the step then ends more requests per second:
a prompt delays all other requests while it is computed, and an adapter costs its bytes, which all
requests that would use it share.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import Protocol

from vlora.config import Options
from vlora.engine.cost import applied_adapters
from vlora.engine.policies.base import Candidate, Choice, Costs, Order
from vlora.ids import BASE

URGENT_FACTOR = 2.0
"""A deadline is urgent when the time left is at most this multiple of the remaining work."""
ENOUGH_GAIN = 0.97
"""Share of the best chunk's gain at which the smallest such chunk is taken, since no other request
can join before the step ends."""
FULL_ROWS = 64
"""Rows of a step that uses the machine well."""
PROMPT_WORTH = 2.0
"""Worth of a prompt row in answer tokens. A request cannot decode together with others until its
prompt is complete. Of the values 1 to 8, simulated on the traces of the policy benchmark, all from
this one up performed equally."""
SHARED_STEPS = 0.5
"""Share of the decode steps that a prompt could share with other answers if computed now, and that
it will share: the answers may end before their limits."""
MAX_REFUSALS = 64
"""Number of rejected requests after which the step is taken as it is."""
CHUNK_ROWS = (128, 256, 512, 1024, 2048)
"""Chunk sizes that are compared with the rest of the prompt. Smaller chunks are not tried: what a
prompt gains by sharing steps, its request loses by the additional steps (decision 58)."""


class StepCosts(Costs, Protocol):
    """Predicted times by part of a step, in seconds."""

    def products(self, rows: int, answers: int) -> float:
        """Return the time of everything that depends on neither adapter nor context.

        rows: rows of the step. answers: rows whose logits are computed.
        """
        ...

    def overhead(self, requests: int) -> float:
        """Return the time of a step of this many requests outside its forward pass."""
        ...

    def attention(self, rows: int, context: int) -> float:
        """Return the attention time of `rows` rows of one request after `context` positions."""
        ...

    def lora_calls(self) -> float:
        """Return the fixed time of a step that uses any adapter, without the adapters' own."""
        ...

    def read_adapter(self, slot: int) -> float:
        """Return the time of reading an adapter in a step, whatever the number of its rows."""
        ...

    def apply_adapter(self, slot: int, rows: int) -> float:
        """Return the time of applying an adapter to this many rows."""
        ...


class Predictive:
    """The predictive policy.

    max_batch: maximum number of requests of a step.
    max_rows: maximum number of rows of a step.
    max_wait: requests that have waited longer than this many seconds go first, longest wait first,
        whatever they cost. This bounds the waits.
    """

    uses_costs = True
    orders = (Order.WAIT, Order.PRIORITY, Order.DEADLINE)

    def __init__(self, max_batch: int, max_rows: int, max_wait: float, costs: StepCosts) -> None:
        self.max_batch = max_batch
        self._max_rows = max_rows
        self._max_wait = max_wait
        self._costs = costs

    def choose(self, ready: Sequence[Candidate], live: int, now: float) -> Choice:
        next_live = self._best_live(ready, live)
        work = _WorkLeft(self._costs)
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
        bundle = _Bundle(self._costs, next_live, self._max_rows, Counter(r.slot for r in ready))
        for r in [*overdue, *urgent][: self.max_batch]:
            bundle.take(r, r.missing)
        decoding.sort(key=lambda r: (r.priority, r.remaining))
        for r in decoding:
            if len(bundle.order) == self.max_batch:
                break
            if not bundle.take_decode_row(r):
                bundle.consider(r)
        if len(bundle.order) < self.max_batch:
            self._add_prompts(prompts, work, bundle)
        return Choice(tuple(bundle.order), next_live, bundle.rows)

    def _add_prompts(self, prompts: list[Candidate], work: _WorkLeft, bundle: _Bundle) -> None:
        """Add the prompts that pay, by priority and then by the least work left."""
        prompts.sort(key=lambda r: (r.priority, work.seconds(r)))
        refused = 0
        for r in prompts:
            if len(bundle.order) == self.max_batch or refused == MAX_REFUSALS:
                break
            refused += not bundle.consider(r)

    def _best_live(self, ready: Sequence[Candidate], live: int) -> int:
        """Return the adapter whose merge saves the most time over the present work, or BASE.

        Merging saves the adapter's own rows and steps, and the operator's calls in steps without
        other adapters. All other rows then need it subtracted.
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


class _WorkLeft:
    """The remaining time of requests in steps that are full, for one choice."""

    def __init__(self, costs: StepCosts) -> None:
        self._costs = costs
        self._row_seconds = costs.products(FULL_ROWS, 1) / FULL_ROWS
        self._adapted_row_seconds: dict[int, float] = {}
        """Seconds of a row by slot, with its adapter."""

    def seconds(self, r: Candidate) -> float:
        """Return the remaining time of a request."""
        rows = r.missing + r.remaining
        per_row = self._adapted_row_seconds.get(r.slot)
        if per_row is None:
            per_row = self._row_seconds + self._costs.apply_adapter(r.slot, 1)
            self._adapted_row_seconds[r.slot] = per_row
        return rows * per_row + self._costs.attention(rows, r.context)


class _Bundle:
    """The requests of one step while it is filled.

    Its value is the sum of the shares of requests that it completes; it earns its value over its
    predicted seconds. The fixed cost of an adapter is divided among all requests that would use it,
    so that the first one does not bear all of it.
    """

    def __init__(
        self, costs: StepCosts, live: int, max_rows: int, requests_by_slot: Mapping[int, int]
    ) -> None:
        self._costs = costs
        self._live = live
        self._free_rows = max_rows
        self._requests_by_slot = requests_by_slot
        self._lora_calls = costs.lora_calls()
        self._single_step = costs.products(1, 1) + costs.overhead(1)
        self._adapted = sum(n for slot, n in requests_by_slot.items() if slot != live)
        """Number of requests with any adapter applied to their rows."""
        self._read: set[int] = set()
        """Slots of the adapters that the step reads already."""
        self._row_seconds: dict[int, float] = {}
        """Seconds per row, for slots whose adapters are all read already."""
        self._applied: dict[int, tuple[tuple[int, float, float], ...]] = {}
        self._row_count = self._answers = self._longest = 0
        self._value = self._added = 0.0
        self.order: list[Candidate] = []
        self.rows: dict[str, int] = {}

    def take_decode_row(self, r: Candidate) -> bool:
        """Take one row of a decoding request; return False if its adapters are not read yet."""
        seconds = self._row_seconds.get(r.slot)
        if seconds is None:
            applied = self._adapters_of(r.slot)
            if any(slot not in self._read for slot, _, _ in applied):
                return False
            seconds = self._row_seconds[r.slot] = sum(per_row for _, _, per_row in applied)
        if self._free_rows:
            self._join(r, 1, seconds)
        return True

    def consider(self, r: Candidate) -> bool:
        """Take the request if the step then earns more per second; return whether it was taken."""
        available = min(r.missing, self._free_rows)
        if available == 0:
            return False
        now = self._value / self._seconds() if self.order else 0.0
        chunks = (*CHUNK_ROWS[: bisect_left(CHUNK_ROWS, available)], available)
        fixed, per_row = self._adapter_seconds(r.slot, shared=True)
        earnings = [(self._earns(r, rows, fixed + per_row * rows, now), rows) for rows in chunks]
        best = max(earned for earned, _ in earnings)
        if best <= now:
            return False
        enough = now + ENOUGH_GAIN * (best - now)
        self.take(r, next(rows for earned, rows in earnings if earned >= enough))
        return True

    def take(self, r: Candidate, rows: int) -> None:
        """Take `rows` rows of the request, or as many as fit."""
        rows = min(rows, self._free_rows)
        if rows == 0:
            return
        fixed, per_row = self._adapter_seconds(r.slot, shared=False)
        self._read.update(slot for slot, _, _ in self._adapters_of(r.slot))
        self._join(r, rows, fixed + per_row * rows)

    def _join(self, r: Candidate, rows: int, adapter_seconds: float) -> None:
        self._added += self._costs.attention(rows, r.context) + adapter_seconds
        self._value += _share(r, rows)
        self._row_count += rows
        self._answers += rows == r.missing
        self._longest = max(self._longest, r.remaining)
        self._free_rows -= rows
        self.order.append(r)
        self.rows[r.id] = rows

    def _seconds(self, rows: int = 0, answers: int = 0, requests: int = 0) -> float:
        """Return the predicted time of the step with this many more rows, answers and requests."""
        products = self._costs.products(self._row_count + rows, self._answers + answers)
        return products + self._added + self._costs.overhead(len(self.order) + requests)

    def _earns(self, r: Candidate, rows: int, adapter_seconds: float, now: float) -> float:
        """Return the value per second of the step with these rows added.

        adapter_seconds: time of the rows' adapters. now: value per second without the rows.
        """
        worth = _share(r, rows)
        if r.missing == rows and self._value > 0.0:
            worth += self._sharing_gain(r, now)
        seconds = self._seconds(rows, rows == r.missing, 1)
        seconds = seconds + adapter_seconds + self._costs.attention(rows, r.context)
        return (self._value + worth) / seconds

    def _sharing_gain(self, r: Candidate, now: float) -> float:
        """Return the value of decoding together with the others instead of after them.

        Applies to a prompt that this step completes. It saves, for each shared decode step, the
        cost that a step has whatever requests it holds.
        """
        if r.missing == 1:
            return 0.0
        fixed_share = min(1.0, self._single_step * now / self._value)
        shared_steps = min(r.remaining, self._longest)
        return SHARED_STEPS * _weight(r) * fixed_share * shared_steps / (1 + self._longest)

    def _adapter_seconds(self, slot: int, *, shared: bool) -> tuple[float, float]:
        """Return the time that a request of this slot adds: (fixed, per row), in seconds.

        Fixed is the cost of adapters that the step does not read yet; if `shared`, only the share
        of it that falls to one of the requests that would use them.
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
        """Return the adapters applied to rows of a slot: (adapter, read seconds, row seconds)."""
        applied = self._applied.get(slot)
        if applied is None:
            costs = self._costs
            applied = tuple(
                (adapter, costs.read_adapter(adapter), costs.apply_adapter(adapter, 1))
                for adapter in applied_adapters(slot, self._live)
            )
            self._applied[slot] = applied
        return applied


def _share(r: Candidate, rows: int) -> float:
    """Return the weighted share of the request that these rows are.

    Ending a short request is worth as much as ending a long one.
    """
    worth = PROMPT_WORTH if r.missing > 1 else 1.0
    return _weight(r) * worth * rows / (worth * r.missing + r.remaining)


def _weight(r: Candidate) -> float:
    """Return the weight of the request, which doubles with each step of priority."""
    return 2.0 ** -float(min(max(r.priority, -8), 8)) if r.priority else 1.0


def make(options: Options, costs: StepCosts) -> Predictive:
    """Return the policy, configured by the options."""
    return Predictive(
        options.max_step_requests,
        options.max_num_batched_tokens,
        options.max_wait_seconds,
        costs,
    )
