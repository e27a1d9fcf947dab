"""Which sequences the next step computes, and how much of each.

A policy says who runs, in which order, and with which adapter in the weights; the allocator here
walks that order and gives pages and rows. Pure but for the pages that it gives and takes back: no
torch, no clock but the one it is given.
"""

from __future__ import annotations

import bisect
import heapq
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import islice

from vlora.engine.plan import StepPlan
from vlora.engine.policies.base import Candidate, Choice, Policy, UnmergeOnly
from vlora.engine.sequence import Sequence
from vlora.ids import BASE, order_of
from vlora.model.chunk import Chunk


@dataclass(frozen=True)
class Budgets:
    """sequences: holding pages at once. rows: tokens computed in one step."""

    sequences: int
    rows: int


class Scheduler:
    """Iteration-level scheduling with chunked prompts, in the order of a policy.

    A sequence is admitted when pages for all it knows are free; it grows a page at a time from
    there. One that runs and is not chosen is paused: it keeps its pages, and is the first to lose
    them, lowest credit first; then the newest of the chosen. Who loses pages is computed anew
    later. The oldest never does, so that it always advances once chosen, and nothing starves.
    """

    def __init__(
        self,
        budgets: Budgets,
        policy: Policy | None = None,
        keep: Callable[[int], object] = lambda slot: None,
    ) -> None:
        """policy: first come, first served, by default. keep: told which slot will be in the
        weights, before pages are given, which could be its."""
        self._keep = keep
        self._budgets = budgets
        self.policy = policy or UnmergeOnly(budgets.sequences)
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        """Those that hold pages. Both in order of arrival."""
        self._last: list[Sequence] = []
        self._preempted: dict[Sequence, None] = {}
        """Those that wait and have run before: they have waited less than their arrival says."""
        self._ranked = 0
        """Requests with a priority of their own."""
        self._chosen = 0
        self.choice = Choice((), BASE)
        """What the policy said last; its order is not kept where nobody had to be asked."""

    @property
    def idle(self) -> bool:
        return not self.waiting and not self.running

    @property
    def paused(self) -> int:
        """How many hold pages and were not chosen for the last step."""
        return max(0, len(self.running) - self._chosen)

    def add(self, sequence: Sequence) -> None:
        bisect.insort(self.waiting, sequence, key=_arrival)
        self._ranked += sequence.priority != 0

    def remove(self, sequence: Sequence) -> None:
        """Ends a sequence, wherever it is, and frees its pages."""
        if sequence in self.running:
            self.running.remove(sequence)
        else:
            self.waiting.remove(sequence)
            self._preempted.pop(sequence, None)
        self._ranked -= sequence.priority != 0
        sequence.end()

    def schedule(self, now: float = 0.0, live: int = BASE, barrier: float = math.inf) -> StepPlan:
        """The next step. live: the adapter in the weights now. barrier: who came later does not
        begin."""
        if self.idle:
            return StepPlan(())
        for sequence in self._last:
            sequence.ran(now)
        if isinstance(self.policy, UnmergeOnly) and not self._ranked:
            able = self._foremost(self.policy.size, barrier)
            self.choice = Choice((), BASE)
            chosen = _in_turn(able, self.policy, now)
        else:
            able = list(_able(heapq.merge(self.running, self.waiting, key=_arrival), barrier))
            chosen = self._asked(able, live, now) if able else []
        if not able:
            return StepPlan(())
        self._chosen = len(chosen)
        self._keep(self.choice.live)
        step = self._allocate(chosen, self.choice)
        if not step.rows and self.running:
            # Whoever was chosen finds no pages: those that have some go on.
            step = self._allocate(list(self.running), Choice((), self.choice.live))
        elif not step.rows:
            # Nor has anybody else: the oldest begins, whose pages the live adapter's may be.
            self.choice = Choice((), BASE)
            self._keep(BASE)
            step = self._allocate(able[:1], self.choice)
        self._last = list(step.rows)
        for sequence in self._last:
            sequence.scheduled(now)
        live = self.choice.live
        return StepPlan(_chunks(step.rows, live), tuple(step.preempted), live, step.cached)

    def _foremost(self, size: int, barrier: float) -> list[Sequence]:
        """Of those that a step could compute, in order of arrival, all but who is sure not to be
        among the first `size` by arrival, nor among those that have waited longest: a step's work
        does not grow with the queue."""
        fresh = (s for s in self.waiting if s not in self._preempted)
        able = [*_able((*self.running, *self._preempted), barrier)]
        able += islice(_able(fresh, barrier), size)
        return sorted(able, key=_arrival)

    def _asked(self, able: list[Sequence], live: int, now: float) -> list[Sequence]:
        """Whom the policy chooses."""
        known = {s.id: s for s in able}
        self.choice = self.policy.choose([_ready(s, now) for s in able], live, now)
        return [known[r.id] for r in self.choice.order]

    def _allocate(self, chosen: list[Sequence], choice: Choice) -> _Step:
        """Rows that continue an answer first, so that no prompt holds them up, then prompts."""
        step = _Step(self._budgets.rows, choice, self._paused(chosen, choice))
        continuing = [s for s in chosen if s.table.pages and s.missing == 1]
        for sequence in continuing:
            if sequence.table.pages and self._grow(sequence, step):
                step.give(sequence)
        prompts = [s for s in chosen if s not in step.rows and s.id not in step.preempted]
        # Nobody may take the pages that one before waits for; and whoever was just preempted would
        # only take them back from those it yielded to.
        full = bool(step.preempted)
        for sequence in prompts:
            if step.room == 0:
                break
            if not sequence.table.pages:
                full = full or not self._admit(sequence, step)
            if sequence.table.pages:
                step.give(sequence)
        return step

    def _paused(self, chosen: list[Sequence], choice: Choice) -> list[Sequence]:
        """Those with pages that are not chosen, in the order in which they lose them. Not the
        oldest of all: it must end once."""
        ids = {s.id for s in chosen}
        paused = [s for s in self.running if s.id not in ids]
        if not paused:
            return []
        waiting = islice((s for s in self.waiting if s.ready), 1)
        oldest = min((self.running[0], *waiting), key=_arrival)
        credits = choice.credits or {}
        yielding = (s for s in paused if s is not oldest)
        return sorted(yielding, key=lambda s: (credits.get(s.id, 0.0), -s.arrival))

    def _admit(self, sequence: Sequence, step: _Step) -> bool:
        """A place, and pages for all it knows: free ones, or those of paused newer ones."""
        if not sequence.ready:
            return False  # pages for somebody else were worth more
        while len(self.running) >= self._budgets.sequences:
            if not self._pause_newer(sequence, step):
                return False
        sequence.begin(self.choice.live)
        while not sequence.table.grow(sequence.known):
            if not self._pause_newer(sequence, step):
                sequence.leave()
                return False
        self.waiting.remove(sequence)
        self._preempted.pop(sequence, None)
        bisect.insort(self.running, sequence, key=_arrival)
        step.cached += sequence.cached
        return True

    def _pause_newer(self, sequence: Sequence, step: _Step) -> bool:
        """Takes the pages of the first paused one that came later; False where there is none."""
        newer = [s for s in step.paused if s.arrival > sequence.arrival]
        if newer:
            step.paused.remove(newer[0])
            self._preempt(newer[0])
            step.preempted.append(newer[0].id)
        return bool(newer)

    def _grow(self, sequence: Sequence, step: _Step) -> bool:
        """Pages for the sequence's next row, at the cost of paused ones, then of the newest; False
        if it is that."""
        while not sequence.table.grow(sequence.known):
            victim = step.paused.pop(0) if step.paused else self.running[-1]
            self._preempt(victim)
            step.take_back(victim)
            if victim is sequence:
                return False
        return True

    def _preempt(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        sequence.leave()
        sequence.preemptions += 1
        bisect.insort(self.waiting, sequence, key=_arrival)
        self._preempted[sequence] = None


class _Step:
    """A step as the walk fills it. rows: by sequence. paused: in the order in which they yield."""

    def __init__(self, room: int, choice: Choice, paused: list[Sequence]) -> None:
        self.room = room
        self.rows: dict[Sequence, int] = {}
        self.paused = paused
        self.preempted: list[str] = []
        self.cached = 0
        self._most = choice.rows or {}

    def give(self, sequence: Sequence) -> None:
        """As many rows as it misses, as the policy lets it have, and as there are."""
        rows = min(sequence.missing, self._most.get(sequence.id, sequence.missing), self.room)
        if rows:
            self.rows[sequence] = rows
            self.room -= rows

    def take_back(self, sequence: Sequence) -> None:
        """It has lost its pages."""
        self.room += self.rows.pop(sequence, 0)
        self.preempted.append(sequence.id)


def _arrival(sequence: Sequence) -> float:
    return sequence.arrival


def _able(sequences: Iterable[Sequence], barrier: float) -> Iterable[Sequence]:
    """Those that a step could compute."""
    return (s for s in sequences if s.table.pages or (s.ready and s.arrival <= barrier))


def _in_turn(able: list[Sequence], policy: UnmergeOnly, now: float) -> list[Sequence]:
    """What `policy` says of requests of one priority, in order of arrival."""
    late = bool(able) and now - able[0].arrival > policy.max_wait  # else nobody has waited so long

    def turn(s: Sequence) -> tuple[bool, bool]:
        return not late or s.wait(now) <= policy.max_wait, not s.table.pages

    return sorted(able, key=turn)[: policy.size]


def _ready(sequence: Sequence, now: float) -> Candidate:
    return Candidate(
        sequence.id,
        sequence.slot,
        sequence.arrival,
        sequence.wait(now),
        sequence.missing,
        sequence.computed,
        sequence.left,
        bool(sequence.table.pages),
        sequence.deadline,
        sequence.priority,
    )


def _chunks(scheduled: Mapping[Sequence, int], live: int) -> tuple[Chunk, ...]:
    """The next so many positions of each sequence, one adapter after the other."""
    chunks: list[Chunk] = []
    row = 0
    for sequence, length in sorted(
        scheduled.items(), key=lambda item: order_of(item[0].slot, live)
    ):
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
