"""Engine tokens equal the oracle's, whatever the schedule."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.parity.conftest import Tally
from tests.support.modes import drive
from tests.support.oracle import Greedy
from tests.support.questions import Case
from vlora import backends
from vlora.backends import Backend
from vlora.config import AUTO, Options
from vlora.engine.engine import Engine
from vlora.errors import Cancelled
from vlora.ids import BASE
from vlora.request import Output

HEAD_TOLERANCE = 1e-4
MOST_STEPS = 3000


@dataclass(frozen=True)
class Arrival:
    case: int
    step: int
    abort_after: int | None


@dataclass(frozen=True)
class Schedule:
    """arrivals of cases by step; budgets; slack: pages beyond what the longest request needs;
    kernels: compiled, or their twins. lives: numbers of the adapters in the weights, step by step
    and again; none: as the engine has it. in_order: its rows are sorted for that. cramped: the pool
    has room for the largest adapter alone, so that others are evicted and come again."""

    arrivals: tuple[Arrival, ...]
    sequences: int
    rows: int
    block_size: int
    slack: int
    kernels: Backend = "reference"
    lives: tuple[int, ...] = ()
    in_order: bool = True
    cramped: bool = False


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
    lives=st.lists(st.integers(0, 5), max_size=9).map(tuple),
    in_order=st.booleans(),
)


def run(engine: Engine, schedule: Schedule, cases: list[Case]) -> dict[str, list[Output]]:
    """Every output by request id; integrity is checked after every step."""
    outputs: dict[str, list[Output]] = defaultdict(list)
    pending = dict(enumerate(schedule.arrivals))
    for step in range(MOST_STEPS):
        for index in [i for i, arrival in pending.items() if arrival.step <= step]:
            arrival = pending.pop(index)
            request = cases[arrival.case % len(cases)].request(f"r{index}")
            engine.add(engine.prepare(request), arrival=float(step))
        news = engine.step()
        if engine.stalled:
            engine.adapters.finish()
            engine.on_news()
        for index, arrival in enumerate(schedule.arrivals):
            if arrival.abort_after is not None and arrival.step + arrival.abort_after == step:
                news += engine.abort(f"r{index}")
        for output in news:
            outputs[output.request_id].append(output)
        engine.check_integrity()
        if engine.idle and not pending:
            return outputs
    raise AssertionError(f"not finished after {MOST_STEPS} steps")


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
    if schedule.lives:
        slots, lives = [BASE, *range(len(engine.adapters.names()))], schedule.lives

        def live(step: int) -> int:
            slot = slots[lives[step % len(lives)]]
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
    """Bytes of each adapter's packed copies."""
    store = Engine(Options(model=checkpoint, adapters=parity_adapters)).adapters
    return {name: store.packed_bytes(store.handle(name)) for name in store.names()}


def check(case: Case, arrival: Arrival, outputs: list[Output], tally: Tally) -> None:
    """One request's outputs against the oracle; an aborted one may end early, but only so."""
    last = outputs[-1]
    assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
    if last.error is not None:
        assert isinstance(last.error, Cancelled)
        assert arrival.abort_after is not None
    if case.question.use_head:
        if last.head is not None:
            torch.testing.assert_close(
                torch.tensor(last.head.scores), case.scores, rtol=0.0, atol=HEAD_TOLERANCE
            )
        return
    tokens = [token for output in outputs for token in output.token_ids]
    expected = case.expected
    if last.error is not None:
        if not tokens:
            return
        count = len(tokens)
        expected = Greedy(expected.tokens[:count], expected.gaps[:count])
    tally.ties += case.oracle.near_ties(case.question, expected, tokens)
    tally.tokens += len(tokens)


def test_page_pressure_really_preempts(
    cases: list[Case],
    checkpoint: Path,
    parity_adapters: Path,
    tally: Tally,
    packed: dict[str, int],
) -> None:
    """The schedule that the drawn ones hope for: two growing answers and pages for one."""
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
