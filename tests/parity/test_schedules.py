"""Parity of the engine with the oracle under any schedule of requests and live adapters."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support.modes import drive
from tests.support.questions import Case
from tests.support.schedules import Arrival, Schedule, Tally, check, run
from vlora import backends
from vlora.config import AUTO, Options
from vlora.engine.engine import Engine
from vlora.ids import BASE

arrivals = st.builds(
    Arrival,
    case=st.integers(0, 10_000),
    step=st.integers(0, 12),
    abort_after=st.one_of(st.none(), st.none(), st.none(), st.integers(0, 15)),
)
schedules = st.builds(
    Schedule,
    arrivals=st.lists(arrivals, min_size=1, max_size=10).map(tuple),
    sequences=st.integers(1, 8),
    rows=st.sampled_from([8, 9, 17, 40, 64, 129, 1024]),
    block_size=st.sampled_from([1, 3, 16, 64]),
    slack=st.sampled_from([0, 0, 1, 8, 500]),
    kernels=st.sampled_from(sorted({"reference", backends.backend_of("kernels")})),
    cramped=st.booleans(),
    live_slots=st.lists(st.integers(0, 5), max_size=9).map(tuple),
    in_order=st.booleans(),
)


@pytest.mark.slow
@settings(
    max_examples=60,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(schedule=schedules)
def test_tokens_and_scores_equal_the_oracles_under_any_schedule(
    schedule: Schedule,
    cases: list[Case],
    checkpoint: Path,
    parity_adapters: Path,
    tally: Tally,
    packed: dict[str, int],
) -> None:
    largest = max(packed.values())
    longest = max(case.length + case.max_tokens for case in cases)
    pages = -(-longest // schedule.block_size) + schedule.slack
    engine = Engine(
        Options(
            model=checkpoint,
            adapters=parity_adapters,
            max_num_seqs=schedule.sequences,
            max_num_batched_tokens=schedule.rows,
            block_size=schedule.block_size,
            kv_cache_tokens=pages * schedule.block_size,
            adapter_pool_bytes=largest if schedule.cramped else AUTO,
        )
    )
    base = engine.slab.digest()
    if schedule.live_slots:
        slots, numbers = [BASE, *range(len(engine.adapters.names()))], schedule.live_slots

        def live(step: int) -> int:
            slot = slots[numbers[step % len(numbers)]]
            return slot if slot in engine.adapters.resident else BASE

        drive(engine, live, in_order=schedule.in_order)
    with backends.override("kernels", schedule.kernels):
        outputs = run(engine, schedule, cases)
    for index, arrival in enumerate(schedule.arrivals):
        check(cases[arrival.case % len(cases)], arrival, outputs[f"r{index}"], tally)
    assert engine.pool.kv == 0
    assert engine.slab.digest() == base


@pytest.fixture(scope="module")
def packed(checkpoint: Path, parity_adapters: Path) -> dict[str, int]:
    """Return the bytes of each adapter's packed matrices."""
    store = Engine(Options(model=checkpoint, adapters=parity_adapters)).adapters
    return {name: store.tiers.packed_bytes(store.handle(name)) for name in store.names()}


def test_too_few_pages_preempt_a_request_without_changing_tokens(
    cases: list[Case],
    checkpoint: Path,
    parity_adapters: Path,
    tally: Tally,
    packed: dict[str, int],
) -> None:
    """Two answers grow and there are pages for one, which random schedules rarely produce."""
    growing = [i for i, case in enumerate(cases) if len(case.expected.tokens) > 16][:2]
    longest = max(cases[i].length + cases[i].max_tokens for i in growing)
    engine = Engine(
        Options(
            model=checkpoint,
            adapters=parity_adapters,
            max_num_seqs=4,
            block_size=1,
            max_num_batched_tokens=512,
            kv_cache_tokens=longest + 4,
            adapter_pool_bytes=sum(packed.get(cases[i].question.adapter or "", 0) for i in growing),
        )
    )
    arrivals = tuple(Arrival(i, 0, None) for i in growing)
    outputs = run(engine, Schedule(arrivals, 4, 512, 1, 0), cases)
    assert engine.stats().preemptions > 0
    for index, arrival in enumerate(arrivals):
        check(cases[arrival.case], arrival, outputs[f"r{index}"], tally)
