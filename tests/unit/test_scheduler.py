"""The scheduler alone: budgets hold, the oldest advances, pages add up."""

from __future__ import annotations

from collections.abc import Sequence as Sequence_
from functools import partial

from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.policies.simulation import resident_adapter
from vlora.config import Options
from vlora.engine.cost import AdapterSize, CostModel, guess
from vlora.engine.plan import StepPlan
from vlora.engine.policies.base import Candidate, Choice
from vlora.engine.policies.registry import make_policy
from vlora.engine.policies.unmerge_only import UnmergeOnly
from vlora.engine.scheduler import Budgets, Scheduler
from vlora.engine.sequence import Sequence
from vlora.ids import BASE
from vlora.memory.block_table import BlockTable
from vlora.memory.pool import PagePool
from vlora.model.inputs import Prompt
from vlora.request import Request
from vlora.sampling import SamplingParams


def sequence(
    pool: PagePool, name: str, prompt: int, block: int = 4, slot: int = -1, arrival: float = 0.0
) -> Sequence:
    request = Request(id=name, prompt="", sampling=SamplingParams())
    table = BlockTable(pool, block)
    made = Sequence(request, Prompt.of_text(range(prompt)), resident_adapter(slot), 100, table)
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
    policy=st.sampled_from(
        ["unmerge_only", "merge_only", "dlora", "paper", "credit", "predictive"]
    ),
    adapters=st.integers(1, 4),
)
def test_every_sequence_finishes_within_the_budgets(
    prompts: list[int],
    answers: int,
    sequences: int,
    rows: int,
    block: int,
    slack: int,
    policy: str,
    adapters: int,
) -> None:
    """Under every policy, with pages for one sequence or for all."""
    pool = PagePool(-(-(max(prompts) + answers) // block) + slack)
    costs = CostModel(guess(10**8, 4, 10**7), lambda slot: AdapterSize(10**6, 10**9))
    options = Options(
        policy=policy, max_num_seqs=sequences, max_num_batched_tokens=rows, max_wait_seconds=1.0
    )
    scheduler = Scheduler(Budgets(sequences, rows), make_policy(options, costs))
    for index, prompt in enumerate(prompts):
        slot = index % adapters - 1
        scheduler.add(sequence(pool, f"s{index}", prompt, block, slot, arrival=index / 100))
    finished: list[str] = []
    live = -1
    for step in range(5000):
        plan = scheduler.schedule(1.0 + step / 50, live)
        live = plan.live
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
    assert pool.kv == 0


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


class Only:
    """A policy that runs these, in this order."""

    def __init__(self, *names: str, **credits: float) -> None:
        self.names = names
        self.credits = credits

    def choose(self, ready: list[Candidate], live: int, now: float) -> Choice:
        by_id = {r.id: r for r in ready}
        order = tuple(by_id[name] for name in self.names if name in by_id)
        return Choice(order, live, credits=self.credits)


def test_a_paused_one_keeps_its_pages_until_a_chosen_one_needs_them_lowest_credit_first() -> None:
    pool = PagePool(10)
    scheduler = Scheduler(Budgets(4, 100))
    names = ("oldest", "a", "b", "grows")
    made = {n: sequence(pool, n, 2, 1, arrival=i) for i, n in enumerate(names)}
    for one in made.values():
        scheduler.add(one)
    carry_out(scheduler, scheduler.schedule())
    scheduler.policy = Only("grows", oldest=0.0, a=2.0, b=1.0)
    held = {name: len(one.table.pages) for name, one in made.items()}
    for _ in range(2):
        plan = scheduler.schedule()
        assert [chunk.sequence_id for chunk in plan.chunks] == ["grows"]
        assert plan.preempted == ()
        carry_out(scheduler, plan)
    assert {n: len(one.table.pages) for n, one in made.items()} == {**held, "grows": 4}
    plan = scheduler.schedule()
    assert plan.preempted == ("b",), "not the oldest, whatever its credit"
    assert made["b"].table.pages == []


def test_wait_is_the_time_ready_but_not_scheduled_and_never_resets() -> None:
    pool = PagePool(100)
    scheduler = Scheduler(Budgets(4, 100), Only("a"))
    a, b = sequence(pool, "a", 2), sequence(pool, "b", 2, arrival=1.0)
    scheduler.add(a)
    scheduler.add(b)
    scheduler.schedule(3.0)
    assert (a.wait(3.0), b.wait(3.0)) == (3.0, 2.0)
    carry_out(scheduler, scheduler.schedule(5.0))
    assert (a.wait(5.0), b.wait(5.0)) == (3.0, 4.0)
    scheduler.policy = Only("b")
    scheduler.schedule(6.0)
    scheduler.schedule(9.0)
    assert (a.wait(9.0), b.wait(9.0)) == (6.0, 5.0)


class Idle:
    """An adapter in the pool that nobody runs with, unless it is to be kept."""

    holds_runs = True

    def __init__(self, pool: PagePool, count: int, slot: int) -> None:
        self._pool, self._slot = pool, slot
        self._run = pool.allocate_run(count)
        self.kept = BASE
        pool.evictors.append(self)

    @property
    def evictable_pages(self) -> int:
        return self._run.count if self._run and self.kept != self._slot else 0

    def oldest_use(self) -> int | None:
        return 0 if self.evictable_pages else None

    def evict_oldest(self) -> None:
        assert self._run is not None
        self._pool.release_run(self._run)
        self._run = None


class Always:
    """A policy that wants one adapter in the weights, whatever happens."""

    def choose(self, ready: Sequence_[Candidate], live: int, now: float) -> Choice:
        return Choice(tuple(ready), 3)


def test_the_adapter_in_the_weights_gives_way_where_nothing_else_could_run() -> None:
    pool = PagePool(4)
    idle = Idle(pool, 3, 3)
    scheduler = Scheduler(Budgets(4, 100), Always(), protect=partial(setattr, idle, "kept"))
    scheduler.add(sequence(pool, "big", 3, 1))
    plan = scheduler.schedule()
    assert [chunk.sequence_id for chunk in plan.chunks] == ["big"]
    assert plan.live == BASE


class Asked:
    """`unmerge_only` as any other policy: shown everyone, asked every step."""

    def __init__(self, rule: UnmergeOnly) -> None:
        self.choose = rule.choose


@settings(deadline=None, max_examples=150)
@given(
    asked=st.lists(st.tuples(st.integers(0, 12), st.integers(1, 9)), min_size=1, max_size=14),
    sequences=st.integers(1, 4),
    batch=st.integers(1, 5),
    pages=st.integers(0, 12),
    max_wait=st.sampled_from([0.5, 3.5, 1e9]),
    cutoff=st.sampled_from([6.0, 1e9]),
    unready=st.integers(0, 2),
)
def test_who_is_picked_without_being_shown_is_who_would_be_picked_by_the_policy(
    asked: list[tuple[int, int]],
    sequences: int,
    batch: int,
    pages: int,
    max_wait: float,
    cutoff: float,
    unready: int,
) -> None:
    """Whatever is preempted, overdue, late to be ready, or behind the cutoff for a while."""
    rule = UnmergeOnly(batch, max_wait)
    made = []
    for policy in (rule, Asked(rule)):
        pool = PagePool(8 + pages)
        scheduler = Scheduler(Budgets(sequences, 12), policy)
        todo = [
            (at, sequence(pool, f"s{i}", words, 2, i % 3 - 1, at + i / 100))
            for i, (at, words) in enumerate(sorted(asked))
        ]
        late = [s.adapter for _, s in todo if s.adapter is not None][:unready]
        plans = []
        for now in range(60):
            while todo and todo[0][0] <= now:
                scheduler.add(todo.pop(0)[1])
            for adapter in late:
                adapter.slot = 0 if now > 8 else None
            plan = scheduler.schedule(now, arrival_cutoff=cutoff if now < 20 else 1e9)
            carry_out(scheduler, plan)
            chunks = [(c.sequence_id, c.length) for c in plan.chunks]
            plans.append((chunks, plan.preempted, scheduler.paused))
            for s in [s for s in scheduler.running if s.output_length >= 4]:
                scheduler.remove(s)
        made.append(plans)
    assert made[0] == made[1]


def test_a_step_of_first_come_first_served_looks_at_no_more_of_the_queue_than_a_batch() -> None:
    looked: list[str] = []

    class Watched(Sequence):
        @property
        def ready(self) -> bool:
            looked.append(self.id)
            return super().ready

    scheduler = Scheduler(Budgets(8, 64), UnmergeOnly(8, 30.0))
    pool = PagePool(64)
    for i in range(2000):
        one = sequence(pool, f"s{i}", 5, arrival=float(i))
        one.__class__ = Watched
        scheduler.add(one)
    for now in range(20):
        carry_out(scheduler, scheduler.schedule(2000.0 + now))
    assert len(set(looked)) < 30
    assert len(looked) < 20 * 30
