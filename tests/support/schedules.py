"""Schedules of requests for an engine, and the check of its outputs against the oracle."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import torch

from tests.support.oracle import Greedy
from tests.support.questions import Case
from vlora.backends import Backend
from vlora.engine.engine import Engine
from vlora.errors import Cancelled
from vlora.request import Output

HEAD_TOLERANCE = 1e-4
"""Allowed difference of a head's softmax scores."""

MAX_STEPS = 3000
"""Number of steps after which a run counts as stuck."""


@dataclass
class Tally:
    """Number of tokens compared with the oracle's, and of those that differ by a near-tie."""

    tokens: int = 0
    ties: int = 0


@dataclass(frozen=True)
class Arrival:
    """A request that arrives before step `step`. Its case is `case` modulo the number of cases.

    abort_after: number of steps until its abort, or None.
    """

    case: int
    step: int
    abort_after: int | None


@dataclass(frozen=True)
class Schedule:
    """Arrivals of requests, and the limits of the engine that serves them.

    sequences, rows: maximum numbers of running requests, and of rows per step.
    slack: number of pages beyond those that the longest request needs.
    kernels: backend of the step's kernels.
    live_slots: slots of the adapters merged into the weights, one per step, repeated. If empty, the
        engine chooses.
    in_order: whether the rows of a step are sorted for the live adapter.
    cramped: whether the pool holds only the largest adapter, so that adapters evict each other.
    """

    arrivals: tuple[Arrival, ...]
    sequences: int
    rows: int
    block_size: int
    slack: int
    kernels: Backend = "reference"
    live_slots: tuple[int, ...] = ()
    in_order: bool = True
    cramped: bool = False


def run(engine: Engine, schedule: Schedule, cases: list[Case]) -> dict[str, list[Output]]:
    """Run a schedule and return outputs by request id. Check integrity after every step."""
    outputs: dict[str, list[Output]] = defaultdict(list)
    pending = dict(enumerate(schedule.arrivals))
    for step in range(MAX_STEPS):
        for index in [i for i, arrival in pending.items() if arrival.step <= step]:
            arrival = pending.pop(index)
            request = cases[arrival.case % len(cases)].request(f"r{index}")
            engine.add(engine.prepare(request), arrival=float(step))
        step_outputs = engine.step()
        if engine.stalled:
            engine.adapters.finish()
        for index, arrival in enumerate(schedule.arrivals):
            if arrival.abort_after is not None and arrival.step + arrival.abort_after == step:
                step_outputs += engine.abort(f"r{index}")
        for output in step_outputs:
            outputs[output.request_id].append(output)
        engine.check_integrity()
        if engine.idle and not pending:
            return outputs
    raise AssertionError(f"not finished after {MAX_STEPS} steps")


def check(case: Case, arrival: Arrival, outputs: list[Output], tally: Tally) -> None:
    """Compare a request's outputs with the oracle's. Only an aborted request may end early."""
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
