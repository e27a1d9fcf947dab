"""The scheduler. It decides which sequences the next step computes, and how many tokens of each.

A policy chooses the sequences, their order and the live adapter. The scheduler then allocates pages
and rows in that order. Except for allocating and releasing pages, it is pure: it uses no torch,
and no clock but the one it is given.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from vlora.engine.plan import StepPlan
from vlora.engine.policies.base import Choice, Policy
from vlora.engine.policies.unmerge_only import UnmergeOnly
from vlora.engine.sequence import Sequence
from vlora.engine.step_builder import StepBuilder, chunks_of
from vlora.engine.waiting_queue import WaitingQueue
from vlora.ids import BASE


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
        """Make a scheduler without sequences.

        policy: first come, first served by default.
        protect: called with the slot of the step's live adapter before pages are allocated, so that
            this adapter is not evicted for them.
        """
        self._protect = protect
        self._budgets = budgets
        self.policy = policy or UnmergeOnly(budgets.sequences)
        self.queue = WaitingQueue()
        """Sequences without pages."""
        self.running: list[Sequence] = []
        """Sequences that hold pages, in order of arrival."""
        self._last_step: Mapping[Sequence, int] = {}
        """Number of rows of each sequence in the last step."""
        self.choice = Choice((), BASE)
        """The policy's last choice."""

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
        """Queue a sequence that holds no pages."""
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
        for sequence in self._last_step:
            sequence.ran(now)
        eligible = self._eligible(arrival_cutoff)
        if not eligible:
            return StepPlan(())
        self.choice = self.policy.choose([s.candidate(now) for s in eligible], live, now)
        by_id = {s.id: s for s in eligible}
        chosen = [by_id[r.id] for r in self.choice.order]
        self._protect(self.choice.live)
        step = self._allocate(chosen, self.choice)
        preempted = step.preempted
        if not step.rows and self.running:
            # No chosen sequence got pages, so the sequences that hold pages continue.
            running = self._computable()[: self.policy.max_batch]
            step = self._allocate(running, Choice((), self.choice.live))
            preempted += step.preempted
        if not step.rows:
            # Nothing is running, so begin the oldest. It may take the live adapter's pages.
            self.choice = Choice((), BASE)
            self._protect(BASE)
            step = self._allocate([s for s in eligible if s.ready][:1], self.choice)
        self._last_step = step.rows
        for sequence in step.rows:
            sequence.scheduled(now)
        live = self.choice.live
        return StepPlan(chunks_of(step.rows, live), tuple(preempted), live, step.cached)

    def _eligible(self, arrival_cutoff: float) -> list[Sequence]:
        """Return the sequences that the policy sees, in order of arrival.

        These are all running sequences with tokens to compute, and the first waiting ones in each
        of the policy's orders. The number of waiting ones is limited, so that the work per step
        does not grow with the queue. The limit is at least the number of free batch slots,
        because this number of sequences can begin without a preemption.
        """
        count = max(self._budgets.candidates, self._budgets.sequences - len(self.running))
        waiting = self.queue.candidates(self.policy.orders, count, arrival_cutoff)
        return sorted([*self._computable(), *waiting], key=_arrival)

    def _computable(self) -> list[Sequence]:
        """Return the running sequences that have tokens to compute, in order of arrival.

        The others wait for the mask of their next token.
        """
        return [sequence for sequence in self.running if sequence.missing]

    def _allocate(self, chosen: list[Sequence], choice: Choice) -> StepBuilder:
        """Return a step with rows for the chosen sequences: decoding ones first, so that no prompt
        delays them, then prompts.

        Paused sequences fill the step if chosen ones got no rows.
        """
        step = StepBuilder(self._budgets.rows, choice, self._paused(chosen, choice))
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
        """Fill the step with paused sequences when chosen ones got no batch slot or no pages.

        Decoding sequences go first. Each takes pages only from other paused sequences.
        """
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
        """Return the sequences that may be preempted, in the order in which to preempt them.

        These are the sequences that hold pages and are not chosen, by ascending credit; of equal
        credit, the newest comes first. The oldest of all sequences is left out, so that it can
        always finish.
        """
        chosen_ids = {s.id for s in chosen}
        paused = [s for s in self.running if s.id not in chosen_ids]
        if not paused:
            return []
        oldest_waiting = next((s for s in self.waiting if s.ready), self.running[0])
        oldest = min(self.running[0], oldest_waiting, key=_arrival)
        credits = choice.credits or {}
        preemptible = (s for s in paused if s is not oldest)
        return sorted(preemptible, key=lambda s: (credits.get(s.id, 0.0), -s.arrival))

    def _admit(self, sequence: Sequence, step: StepBuilder) -> bool:
        """Give a waiting sequence a batch slot and pages for all its known tokens, if possible.

        The pages are free ones or those of paused sequences that arrived later. Returns whether the
        sequence is running now.
        """
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
        """Preempt the first sequence of `step.paused` that arrived later than `sequence`.

        Returns whether there was one.
        """
        newer = [s for s in step.paused if s.arrival > sequence.arrival]
        if newer:
            step.paused.remove(newer[0])
            self._preempt(newer[0])
            step.preempted.append(newer[0].id)
        return bool(newer)

    def _grow(self, sequence: Sequence, step: StepBuilder, *, only_paused: bool = False) -> bool:
        """Allocate pages for the sequence's next row.

        If there are too few free pages, paused sequences are preempted, then the newest running
        one.

        only_paused: preempt only paused sequences.

        Returns False if the sequence gets no page: there is none to take, or the sequence is itself
        the newest and was preempted.
        """
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
        sequence.preemptions += 1
        self.queue.add(sequence)


def _arrival(sequence: Sequence) -> float:
    return sequence.arrival
