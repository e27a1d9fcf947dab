"""Loads of the scheduler without an engine: batches stay full, and waits stay bounded.

`tests/engine/test_drawn_loads.py` has random loads of the whole engine.
"""

from __future__ import annotations

import itertools
import math

import pytest

from benchmarks.replay import resident_adapter
from tests.support.policy_costs import FixedCosts
from vlora.engine.plan import StepPlan
from vlora.engine.policies.base import Policy
from vlora.engine.policies.credit import CreditPolicy
from vlora.engine.policies.predictive import Predictive
from vlora.engine.policies.unmerge_only import UnmergeOnly
from vlora.engine.scheduler import Budgets, Scheduler
from vlora.engine.sequence import Sequence
from vlora.ids import BASE
from vlora.memory.kv_cache import BlockTable
from vlora.memory.pool import PagePool
from vlora.model.inputs import text_prompt
from vlora.request import Request
from vlora.sampling import SamplingParams

STEP = 0.1
"""Seconds of a simulated step."""


class Load:
    """A scheduler whose steps take STEP seconds each.

    policy: policy under test. sequences, rows, pages, block: limits of the scheduler and the pool.
    """

    def __init__(
        self, policy: Policy, *, sequences: int, rows: int, pages: int = 500, block: int = 16
    ) -> None:
        self.pool, self.block, self.rows = PagePool(pages), block, rows
        self.scheduler = Scheduler(Budgets(sequences, rows), policy)
        self.now = 0.0
        self.live = BASE
        self.answers: dict[str, int] = {}
        self.first_wait: dict[str, float] = {}
        """Seconds that each request waited before it was first computed."""
        self.ended: list[str] = []
        self._count = itertools.count()

    def add(self, prompt: int, answer: int, slot: int = BASE, **sampling: float | None) -> Sequence:
        """Queue a request that arrives now."""
        name = f"r{next(self._count)}"
        request = Request(name, "", SamplingParams(max_tokens=answer, **sampling))  # type: ignore[arg-type]
        table = BlockTable(self.pool, self.block)
        adapter = resident_adapter(slot)
        sequence = Sequence(request, text_prompt([0] * prompt), adapter, answer, table)
        sequence.queue_at(self.now)
        self.answers[name] = answer
        self.scheduler.add(sequence)
        return sequence

    def step(self) -> StepPlan:
        """Compute one step; check the plan and the page accounting."""
        plan = self.scheduler.schedule(self.now, self.live)
        computed = {chunk.sequence_id for chunk in plan.chunks}
        assert len(computed) == len(plan.chunks)
        assert plan.rows <= self.rows
        assert not computed & set(plan.preempted)
        idle = [s for s in self.scheduler.running if s.id not in computed]
        assert self.scheduler.paused == len(idle)
        running = {s.id: s for s in self.scheduler.running}
        for chunk in plan.chunks:
            sequence = running[chunk.sequence_id]
            waited = self.now - sequence.arrival
            self.first_wait.setdefault(sequence.id, waited)
            sequence.computed += chunk.length
            if chunk.completes:
                sequence.tokens.append(0)
                if sequence.output_length == self.answers[sequence.id]:
                    self.ended.append(sequence.id)
                    self.scheduler.remove(sequence)
        self.pool.check_integrity()
        self.live = plan.live
        self.now += STEP
        return plan


def policies(batch: int, rows: int, max_wait: float) -> dict[str, Policy]:
    """Return one policy of each kind that bounds waits."""
    return {
        "unmerge_only": UnmergeOnly(batch, max_wait),
        "credit": CreditPolicy(batch, 0.5, 4.0, max_wait, FixedCosts()),
        "predictive": Predictive(batch, rows, max_wait, FixedCosts()),
    }


@pytest.mark.parametrize("name", ["unmerge_only", "credit", "predictive"])
@pytest.mark.parametrize("urgent", [False, True], ids=["overdue", "higher priority"])
def test_requests_that_find_no_slot_do_not_pause_those_that_run(name: str, urgent: bool) -> None:
    """Queue 31 long requests for 16 slots, of which 15 become overdue or are preferred."""
    load = Load(policies(16, 512, math.inf if urgent else 1.0)[name], sequences=16, rows=512)
    for _ in range(16):
        load.add(4, 200)
    load.step()
    for _ in range(15):
        load.add(4, 200, priority=-1 if urgent else 0)
    steps = []
    while not load.scheduler.idle:
        steps.append(len(load.step().chunks))
        assert len(steps) < 1000, f"{len(load.ended)} requests have ended"
    # The last step of a round may be followed by one that prefills the next.
    assert sum(rows < 15 for rows in steps) <= 4
    assert len(steps) <= 2 * 200 + 10


@pytest.mark.parametrize("name", ["unmerge_only", "credit", "predictive"])
def test_requests_that_find_no_pages_do_not_pause_those_that_run(name: str) -> None:
    load = Load(policies(8, 512, 1.0)[name], sequences=8, rows=512, pages=8, block=64)
    for _ in range(7):
        load.add(4, 36)  # One page each.
    load.step()
    for _ in range(7):
        load.add(120, 5)  # Two pages each, and one is free.
    assert [len(load.step().chunks) for _ in range(35)] == [7] * 35
    while not load.scheduler.idle:
        load.step()
        assert load.now < 60.0
    assert len(load.ended) == 14


@pytest.mark.parametrize("name", ["unmerge_only", "credit", "predictive"])
def test_preferred_requests_that_never_end_delay_another_by_the_bound_only(name: str) -> None:
    """Keep 12 requests of a higher priority in the queue at all times."""
    load = Load(policies(2, 64, 1.0)[name], sequences=2, rows=64)
    cold = load.add(4, 3)
    while cold.id not in load.ended:
        while len(load.scheduler.waiting) < 12:
            load.add(4, 3, priority=-1)
        load.step()
        assert load.now <= 1.0 + (math.ceil(13 / 2) * 3 + 1) * STEP + 3 * STEP
