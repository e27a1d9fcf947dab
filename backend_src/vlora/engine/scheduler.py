"""The scheduler, which decides which sequences the next step computes, and how much of each.

A policy chooses the sequences, their order, and the adapter in the weights. The scheduler walks
that order and allocates pages and rows. Except for the pages that it allocates and releases,
the scheduler is pure: no torch, no clock but the one it is given.
"""

from __future__ import annotations

import bisect
import heapq
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import islice

from vlora.engine.plan import StepPlan
from vlora.engine.policies.base import Candidate, Choice, Policy
from vlora.engine.policies.unmerge_only import UnmergeOnly
from vlora.engine.sequence import Sequence
from vlora.ids import BASE, order_of
from vlora.model.chunk import Chunk


@dataclass(frozen=True)
class Budgets:
    """Limits of the scheduler.

    sequences: maximum number of sequences that hold pages at once.
    rows: maximum number of tokens computed in one step.
    """

    sequences: int
    rows: int


class Scheduler:
    """Iteration-level scheduling with chunked prefill, in the order of a policy.

    A sequence is admitted when there are free pages for all its known tokens; from then on it grows
    page by page. A running sequence that the policy does not choose is paused: it keeps its pages.
    When pages are short, paused sequences are preempted first, lowest credit first, then the newest
    of the chosen ones. A preempted sequence is recomputed later. The oldest sequence is never
    preempted, so it always advances once chosen, and nothing starves.
    """

    def __init__(
        self,
        budgets: Budgets,
        policy: Policy | None = None,
        protect: Callable[[int], object] = lambda slot: None,
    ) -> None:
        """Make a scheduler without sequences.

        policy: first come, first served by default.
        protect: called with the slot of the adapter that the step will have in the weights, before
            pages are allocated, so that this adapter is not evicted for them.
        """
        self._protect = protect
        self._budgets = budgets
        self.policy = policy or UnmergeOnly(budgets.sequences)
        self.waiting: list[Sequence] = []
        """Sequences without pages, in order of arrival."""
        self.running: list[Sequence] = []
        """Sequences that hold pages, in order of arrival."""
        self._last_step: list[Sequence] = []
        self._preempted: dict[Sequence, None] = {}
        """Waiting sequences that ran before: their wait is shorter than their arrival suggests."""
        self._with_priority = 0
        """Number of sequences whose priority is not 0."""
        self._chosen = 0
        self.choice = Choice((), BASE)
        """The policy's last choice; its order is empty when the policy was not asked."""

    @property
    def idle(self) -> bool:
        return not self.waiting and not self.running

    @property
    def paused(self) -> int:
        """Number of sequences that hold pages and were not chosen for the last step."""
        return max(0, len(self.running) - self._chosen)

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence."""
        bisect.insort(self.waiting, sequence, key=_arrival)
        self._with_priority += sequence.priority != 0

    def remove(self, sequence: Sequence) -> None:
        """End a waiting or running sequence and release its pages."""
        if sequence in self.running:
            self.running.remove(sequence)
        else:
            self.waiting.remove(sequence)
            self._preempted.pop(sequence, None)
        self._with_priority -= sequence.priority != 0
        sequence.end()

    def schedule(
        self, now: float = 0.0, live: int = BASE, arrival_cutoff: float = math.inf
    ) -> StepPlan:
        """Return the plan of the next step; it has no chunks if nothing can be computed.

        live: slot of the adapter in the weights now.
        arrival_cutoff: waiting sequences that arrived later do not begin.
        """
        if self.idle:
            return StepPlan(())
        for sequence in self._last_step:
            sequence.ran(now)
        if isinstance(self.policy, UnmergeOnly) and not self._with_priority:
            eligible = self._first_eligible(self.policy.max_batch, arrival_cutoff)
            self.choice = Choice((), BASE)
            chosen = _first_come(eligible, self.policy, now)
        else:
            by_arrival = heapq.merge(self.running, self.waiting, key=_arrival)
            eligible = list(_eligible(by_arrival, arrival_cutoff))
            chosen = self._ask_policy(eligible, live, now) if eligible else []
        if not eligible:
            return StepPlan(())
        self._chosen = len(chosen)
        self._protect(self.choice.live)
        step = self._allocate(chosen, self.choice)
        if not step.rows and self.running:
            # None of the chosen gets pages: the sequences that hold pages continue.
            step = self._allocate(list(self.running), Choice((), self.choice.live))
        elif not step.rows:
            # Nothing runs either: begin the oldest, which may take the live adapter's pages.
            self.choice = Choice((), BASE)
            self._protect(BASE)
            step = self._allocate(eligible[:1], self.choice)
        self._last_step = list(step.rows)
        for sequence in self._last_step:
            sequence.scheduled(now)
        live = self.choice.live
        return StepPlan(_chunks(step.rows, live), tuple(step.preempted), live, step.cached)

    def _first_eligible(self, size: int, arrival_cutoff: float) -> list[Sequence]:
        """Return the eligible sequences, by arrival, that could be among the first `size`.

        Only sequences that are certain to be neither among the first by arrival nor among those
        that waited longest are left out, so that a step's work does not grow with the queue.
        """
        new = (s for s in self.waiting if s not in self._preempted)
        eligible = [*_eligible((*self.running, *self._preempted), arrival_cutoff)]
        eligible += islice(_eligible(new, arrival_cutoff), size)
        return sorted(eligible, key=_arrival)

    def _ask_policy(self, eligible: list[Sequence], live: int, now: float) -> list[Sequence]:
        """Return the sequences that the policy chooses, in its order."""
        by_id = {s.id: s for s in eligible}
        self.choice = self.policy.choose([_candidate(s, now) for s in eligible], live, now)
        return [by_id[r.id] for r in self.choice.order]

    def _allocate(self, chosen: list[Sequence], choice: Choice) -> _StepBuilder:
        """Give rows to decoding sequences first, so that no prompt delays them, then to prompts."""
        step = _StepBuilder(self._budgets.rows, choice, self._paused(chosen, choice))
        decoding = [s for s in chosen if s.table.pages and s.missing == 1]
        for sequence in decoding:
            if sequence.table.pages and self._grow(sequence, step):
                step.add(sequence)
        prompts = [s for s in chosen if s not in step.rows and s.id not in step.preempted]
        # Once one prompt waits for pages, later ones must not take them. After a preemption no
        # prompt is admitted: a sequence that was just preempted would take its pages back.
        full = bool(step.preempted)
        for sequence in prompts:
            if step.free_rows == 0:
                break
            if not sequence.table.pages:
                full = full or not self._admit(sequence, step)
            if sequence.table.pages:
                step.add(sequence)
        return step

    def _paused(self, chosen: list[Sequence], choice: Choice) -> list[Sequence]:
        """Return the sequences with pages that are not chosen, in order of their preemption.

        The oldest sequence of all is left out: it must end at some time.
        """
        chosen_ids = {s.id for s in chosen}
        paused = [s for s in self.running if s.id not in chosen_ids]
        if not paused:
            return []
        oldest_waiting = islice((s for s in self.waiting if s.ready), 1)
        oldest = min((self.running[0], *oldest_waiting), key=_arrival)
        credits = choice.credits or {}
        preemptible = (s for s in paused if s is not oldest)
        return sorted(preemptible, key=lambda s: (credits.get(s.id, 0.0), -s.arrival))

    def _admit(self, sequence: Sequence, step: _StepBuilder) -> bool:
        """Give a waiting sequence a batch slot and pages for all known tokens, if possible.

        The pages are free ones, or those of paused sequences that arrived later.
        """
        if not sequence.ready:
            return False  # Its adapter was evicted for the pages of another sequence.
        while len(self.running) >= self._budgets.sequences:
            if not self._preempt_newer(sequence, step):
                return False
        sequence.begin(self.choice.live)
        while not sequence.table.grow(sequence.known):
            if not self._preempt_newer(sequence, step):
                sequence.leave()
                return False
        self.waiting.remove(sequence)
        self._preempted.pop(sequence, None)
        bisect.insort(self.running, sequence, key=_arrival)
        step.cached += sequence.cached
        return True

    def _preempt_newer(self, sequence: Sequence, step: _StepBuilder) -> bool:
        """Preempt the first paused sequence that arrived later; return whether there was one."""
        newer = [s for s in step.paused if s.arrival > sequence.arrival]
        if newer:
            step.paused.remove(newer[0])
            self._preempt(newer[0])
            step.preempted.append(newer[0].id)
        return bool(newer)

    def _grow(self, sequence: Sequence, step: _StepBuilder) -> bool:
        """Allocate the pages that the sequence's next row needs.

        While pages are missing, preempts paused sequences, then the newest running sequence.
        Returns False if that was this sequence itself.
        """
        while not sequence.table.grow(sequence.known):
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
        bisect.insort(self.waiting, sequence, key=_arrival)
        self._preempted[sequence] = None


class _StepBuilder:
    """A step under construction.

    rows: number of rows of each sequence.
    paused: paused sequences in the order in which they are preempted.
    """

    def __init__(self, max_rows: int, choice: Choice, paused: list[Sequence]) -> None:
        self.free_rows = max_rows
        self.rows: dict[Sequence, int] = {}
        self.paused = paused
        self.preempted: list[str] = []
        self.cached = 0
        self._max_rows = choice.max_rows or {}

    def add(self, sequence: Sequence) -> None:
        """Add the missing rows of a sequence, as far as the policy and the budget allow."""
        allowed = self._max_rows.get(sequence.id, sequence.missing)
        rows = min(sequence.missing, allowed, self.free_rows)
        if rows:
            self.rows[sequence] = rows
            self.free_rows -= rows

    def remove_preempted(self, sequence: Sequence) -> None:
        """Remove the rows of a sequence that was preempted."""
        self.free_rows += self.rows.pop(sequence, 0)
        self.preempted.append(sequence.id)


def _arrival(sequence: Sequence) -> float:
    return sequence.arrival


def _eligible(sequences: Iterable[Sequence], arrival_cutoff: float) -> Iterable[Sequence]:
    """Return the sequences that a step could compute."""
    return (s for s in sequences if s.table.pages or (s.ready and s.arrival <= arrival_cutoff))


def _first_come(eligible: list[Sequence], policy: UnmergeOnly, now: float) -> list[Sequence]:
    """Return what `policy` would choose among sequences of one priority, sorted by arrival."""
    # No sequence has waited longer than the time since the first arrival.
    any_late = bool(eligible) and now - eligible[0].arrival > policy.max_wait

    def rank(s: Sequence) -> tuple[bool, bool]:
        return not any_late or s.wait(now) <= policy.max_wait, not s.table.pages

    return sorted(eligible, key=rank)[: policy.max_batch]


def _candidate(sequence: Sequence, now: float) -> Candidate:
    return Candidate(
        sequence.id,
        sequence.slot,
        sequence.arrival,
        sequence.wait(now),
        sequence.missing,
        sequence.computed,
        sequence.remaining,
        bool(sequence.table.pages),
        sequence.deadline,
        sequence.priority,
    )


def _chunks(rows: Mapping[Sequence, int], live: int) -> tuple[Chunk, ...]:
    """Return one chunk per sequence: its next positions, in the row order of the adapters."""
    chunks: list[Chunk] = []
    row = 0
    for sequence, length in sorted(rows.items(), key=lambda item: order_of(item[0].slot, live)):
        start = sequence.computed
        chunks.append(
            Chunk(
                sequence_id=sequence.id,
                slot=sequence.slot,
                row=row,
                start=start,
                tokens=tuple(sequence.tokens[start : start + length]),
                prompt=sequence.prompt,
                pages=tuple(sequence.table.pages),
                completes=length == sequence.missing,
                use_head=sequence.request.use_head,
            )
        )
        row += length
    return tuple(chunks)
