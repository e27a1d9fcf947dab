"""Which sequences the next step computes, and how much of each.

Pure: state in, one immutable plan out; no torch, no clock but the one it is given.
"""

from __future__ import annotations

import bisect
from collections import deque
from dataclasses import dataclass

from vlora.engine.plan import StepPlan
from vlora.engine.sequence import Sequence
from vlora.lora.segments import BASE, order_of
from vlora.model.chunk import Chunk


@dataclass(frozen=True)
class Budgets:
    """sequences: running at once. rows: tokens computed in one step."""

    sequences: int
    rows: int


class Scheduler:
    """First come, first served, at iteration level, with chunked prompts.

    A sequence is admitted when pages for all it knows are free; it grows a page at a time from
    there. Where pages run out the newest running sequence gives its pages back and is computed
    anew later, so the oldest always advances and nothing starves.
    """

    def __init__(self, budgets: Budgets) -> None:
        self._budgets = budgets
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        """In order of arrival."""

    @property
    def idle(self) -> bool:
        return not self.waiting and not self.running

    def add(self, sequence: Sequence) -> None:
        self.waiting.append(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Ends a sequence, wherever it is, and frees its pages."""
        if sequence in self.running:
            self.running.remove(sequence)
        else:
            self.waiting.remove(sequence)
        sequence.table.clear()

    def schedule(self) -> StepPlan:
        """Rows that continue an answer first, then prompts under way, then new ones."""
        scheduled: list[tuple[Sequence, int]] = []
        preempted: list[str] = []
        budget = self._budgets.rows
        for sequence in [s for s in self.running if s.missing == 1]:
            if budget == 0:
                break
            if sequence in self.running and self._make_room(sequence, preempted):
                scheduled.append((sequence, 1))
                budget -= 1
        for sequence in self.running:
            if sequence.missing > 1 and budget > 0:
                scheduled.append((sequence, min(sequence.missing, budget)))
                budget -= scheduled[-1][1]
        # Whoever was just preempted would only take the pages back from those it yielded to.
        while budget > 0 and not preempted and (admitted := self._admit()):
            scheduled.append((admitted, min(admitted.missing, budget)))
            budget -= scheduled[-1][1]
        return StepPlan(_chunks(scheduled, BASE), tuple(preempted))

    def _admit(self) -> Sequence | None:
        """The first in the queue, with pages for all it knows; None where it has to wait."""
        if not self.waiting or len(self.running) >= self._budgets.sequences:
            return None
        if not self.waiting[0].table.grow(self.waiting[0].known):
            return None
        sequence = self.waiting.popleft()
        bisect.insort(self.running, sequence, key=lambda s: s.arrival)
        return sequence

    def _make_room(self, sequence: Sequence, preempted: list[str]) -> bool:
        """Pages for the sequence's next row, at the newest ones' cost; False if it is that."""
        while not sequence.table.grow(sequence.known):
            newest = self.running[-1]
            self._preempt(newest)
            preempted.append(newest.id)
            if newest is sequence:
                return False
        return True

    def _preempt(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        sequence.table.clear()
        sequence.computed = 0
        sequence.preemptions += 1
        self.waiting.appendleft(sequence)


def _chunks(scheduled: list[tuple[Sequence, int]], live: int) -> tuple[Chunk, ...]:
    """The next so many positions of each sequence, one adapter after the other."""
    chunks: list[Chunk] = []
    row = 0
    for sequence, length in sorted(scheduled, key=lambda item: order_of(item[0].slot, live)):
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
