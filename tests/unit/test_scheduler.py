"""Tests of the scheduler without an engine: budgets, order, preemption, and page accounting.

`tests/engine/test_drawn_loads.py` has random loads of the whole engine.
"""

from __future__ import annotations

import random
from collections import abc
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.baseline_policies import register
from benchmarks.replay import resident_adapter
from tests.support.calls import calls_of
from tests.support.pages import IdleAdapters
from vlora.adapters.handle import AdapterHandle, AdapterState
from vlora.config import POLICIES, Options
from vlora.engine.cost import AdapterSize, CostModel, guess
from vlora.engine.plan import StepPlan
from vlora.engine.policies.base import Candidate, Choice, Order, make_policy
from vlora.engine.policies.unmerge_only import UnmergeOnly
from vlora.engine.scheduler import Budgets, Scheduler, WaitingQueue
from vlora.engine.sequence import Sequence
from vlora.ids import BASE
from vlora.memory.kv_cache import BlockTable
from vlora.memory.pool import PagePool
from vlora.model.inputs import text_prompt
from vlora.request import Request
from vlora.sampling import SamplingParams

register()


def make_sequence(
    pool: PagePool,
    name: str,
    prompt: int,
    block: int = 4,
    slot: int = -1,
    arrival: float = 0.0,
    priority: int = 0,
    deadline_ms: float | None = None,
) -> Sequence:
    params = SamplingParams(priority=priority, deadline_ms=deadline_ms)
    request = Request(id=name, prompt="", sampling=params)
    table = BlockTable(pool, block)
    sequence = Sequence(request, text_prompt(range(prompt)), resident_adapter(slot), 100, table)
    sequence.queue_at(arrival)
    return sequence


def carry_out(scheduler: Scheduler, plan: StepPlan) -> None:
    """Do what the engine does with a plan: each completed chunk yields a token."""
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
    policy=st.sampled_from(sorted(POLICIES)),
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
    """Check every policy, with pages for one sequence up to all of them."""
    pool = PagePool(-(-(max(prompts) + answers) // block) + slack)
    costs = CostModel(guess(10**8, 4, 10**7), lambda slot: AdapterSize(10**6, 10**9))
    options = Options(
        policy=policy, max_num_seqs=sequences, max_num_batched_tokens=rows, max_wait_seconds=1.0
    )
    scheduler = Scheduler(Budgets(sequences, rows), make_policy(options, costs))
    for index, prompt in enumerate(prompts):
        slot = index % adapters - 1
        scheduler.add(make_sequence(pool, f"s{index}", prompt, block, slot, arrival=index / 100))
    finished: list[str] = []
    live = -1
    for step in range(5000):
        plan = scheduler.schedule(1.0 + step / 50, live)
        live = plan.live
        assert plan.rows <= rows
        assert len(scheduler.running) <= sequences
        assert plan.chunks, "there is work, and nothing is computed"
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


def test_decode_rows_come_before_prompts() -> None:
    pool = PagePool(100)
    scheduler = Scheduler(Budgets(4, 8))
    scheduler.add(make_sequence(pool, "first", 3))
    carry_out(scheduler, scheduler.schedule())
    scheduler.add(make_sequence(pool, "second", 20))
    plan = scheduler.schedule()
    assert {(c.sequence_id, c.length, c.completes) for c in plan.chunks} == {
        ("first", 1, True),
        ("second", 7, False),
    }
    assert plan.decode_rows == 1


def test_chunks_of_one_adapter_are_contiguous() -> None:
    pool = PagePool(100)
    scheduler = Scheduler(Budgets(8, 100))
    for index, slot in enumerate([2, -1, 0, 2, -1, 0]):
        scheduler.add(make_sequence(pool, f"s{index}", 3, slot=slot))
    assert [chunk.slot for chunk in scheduler.schedule().chunks] == [-1, -1, 0, 0, 2, 2]


def test_the_newest_sequence_loses_its_pages_to_the_oldest() -> None:
    pool = PagePool(9)
    scheduler = Scheduler(Budgets(4, 100))
    old, new = make_sequence(pool, "old", 4, 1), make_sequence(pool, "new", 4, 1, arrival=1.0)
    scheduler.add(old)
    scheduler.add(new)
    carry_out(scheduler, scheduler.schedule())
    plan = scheduler.schedule()
    assert [chunk.sequence_id for chunk in plan.chunks] == ["old"]
    assert plan.preempted == ("new",)
    assert (new.computed, new.known, new.table.pages) == (0, 5, [])
    assert scheduler.waiting[0] is new


def test_a_sequence_waits_until_all_its_known_tokens_fit() -> None:
    pool = PagePool(5)
    scheduler = Scheduler(Budgets(4, 100))
    scheduler.add(make_sequence(pool, "a", 3, 1))
    scheduler.add(make_sequence(pool, "b", 3, 1))
    assert [chunk.sequence_id for chunk in scheduler.schedule().chunks] == ["a"]
    assert pool.free == 2


class Only:
    """A policy that runs the named requests, in this order."""

    uses_costs = False
    merges = True
    orders = (Order.ARRIVAL,)
    max_batch = 1

    def __init__(self, *names: str, **credits: float) -> None:
        self.names = names
        self.credits = credits

    def choose(self, ready: list[Candidate], live: int, now: float) -> Choice:
        by_id = {r.id: r for r in ready}
        order = tuple(by_id[name] for name in self.names if name in by_id)
        return Choice(order, live, credits=self.credits)


def test_a_paused_sequence_keeps_its_pages_until_a_chosen_one_needs_them() -> None:
    pool = PagePool(10)
    scheduler = Scheduler(Budgets(4, 100))
    names = ("oldest", "a", "b", "grows")
    sequences = {n: make_sequence(pool, n, 2, 1, arrival=i) for i, n in enumerate(names)}
    for sequence in sequences.values():
        scheduler.add(sequence)
    carry_out(scheduler, scheduler.schedule())
    scheduler.policy = Only("grows", oldest=0.0, a=2.0, b=1.0)
    held = {name: len(s.table.pages) for name, s in sequences.items()}
    for _ in range(2):
        plan = scheduler.schedule()
        assert [chunk.sequence_id for chunk in plan.chunks] == ["grows"]
        assert plan.preempted == ()
        carry_out(scheduler, plan)
    assert {n: len(s.table.pages) for n, s in sequences.items()} == {**held, "grows": 4}
    plan = scheduler.schedule()
    assert plan.preempted == ("b",), "the lowest credit but the oldest sequence"
    assert sequences["b"].table.pages == []


def test_a_paused_sequence_runs_in_the_place_of_one_that_lost_its_pages() -> None:
    pool = PagePool(3)
    scheduler = Scheduler(Budgets(3, 100), Only("old", "grows", "new"))
    for arrival, (name, words) in enumerate({"old": 2, "grows": 4, "new": 2}.items()):
        scheduler.add(make_sequence(pool, name, words, arrival=arrival))
    carry_out(scheduler, scheduler.schedule())
    scheduler.policy = Only("grows", "new")
    scheduler.policy.max_batch = 2
    plan = scheduler.schedule()
    assert plan.preempted == ("new",)
    assert {chunk.sequence_id for chunk in plan.chunks} == {"grows", "old"}


def test_a_paused_sequence_that_cannot_grow_leaves_its_place_to_the_next() -> None:
    pool = PagePool(7)
    scheduler = Scheduler(Budgets(4, 8), Only("stuck", "decodes", "long"))
    for arrival, (name, words) in enumerate({"long": 20, "stuck": 4, "decodes": 2}.items()):
        scheduler.add(make_sequence(pool, name, words, arrival=arrival))
    carry_out(scheduler, scheduler.schedule())
    scheduler.add(make_sequence(pool, "waits", 4, arrival=9.0))
    scheduler.policy = Only("decodes", "waits")
    scheduler.policy.max_batch = 2
    assert {chunk.sequence_id for chunk in scheduler.schedule().chunks} == {"decodes", "long"}


def test_wait_is_the_time_ready_but_not_scheduled_and_never_resets() -> None:
    pool = PagePool(100)
    scheduler = Scheduler(Budgets(4, 100), Only("a"))
    a, b = make_sequence(pool, "a", 2), make_sequence(pool, "b", 2, arrival=1.0)
    scheduler.add(a)
    scheduler.add(b)
    scheduler.schedule(3.0)
    assert (a.candidate(3.0).wait, b.candidate(3.0).wait) == (3.0, 2.0)
    carry_out(scheduler, scheduler.schedule(5.0))
    assert (a.candidate(5.0).wait, b.candidate(5.0).wait) == (3.0, 4.0)
    scheduler.policy = Only("b")
    scheduler.schedule(6.0)
    scheduler.schedule(9.0)
    assert (a.candidate(9.0).wait, b.candidate(9.0).wait) == (6.0, 5.0)


class IdleAdapter(IdleAdapters):
    """An adapter in the pool without requests; evictable unless it is protected."""

    def __init__(self, pool: PagePool, count: int, slot: int) -> None:
        super().__init__(pool)
        run = pool.allocate_run(count)
        assert run is not None
        self.add(run)
        self.slot, self.protected = slot, BASE

    def evictable_pages(self, enough: int) -> int:
        return 0 if self.protected == self.slot else super().evictable_pages(enough)

    def oldest_use(self) -> int | None:
        return super().oldest_use() if self.evictable_pages(1) else None


class AlwaysMerge:
    """A policy that always wants the adapter in slot 3 merged."""

    uses_costs = False
    merges = True
    orders = (Order.ARRIVAL,)
    max_batch = 4

    def choose(self, ready: abc.Sequence[Candidate], live: int, now: float) -> Choice:
        return Choice(tuple(ready), 3)


def test_the_live_adapter_is_evicted_if_nothing_could_run_otherwise() -> None:
    pool = PagePool(4)
    idle = IdleAdapter(pool, 3, 3)
    scheduler = Scheduler(
        Budgets(4, 100), AlwaysMerge(), protect=partial(setattr, idle, "protected")
    )
    scheduler.add(make_sequence(pool, "big", 3, 1))
    plan = scheduler.schedule()
    assert [chunk.sequence_id for chunk in plan.chunks] == ["big"]
    assert plan.live == BASE


def test_the_oldest_begins_in_the_step_in_which_the_last_running_one_loses_its_pages() -> None:
    """Make the idle adapter's pages evictable only while no sequence runs."""
    pool = PagePool(6)
    adapter = IdleAdapter(pool, 3, 3)
    scheduler = Scheduler(Budgets(4, 100), Only("runs"))
    scheduler.add(make_sequence(pool, "runs", 3, 1, arrival=1.0))
    carry_out(scheduler, scheduler.schedule())
    is_idle = adapter.evictable_pages

    def evictable_pages(enough: int) -> int:
        return 0 if scheduler.running else is_idle(enough)

    adapter.evictable_pages = evictable_pages  # type: ignore[method-assign]
    scheduler.add(make_sequence(pool, "oldest", 4, 1))
    scheduler.policy = Only("oldest")
    plan = scheduler.schedule()
    assert [chunk.sequence_id for chunk in plan.chunks] == ["oldest"]
    assert plan.preempted == ("runs",)


@settings(deadline=None, max_examples=150)
@given(
    asked=st.lists(st.tuples(st.integers(0, 12), st.integers(1, 9)), min_size=1, max_size=14),
    sequences=st.integers(1, 4),
    batch=st.integers(1, 5),
    pages=st.integers(0, 12),
    max_wait=st.sampled_from([0.5, 3.5, 1e9]),
    cutoff=st.sampled_from([6.0, 1e9]),
    unready=st.integers(0, 2),
    priorities=st.lists(st.sampled_from([-1, 0, 0, 2]), min_size=14, max_size=14),
)
def test_unmerge_only_chooses_from_the_first_candidates_what_it_would_choose_from_all(
    asked: list[tuple[int, int]],
    sequences: int,
    batch: int,
    pages: int,
    max_wait: float,
    cutoff: float,
    unready: int,
    priorities: list[int],
) -> None:
    """Compare plans for sequences that are preempted, overdue, ready late or after the cutoff."""
    all_plans = []
    for candidates in (batch, len(asked)):
        pool = PagePool(8 + pages)
        policy = UnmergeOnly(batch, max_wait)
        scheduler = Scheduler(Budgets(sequences, 12, candidates), policy)
        todo = [
            (at, make_sequence(pool, f"s{i}", words, 2, i % 3 - 1, at + i / 100, priorities[i]))
            for i, (at, words) in enumerate(sorted(asked))
        ]
        late = [s.adapter for _, s in todo if s.adapter is not None][:unready]
        plans = []
        for now in range(60):
            while todo and todo[0][0] <= now:
                scheduler.add(todo.pop(0)[1])
            for adapter in late:
                adapter.state = AdapterState.RESIDENT if now > 8 else AdapterState.ON_DISK
            plan = scheduler.schedule(now, arrival_cutoff=cutoff if now < 20 else 1e9)
            carry_out(scheduler, plan)
            chunks = [(c.sequence_id, c.length) for c in plan.chunks]
            plans.append((chunks, plan.preempted, scheduler.paused))
            for s in [s for s in scheduler.running if s.output_length >= 4]:
                scheduler.remove(s)
        all_plans.append(plans)
    assert all_plans[0] == all_plans[1]


@settings(deadline=None, max_examples=100)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["add", "add", "remove", "replace"]),
            st.integers(0, 20),
            st.integers(-1, 3),
        ),
        max_size=40,
    ),
    st.randoms(use_true_random=False),
)
def test_the_first_sequence_of_each_adapter_is_found_in_order_of_arrival(
    changes: list[tuple[str, int, int]], draw: object
) -> None:
    queue = WaitingQueue()
    adapters = {slot: resident_adapter(slot) for slot in range(-1, 4)}
    held: list[Sequence] = []
    arrivals = list(range(len(changes)))
    draw.shuffle(arrivals)  # type: ignore[attr-defined]
    for arrival, (change, index, slot) in zip(arrivals, changes, strict=True):
        adapter = adapters[slot]
        if change == "add":
            held.append(make_sequence(PagePool(1), str(arrival), 1, arrival=arrival))
            held[-1].adapter = adapter
            queue.add(held[-1])
        elif held and change == "remove":
            queue.remove(held.pop(index % len(held)))
        elif held and adapter is not None:
            queue.use_adapter(held[index % len(held)], adapter)
        expected: dict[AdapterHandle, Sequence] = {}
        for sequence in sorted(held, key=lambda s: s.arrival):
            if sequence.adapter is not None:
                expected.setdefault(sequence.adapter, sequence)
        assert list(queue.first_of_each_adapter().items()) == list(expected.items())


def test_a_preempted_sequence_goes_on_with_the_version_with_which_it_began() -> None:
    sequence = make_sequence(PagePool(100), "a", 8, slot=0)
    first = sequence.adapter
    sequence.begin()
    sequence.leave()
    sequence.adapter = resident_adapter(1)
    sequence.begin()
    assert sequence.held_adapter is first is not sequence.adapter


def busy_scheduler(policy: str, waiting: int, kinds: str) -> Scheduler:
    """Return a scheduler with 64 running requests and a queue.

    kinds: which of "priorities", "deadlines" and "unready" adapters the queue has, in one string.
    """
    draw, pool = random.Random(1), PagePool(2000)
    costs = CostModel(guess(10**8, 4, 10**7), lambda slot: AdapterSize(10**6, 10**9))
    scheduler = Scheduler(Budgets(64, 1024))
    unready = resident_adapter(0)
    assert unready is not None
    unready.state = AdapterState.ON_DISK
    for i in range(64):
        scheduler.add(make_sequence(pool, f"runs{i}", 4, slot=i % 8 - 1, arrival=i * 1e-6))
    carry_out(scheduler, scheduler.schedule(0.1))
    carry_out(scheduler, scheduler.schedule(0.2))
    scheduler.policy = make_policy(Options(policy=policy), costs)
    for i in range(waiting):
        priority = draw.choice([-1, 0, 3]) if "priorities" in kinds else 0
        deadline_ms = draw.uniform(1e5, 1e6) if "deadlines" in kinds else None
        slot, words = draw.randrange(-1, 8), draw.randrange(2, 100)
        arrival = 0.2 + i * 1e-5
        added = make_sequence(
            pool, f"s{i}", words, 4, slot, arrival, priority, deadline_ms=deadline_ms
        )
        if "unready" in kinds and i % 10:
            added.adapter = unready
        scheduler.add(added)
    return scheduler


@pytest.mark.parametrize("kinds", ["", "priorities", "deadlines", "priorities deadlines unready"])
@pytest.mark.parametrize("name", POLICIES)
def test_the_work_of_a_step_does_not_grow_with_the_queue(name: str, kinds: str) -> None:
    asked: list[int] = []
    calls: list[int] = []
    for waiting in (256, 1024):
        scheduler = busy_scheduler(name, waiting, kinds)
        choose, orders = scheduler.policy.choose, scheduler.policy.orders

        def counted(
            ready: abc.Sequence[Candidate],
            live: int,
            now: float,
            choose: abc.Callable[..., Choice] = choose,
        ) -> Choice:
            asked.append(len(ready))
            return choose(ready, live, now)

        scheduler.policy.choose = counted  # type: ignore[method-assign]
        calls.append(calls_of(partial(scheduler.schedule, 0.3)).total())
        assert asked[-1] <= 64 + 16 * len(orders)
    # The shorter queue may have fewer sequences for the policy to see.
    assert calls[1] / asked[1] <= 1.1 * calls[0] / asked[0], asked
    assert calls[1] <= 64 * 45
