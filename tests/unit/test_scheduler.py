"""The scheduler alone: budgets hold, the oldest advances, pages add up."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from vlora.engine.plan import StepPlan
from vlora.engine.scheduler import Budgets, Scheduler
from vlora.engine.sequence import Sequence
from vlora.memory.kv import BlockTable
from vlora.memory.pool import PagePool
from vlora.model.inputs import Prompt
from vlora.request import Request
from vlora.sampling import SamplingParams


def sequence(
    pool: PagePool, name: str, prompt: int, block: int = 4, slot: int = -1, arrival: float = 0.0
) -> Sequence:
    request = Request(id=name, prompt="", sampling=SamplingParams())
    table = BlockTable(pool, block)
    made = Sequence(request, Prompt.of_text(range(prompt)), slot, 100, table)
    made.arrival = arrival
    return made


def carry_out(scheduler: Scheduler, plan: StepPlan) -> None:
    """What the engine does with a plan, without a model: every finished chunk says a token."""
    by_id = {s.id: s for s in scheduler.running}
    for chunk in plan.chunks:
        by_id[chunk.sequence_id].computed += chunk.length
        if chunk.completes:
            by_id[chunk.sequence_id].tokens.append(7)


@settings(deadline=None, max_examples=200)
@given(
    prompts=st.lists(st.integers(1, 40), min_size=1, max_size=12),
    answers=st.integers(1, 10),
    sequences=st.integers(1, 6),
    rows=st.integers(6, 50),
    block=st.sampled_from([1, 4, 16]),
    slack=st.integers(0, 20),
)
def test_every_sequence_finishes_within_the_budgets(
    prompts: list[int], answers: int, sequences: int, rows: int, block: int, slack: int
) -> None:
    pool = PagePool(-(-(max(prompts) + answers) // block) + slack)
    scheduler = Scheduler(Budgets(sequences, rows))
    for index, prompt in enumerate(prompts):
        scheduler.add(sequence(pool, f"s{index}", prompt, block, arrival=index))
    finished: list[str] = []
    for _ in range(5000):
        plan = scheduler.schedule()
        assert plan.rows <= rows
        assert len(scheduler.running) <= sequences
        assert plan.chunks, "there is work, and nothing is done"
        names = [chunk.sequence_id for chunk in plan.chunks]
        assert len(set(names)) == len(names)
        assert not set(names) & set(plan.preempted)
        carry_out(scheduler, plan)
        for running in list(scheduler.running):
            if running.output_length == answers:
                finished.append(running.id)
                scheduler.remove(running)
        pool.check_integrity()
        if scheduler.idle:
            break
    assert sorted(finished) == sorted(f"s{i}" for i in range(len(prompts)))
    assert pool.used == 0


def test_rows_that_continue_an_answer_come_before_prompts() -> None:
    pool = PagePool(100)
    scheduler = Scheduler(Budgets(4, 8))
    scheduler.add(sequence(pool, "first", 3))
    carry_out(scheduler, scheduler.schedule())
    scheduler.add(sequence(pool, "second", 20))
    plan = scheduler.schedule()
    assert {(c.sequence_id, c.length, c.completes) for c in plan.chunks} == {
        ("first", 1, True),
        ("second", 7, False),
    }
    assert plan.decode_rows == 1


def test_chunks_of_one_adapter_are_neighbours() -> None:
    pool = PagePool(100)
    scheduler = Scheduler(Budgets(8, 100))
    for index, slot in enumerate([2, -1, 0, 2, -1, 0]):
        scheduler.add(sequence(pool, f"s{index}", 3, slot=slot))
    assert [chunk.slot for chunk in scheduler.schedule().chunks] == [-1, -1, 0, 0, 2, 2]


def test_the_newest_gives_its_pages_to_the_oldest() -> None:
    pool = PagePool(9)
    scheduler = Scheduler(Budgets(4, 100))
    old, new = sequence(pool, "old", 4, 1), sequence(pool, "new", 4, 1, arrival=1.0)
    scheduler.add(old)
    scheduler.add(new)
    carry_out(scheduler, scheduler.schedule())
    plan = scheduler.schedule()
    assert [chunk.sequence_id for chunk in plan.chunks] == ["old"]
    assert plan.preempted == ("new",)
    assert (new.computed, new.known, new.table.pages) == (0, 5, [])
    assert scheduler.waiting[0] is new


def test_a_sequence_waits_until_all_it_knows_fits() -> None:
    pool = PagePool(5)
    scheduler = Scheduler(Budgets(4, 100))
    scheduler.add(sequence(pool, "a", 3, 1))
    scheduler.add(sequence(pool, "b", 3, 1))
    assert [chunk.sequence_id for chunk in scheduler.schedule().chunks] == ["a"]
    assert pool.free == 2
