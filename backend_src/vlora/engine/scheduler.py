"""The scheduler: a policy orders the sequences, which then get pages and rows in that order.

It uses no torch, and no clock but the one it is given.
"""

from __future__ import annotations

import bisect
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vlora.engine.plan import StepPlan
from vlora.engine.policies.base import Choice, Order, Policy
from vlora.engine.policies.unmerge_only import UnmergeOnly
from vlora.engine.sequence import Sequence
from vlora.ids import BASE, order_of
from vlora.model.chunk import Chunk

if TYPE_CHECKING:
    from vlora.adapters.handle import AdapterHandle


@dataclass(frozen=True)
class Budgets:
    """Limits of the scheduler.

    sequences: maximum number of sequences that hold pages at once; each occupies a batch slot.
    rows: maximum number of tokens computed in one step.
    candidates: number of waiting sequences that the policy sees in each of its sort orders. If more
        batch slots than that are free, the policy sees as many as there are free slots.
    """

    sequences: int
    rows: int
    candidates: int = 16


class Scheduler:
    """Iteration-level scheduling with chunked prefill, in the order of a policy.

    A sequence is admitted when there are free pages for all its known tokens. From then on it grows
    page by page. A running sequence that the policy does not choose is paused: it keeps its pages.
    If a chosen sequence gets no batch slot or no pages, a paused sequence is computed in its place.

    When pages run out, sequences are preempted: first the paused ones, by ascending credit (see
    `Choice.credits`), then the newest of the chosen ones. A preempted sequence loses its pages and
    is recomputed later. The oldest sequence is never preempted, so it advances each time it is
    chosen, and nothing starves.
    """

    def __init__(
        self,
        budgets: Budgets,
        policy: Policy | None = None,
        protect: Callable[[int], object] = lambda slot: None,
    ) -> None:
        # Called with the step's live adapter, which must not be evicted for pages.
        self._protect = protect
        self._budgets = budgets
        self.policy = policy or UnmergeOnly(budgets.sequences)
        self.queue = WaitingQueue()  # Sequences without pages.
        self.running: list[Sequence] = []  # Sequences that hold pages, in order of arrival.
        # Number of rows of each sequence in the last step.
        self._last_step: Mapping[Sequence, int] = {}
        # Time of the last call of `schedule`, in seconds on the engine's clock.
        self._last_time = 0.0
        self.choice = Choice((), BASE)  # The policy's last choice.

    @property
    def waiting(self) -> list[Sequence]:
        """Sequences without pages, in order of arrival. Do not modify the list."""
        return self.queue.by_arrival

    @property
    def idle(self) -> bool:
        return not self.waiting and not self.running

    @property
    def paused(self) -> int:
        """Number of sequences that hold pages and had no rows in the last step."""
        last_step = self._last_step
        return sum(sequence not in last_step for sequence in list(self.running))

    def add(self, sequence: Sequence) -> None:
        self.queue.add(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Remove a waiting or running sequence and release its pages."""
        if sequence in self.running:
            self.running.remove(sequence)
        else:
            self.queue.remove(sequence)
        sequence.end()

    def schedule(
        self, now: float = 0.0, live: int = BASE, arrival_cutoff: float = math.inf
    ) -> StepPlan:
        """Return the plan of the next step. It has no chunks if nothing can be computed.

        now: seconds on the engine's clock.
        live: slot of the adapter in the active weights now, or BASE.
        arrival_cutoff: waiting sequences that arrived later do not begin.
        """
        if self.idle:
            return StepPlan(())
        # The sequences of the last step have not waited since then.
        for sequence in self._last_step:
            sequence.waiting_since += now - self._last_time
        self._last_time = now
        eligible = self._eligible(arrival_cutoff)
        if not eligible:
            return StepPlan(())
        self.choice = self.policy.choose([s.candidate(now) for s in eligible], live, now)
        step = self._fill(eligible)
        self._last_step = step.rows
        for sequence in step.rows:
            sequence.started = True
        return step.plan(self.choice.live)

    def _eligible(self, arrival_cutoff: float) -> list[Sequence]:
        """Return the running and the first waiting sequences that the policy sees, by arrival."""
        # The limit keeps the work per step from growing with the queue. It is at least the number
        # of free batch slots, because so many sequences can begin without a preemption.
        count = max(self._budgets.candidates, self._budgets.sequences - len(self.running))
        waiting = self.queue.candidates(self.policy.orders, count, arrival_cutoff)
        return sorted([*self._computable(), *waiting], key=_arrival)

    def _computable(self) -> list[Sequence]:
        """Return the running sequences, by arrival, that do not wait for a token mask."""
        return [sequence for sequence in self.running if sequence.missing]

    def _fill(self, eligible: list[Sequence]) -> StepBuilder:
        """Return a step with rows for the chosen sequences, or for others if these get no pages."""
        by_id = {s.id: s for s in eligible}
        self._protect(self.choice.live)
        step = self._allocate([by_id[r.id] for r in self.choice.order], self.choice)
        if not step.rows and self.running:
            # No chosen sequence got pages, so the sequences that hold pages continue.
            preempted = step.preempted
            running = self._computable()[: self.policy.max_batch]
            step = self._allocate(running, Choice((), self.choice.live))
            step.preempted = preempted + step.preempted
        if not step.rows:
            # Nothing is running, so begin the oldest. It may take the live adapter's pages.
            preempted = step.preempted
            self.choice = Choice((), BASE)
            self._protect(BASE)
            step = self._allocate([s for s in eligible if s.ready][:1], self.choice)
            step.preempted = preempted
        return step

    def _allocate(self, chosen: list[Sequence], choice: Choice) -> StepBuilder:
        """Return a step with rows for the chosen sequences, and paused ones if rows are left."""
        step = StepBuilder(self._budgets.rows, choice, self._paused(chosen, choice))
        # Decoding sequences go first, so that no prompt delays them.
        decoding = [s for s in chosen if s.table.pages and s.missing == 1]
        for sequence in decoding:
            if sequence.table.pages and self._grow(sequence, step):
                step.add(sequence)
        prompts = [s for s in chosen if s not in step.rows and s.id not in step.preempted]
        # Once one prompt has to wait for pages, later prompts must not take them. After a
        # preemption, no prompt is admitted, because the preempted sequence itself might be admitted
        # and take its pages back.
        full = bool(step.preempted)
        for sequence in prompts:
            if step.free_rows == 0:
                break
            if not sequence.table.pages:
                full = full or not self._admit(sequence, step)
            if sequence.table.pages:
                step.add(sequence)
        if len(step.rows) < len(chosen):
            self._continue_paused(chosen, step)
        return step

    def _continue_paused(self, chosen: list[Sequence], step: StepBuilder) -> None:
        """Fill the step with paused sequences, as chosen ones got no batch slot or no pages."""
        chosen_ids = {s.id for s in chosen}
        left_out = [s for s in self._computable() if s.id not in chosen_ids]
        for sequence in sorted(left_out, key=lambda s: (s.missing > 1, s.arrival)):
            if step.free_rows == 0 or len(step.rows) >= self.policy.max_batch:
                break
            if not sequence.table.pages:
                continue  # The sequence was preempted for an earlier one.
            if sequence in step.paused:
                step.paused.remove(sequence)
            if self._grow(sequence, step, only_paused=True):
                step.add(sequence)

    def _paused(self, chosen: list[Sequence], choice: Choice) -> list[Sequence]:
        """Return the sequences with pages that were not chosen, in the order of preemption."""
        chosen_ids = {s.id for s in chosen}
        paused = [s for s in self.running if s.id not in chosen_ids]
        if not paused:
            return []
        # The oldest of all sequences is left out, so that it can always finish.
        oldest_waiting = next((s for s in self.waiting if s.ready), self.running[0])
        oldest = min(self.running[0], oldest_waiting, key=_arrival)
        credits = choice.credits or {}
        preemptible = (s for s in paused if s is not oldest)
        return sorted(preemptible, key=lambda s: (credits.get(s.id, 0.0), -s.arrival))

    def _admit(self, sequence: Sequence, step: StepBuilder) -> bool:
        """Give a waiting sequence a slot and pages, free ones or those of newer paused ones."""
        if not sequence.ready:
            return False  # Its adapter was evicted for the pages of another sequence.
        while len(self.running) >= self._budgets.sequences:
            if not self._preempt_newer(sequence, step):
                return False
        sequence.begin(self.choice.live)
        # Preempt only if that frees enough pages. Otherwise work would be lost for nothing.
        newer = (s for s in step.paused if s.arrival > sequence.arrival)
        fits = sequence.table.fits(sequence.known, sum(len(s.table.pages) for s in newer))
        while not (fits and sequence.table.grow(sequence.known)):
            if not (fits and self._preempt_newer(sequence, step)):
                sequence.leave()
                return False
        self.queue.remove(sequence)
        bisect.insort(self.running, sequence, key=_arrival)
        step.cached += sequence.cached
        return True

    def _preempt_newer(self, sequence: Sequence, step: StepBuilder) -> bool:
        """Preempt the first paused sequence that arrived later; return whether there was one."""
        newer = [s for s in step.paused if s.arrival > sequence.arrival]
        if newer:
            step.paused.remove(newer[0])
            self._preempt(newer[0])
            step.preempted.append(newer[0].id)
        return bool(newer)

    def _grow(self, sequence: Sequence, step: StepBuilder, *, only_paused: bool = False) -> bool:
        """Allocate pages for the next row, preempting paused sequences, then the newest ones."""
        while not sequence.table.grow(sequence.known):
            if only_paused and not step.paused:
                return False
            victim = step.paused.pop(0) if step.paused else self.running[-1]
            self._preempt(victim)
            step.remove_preempted(victim)
            if victim is sequence:
                return False
        return True

    def _preempt(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        sequence.leave()
        self.queue.add(sequence)


class StepBuilder:
    """A step while the scheduler fills it with rows.

    rows: number of rows of each sequence.
    paused: paused sequences, in the order in which they are preempted.
    preempted: ids of the sequences that were preempted for this step.
    cached: number of tokens taken from the prefix cache.
    """

    def __init__(self, max_rows: int, choice: Choice, paused: list[Sequence]) -> None:
        self.free_rows = max_rows
        self.rows: dict[Sequence, int] = {}
        self.paused = paused
        self.preempted: list[str] = []
        self.cached = 0
        self._max_rows = choice.max_rows or {}

    def add(self, sequence: Sequence) -> None:
        missing = sequence.next_rows
        rows = min(missing, self._max_rows.get(sequence.id, missing), self.free_rows)
        if rows:
            self.rows[sequence] = rows
            self.free_rows -= rows

    def remove_preempted(self, sequence: Sequence) -> None:
        self.free_rows += self.rows.pop(sequence, 0)
        self.preempted.append(sequence.id)

    def plan(self, live: int) -> StepPlan:
        """Return the step with the adapter `live` merged, its chunks sorted by `ids.order_of`."""
        chunks: list[Chunk] = []
        row = 0
        by_slot: defaultdict[int, list[Sequence]] = defaultdict(list)
        for sequence in self.rows:
            by_slot[sequence.next_slot].append(sequence)
        for slot in sorted(by_slot, key=lambda slot: order_of(slot, live)):
            for sequence in by_slot[slot]:
                chunk = _chunk(sequence, slot, row, self.rows[sequence])
                chunks.append(chunk)
                row += chunk.length
        return StepPlan(tuple(chunks), tuple(self.preempted), live, self.cached)


def _chunk(sequence: Sequence, slot: int, row: int, count: int) -> Chunk:
    tokens, start = sequence.tokens, sequence.computed
    end = start + count
    return Chunk(
        sequence.id,
        slot,
        row,
        start,
        tuple(tokens[start:end]),
        sequence.prompt,
        tuple(sequence.table.pages),
        completes=end == len(tokens),
        use_head=sequence.request.use_head,
    )


class WaitingQueue:
    """Sequences without pages, sorted in each `Order`."""

    def __init__(self) -> None:
        self._orders = {
            Order.ARRIVAL: _SortedSequences(_arrival),
            Order.WAIT: _SortedSequences(lambda s: s.waiting_since),
            Order.PRIORITY: _SortedSequences(lambda s: (s.priority, s.arrival)),
            Order.DEADLINE: _SortedSequences(lambda s: s.deadline),
        }
        # The sequences of each adapter, by arrival.
        self._by_adapter: dict[AdapterHandle, _SortedSequences] = {}

    @property
    def by_arrival(self) -> list[Sequence]:
        """All sequences in order of arrival. Do not modify the list."""
        return self._orders[Order.ARRIVAL].items

    def add(self, sequence: Sequence) -> None:
        for order in self._orders_of(sequence):
            order.add(sequence)
        self._add_to_adapter(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Remove a sequence; raise ValueError if it is not waiting."""
        for order in self._orders_of(sequence):
            order.remove(sequence)
        self._remove_from_adapter(sequence)

    def use_adapter(self, sequence: Sequence, adapter: AdapterHandle | None) -> None:
        """Set the adapter of a sequence in the queue; None for the base model."""
        self._remove_from_adapter(sequence)
        sequence.use_adapter(adapter)
        self._add_to_adapter(sequence)

    def first_of_each_adapter(self) -> dict[AdapterHandle, Sequence]:
        """Return the first sequence of each adapter, in order of arrival."""
        firsts = ((adapter, held.items[0]) for adapter, held in self._by_adapter.items())
        return dict(sorted(firsts, key=lambda item: item[1].arrival))

    def candidates(
        self, orders: Iterable[Order], count: int, arrival_cutoff: float
    ) -> Iterable[Sequence]:
        """Return the union of the first `count` ready sequences in each order, by the cutoff."""
        found: dict[Sequence, None] = {}
        resident: dict[AdapterHandle, bool] = {}
        for order in orders:
            first = self._orders[order].first_ready(count, arrival_cutoff, resident)
            found.update(dict.fromkeys(first))
        return found

    def _add_to_adapter(self, sequence: Sequence) -> None:
        if sequence.adapter is not None:
            self._by_adapter.setdefault(sequence.adapter, _SortedSequences(_arrival)).add(sequence)

    def _remove_from_adapter(self, sequence: Sequence) -> None:
        if sequence.adapter is not None:
            held = self._by_adapter[sequence.adapter]
            held.remove(sequence)
            if not held.items:
                del self._by_adapter[sequence.adapter]

    def _orders_of(self, sequence: Sequence) -> list[_SortedSequences]:
        has_deadline = sequence.deadline < math.inf
        orders = self._orders.items()
        return [held for order, held in orders if has_deadline or order is not Order.DEADLINE]


class _SortedSequences:
    """Sequences in ascending order of a key, which must not change while a sequence waits."""

    def __init__(self, key: Callable[[Sequence], Any]) -> None:
        self._key = key
        self._keys: list[Any] = []
        self.items: list[Sequence] = []

    def add(self, sequence: Sequence) -> None:
        key = self._key(sequence)
        index = bisect.bisect_right(self._keys, key)
        self._keys.insert(index, key)
        self.items.insert(index, sequence)

    def remove(self, sequence: Sequence) -> None:
        """Remove a sequence; raise ValueError if it is missing."""
        index = self.items.index(sequence, bisect.bisect_left(self._keys, self._key(sequence)))
        del self._keys[index], self.items[index]

    def first_ready(
        self, count: int, arrival_cutoff: float, resident: dict[AdapterHandle, bool]
    ) -> list[Sequence]:
        """Return the first `count` ready sequences that arrived by `arrival_cutoff`.

        resident: cache of `AdapterHandle.resident`, which this call extends.
        """
        found: list[Sequence] = []
        for sequence in self.items:
            adapter = sequence.adapter
            if adapter is not None:
                ready = resident.get(adapter)
                if ready is None:
                    ready = resident[adapter] = adapter.resident
                if not ready:
                    continue
            if sequence.arrival <= arrival_cutoff:
                found.append(sequence)
                if len(found) == count:
                    break
        return found


def _arrival(sequence: Sequence) -> float:
    return sequence.arrival
